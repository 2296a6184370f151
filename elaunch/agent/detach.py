"""``elaunch run --detach``: the agent in a session of its own, its output in the run directory.

::

    command: fork ──► reads the pipe: placed, ready ──► prints the run id, ends with 0
                │
    agent:      └─ setsid, stdin from /dev/null ──► run directory: stdout and stderr to console.log
                   ──► ready ──► the loop, as ever

The command reports what goes wrong before the agent is ready, with the agent's exit code. The
hang-up of a terminal is a signal to that terminal's session, which the agent is not in.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from elaunch.config import Settings
from elaunch.endings import INTERRUPTED, exit_code
from elaunch.errors import UsageError
from elaunch.runs.directory import CONSOLE, RunDir

TAIL_BYTES: Final = 16 * 1024


class Detached:
    """The agent's end of the pipe; :meth:`redirect_output`, then :meth:`ready`, then nothing."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def redirect_output(self, run: RunDir) -> None:
        """Send all further output of this process to a file of the run directory."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        console = os.open(run.path / CONSOLE, flags, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(console, 1)
        os.dup2(console, 2)
        os.close(console)
        self._send({"dir": str(run.path)})

    def ready(self, address: str = "") -> None:
        """Let the command end: the run has a record, and its socket answers.

        ``address``: of the run's pages.
        """
        self._send({"ready": True, "dashboard": address})
        os.close(self._pipe)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the command was killed; the agent goes on
            os.write(self._pipe, json.dumps(message).encode() + b"\n")


def check(settings: Settings) -> None:
    """Raise UsageError where a detached agent would not stay, or nothing is to be started."""
    if settings.dry_run:
        raise UsageError("--detach has no effect with --dry-run: leave one of them out")
    if run_id := os.environ.get("ELAUNCH_RUN_ID"):
        raise UsageError(
            f"--detach: this is a worker of run {run_id}, and what it starts ends with it: leave "
            "--detach out, or start the job from outside"
        )


def run(settings: Settings, run_agent: Callable[[Settings, Detached | None], int]) -> int:
    """Run the agent in a process of its own; return once it is ready, in both processes.

    In the command's process: 0, or the exit code of an agent that never was ready. In the agent's:
    the job's exit code, at its end. Must be called in the main thread, before there are others,
    and after ``check``.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _wait(pid, reading, settings)
    os.close(reading)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return run_agent(settings, Detached(writing))


def _wait(pid: int, pipe: int, settings: Settings) -> int:
    """Wait until the agent is ready or has ended; print which."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        directory, ready, address = _receive(pipe)
        if ready and directory is not None:
            _announce(settings, directory)
            if address:
                print(f"elaunch: dashboard: {address}", file=sys.stderr)
            return 0
        _, status = os.waitpid(pid, 0)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        return INTERRUPTED
    if directory is not None:
        sys.stderr.write(_tail(directory / CONSOLE))
    return exit_code(os.waitstatus_to_exitcode(status)) or 1


def _receive(pipe: int) -> tuple[Path | None, bool, str]:
    """Return where the agent has its record, whether it is ready, and where its pages are.

    It may have ended.
    """
    directory: Path | None = None
    with os.fdopen(pipe, "rb") as lines:
        for line in lines:
            message = json.loads(line)
            if message.get("ready"):
                return directory, True, str(message["dashboard"])
            directory = Path(message["dir"])
    return directory, False, ""


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _announce(settings: Settings, directory: Path) -> None:
    print(settings.run_id, flush=True)
    run = directory.name
    print(
        f"elaunch: detached; `elaunch status {run}`, `elaunch logs -f {run}`, `elaunch stop {run}`;"
        f" its output is in {directory / CONSOLE}",
        file=sys.stderr,
    )


def _tail(path: Path) -> str:
    """Return the end of what an agent that never was ready has printed."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"elaunch: the agent ended before it was ready, and {path}: {error.strerror}\n"
