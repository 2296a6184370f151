"""From a fork of the server to a script that sees no difference: signals, files, random states.

Both start methods share the first half (:func:`detach`): own session, parent-death signal, own
stdout and stderr, signal mask. Then either the script is executed in path, or ``python -u script``
replaces the process. What a script can observe is meant to be the same in both and under torchrun;
tests/integration/test_parity.py compares them, docs/start-methods.md lists the rest.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

from elaunch import env
from elaunch.server import processes, torchfix
from elaunch.wire import recorder

_stacks_files: list[TextIO] = []
"""The file that the handler of env.STACKS_SIGNAL writes to."""
_asked: list[int] = []
"""Signals of commands that want a debugger, and are not answered yet."""


class Job(NamedTuple):
    """One worker to become, and the command line that torchrun would have started for it.

    The fields are those of the ``start`` message.
    """

    round: int
    rank: int
    local_rank: int
    mode: str
    entrypoint: str
    args: tuple[str, ...]
    interpreter: str
    env: dict[str, str]
    stdout: int
    stderr: int

    def command(self) -> list[str]:
        """Return the command line that torchrun would have started."""
        if self.mode == "command":
            return [self.entrypoint, *self.args]
        module = ["-m"] if self.mode == "module" else []
        return [self.interpreter, "-u", *module, self.entrypoint, *self.args]


def detach(job: Job, server_pid: int, mask: Iterable[int]) -> None:
    """Turn this fresh fork into a process of its own, as ``Popen(start_new_session=True)`` does."""
    processes.die_with_parent(server_pid)
    os.setsid()
    os.dup2(job.stdout, 1)
    os.dup2(job.stderr, 2)
    os.close(job.stdout)
    os.close(job.stderr)
    os.environ.update(job.env)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the script runs (elaunch.server.script), it ends the process without a
        # traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def choose_agent_store() -> None:
    """Let the ranks of an old torch find the launcher's store, in a process without the patches."""
    if os.environ.get(env.AGENT_STORE) == "1" and torchfix.need_clients():
        os.environ[env.AGENT_STORE] = "True"


def replace(job: Job) -> None:
    """Execute the worker's command in this process; ends with 127 or 126 where that fails."""
    command = job.command()
    # A fork of a Python process ignores these two; Popen(restore_signals=True) sets the defaults.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        os.write(2, f"elaunch: cannot execute {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def become(job: Job, fresh: bool = True) -> None:
    """Give this fork the state of a fresh interpreter; not ``fresh``: but for its random states.

    The caller then goes to the bottom of the stack and runs the script there (__main__).
    """
    processes.set_title(" ".join(job.command()))
    _open_streams_again()
    if fresh:
        _renew_random_states()
    # A fork knows the main thread by the number that it had in the server.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    torchfix.patch_stores()
    torchfix.patch_ends()
    torchfix.patch_paths()
    recorder.watch(os.environ)
    _write_stacks_when_asked()
    _debug_when_asked()
    _break_at_terminal()


def _open_streams_again() -> None:
    """Have stdout and stderr forget the server's files, which may have had a position.

    In place, since handlers of modules that are imported hold them.
    """
    for stream in (sys.stdout, sys.stderr):
        before = getattr(stream, "buffer", None)
        if isinstance(stream, io.TextIOWrapper) and isinstance(before, io.FileIO):
            file = io.FileIO(before.fileno(), "wb", closefd=False)
            file.name = before.name
            kept = (stream.encoding, stream.errors, "\n", stream.line_buffering)
            stream.__init__(file, *kept, stream.write_through)  # type: ignore[misc]


def _debug_when_asked() -> None:
    """Have ``elaunch debug`` find its debugger here."""
    if path := os.environ.get(env.AGENT_SOCKET):
        signal.signal(env.DEBUG_SIGNAL, partial(_debug, path))


def _debug(agent_socket: str, signum: int, frame: FrameType | None) -> None:
    """Look for a command; once more where another signal has come meanwhile."""
    if frame is None:
        return
    _asked.append(signum)
    if len(_asked) > 1:
        return
    try:
        from elaunch.wire import debugger

        while _asked:
            del _asked[1:]
            debugger.attach(Path(agent_socket).parent, frame)
            del _asked[0]
    finally:
        _asked.clear()


def _break_at_terminal() -> None:
    """Have ``breakpoint()`` prompt where it reads, if the output goes to a file or is left out."""
    if os.isatty(0) and not os.isatty(1) and not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _breakpoint


def _breakpoint(*args: Any, **named: Any) -> Any:
    frame = sys._getframe(1)
    if args or named.keys() - {"header"} or os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **named)  # noqa: T100  what the script has asked for
    from elaunch.wire import debugger

    return debugger.prompt_at_terminal(frame, named.get("header"))


def _write_stacks_when_asked() -> None:
    """Have all threads' stacks written to a file at a signal, if the agent looks for hangs.

    The handler needs neither Python's lock nor the main thread's help. The variable goes: a process
    that is started from here, and elaunch.init(), must not write to the same file.
    """
    path = os.environ.pop(env.STACKS_FILE, None)
    if path is None:
        return
    try:
        file = open(path, "w")  # noqa: SIM115  it stays open for the life of the process
    except OSError as error:
        os.write(2, f"elaunch: no stacks could be shown of a hang: {error}\n".encode())
        return
    _stacks_files.append(file)
    faulthandler.register(env.STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def _renew_random_states() -> None:
    """Seed what a fresh process would have seeded; ``random`` does it itself after a fork."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
