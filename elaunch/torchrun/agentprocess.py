"""One ``elaunch run`` as a child of the program that asks for it, and what became of the job.

An agent owns its process: its signal handlers, its children, its orphans. So a program gets one in
a process of its own. The program's signals reach the job through it:

* In the main thread the handled signals are forwarded while the call lasts, and the agent is in a
  session of its own, so that Ctrl-C at a terminal reaches it once.
* In another thread nothing can be handled: the agent stays in the program's process group, where
  the terminal's signals reach it.
* When the program ends, in whatever way, the agent gets SIGTERM and ends the job.

With a ``serve`` the agent does not start a server: it gets one that is a fork of this very process.

The end of the job is nothing to the program that called, or torch's exceptions (`check`): torch is
imported only where there is something to raise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from elaunch import env, errors, proc
from elaunch.endings import PREEMPTED, how_it_ended
from elaunch.runs import directory
from elaunch.runs.record import Record
from elaunch.wire.local import is_readable

ERROR_FILE = "error.json"
_ROOT = str(Path(__file__).parent.parent.parent)
_BOOT = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "from elaunch.torchrun.agentstart import main; sys.exit(main())"
)
"""Neither the working directory nor elaunch's own comes before Python's modules."""

Serve = Callable[[int], NoReturn]
"""Becomes the server of an agent, given the file that leads to it; in a fork of this process."""


@dataclass(frozen=True)
class Ended:
    """The outcome of a job.

    Attributes:
        exit_code: of the agent.
        received: the signals that this process has forwarded.
        record: of the run; None where the agent never had one.
        error: what an error of elaunch itself says, as ``UsageError: text``; or empty.
    """

    exit_code: int
    received: tuple[signal.Signals, ...]
    record: Record | None
    error: str


def run_agent(
    words: Sequence[str],
    place: Path,
    handled: Iterable[signal.Signals] = (),
    *,
    serve: Serve | None = None,
) -> Ended:
    """Run ``elaunch run WORDS`` to its end.

    The agent does not get torchrun's ``PET_`` variables, which programs that call torch's
    ``elastic_launch`` do not read either.

    Args:
        words: flags, script and arguments.
        place: a directory of this call's own.
        handled: signals to forward.
        serve: what the fork of this process calls that becomes the server.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PET_")}
    environ = {**kept, env.ERROR_FILE: str(place / ERROR_FILE)}
    argv = [
        sys.executable,
        "-c",
        _BOOT,
        _ROOT,
        str(os.getpid()),
        "run",
        "--exit-codes=elaunch",
        *words,
    ]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # there is none, or it is closed
            stream.flush()
    leads = threading.current_thread() is threading.main_thread()
    with _Forwarding(handled if leads else ()) as forwarding:
        process: subprocess.Popen[bytes] | _Forked
        if serve is None:
            process = subprocess.Popen(argv, env=environ, start_new_session=leads)
        else:
            process = _forked(argv, environ, serve, leads, forwarding.restore)
        forwarding.begin(process)
        begun = proc.read_process(process.pid)  # a child is there until it is waited for
        try:
            _wait(process.pid)
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    record = None if begun is None else _record(begun)
    error = _error(place / ERROR_FILE)
    return Ended(code, tuple(forwarding.received), record, error)


def _wait(pid: int) -> None:
    """Wait for the end of a child.

    The main thread wakes each second: the kernel may hand a signal to another thread of the
    program, and Python's handlers run in this one only.
    """
    child = os.pidfd_open(pid)
    try:
        while not is_readable(child, 1.0):
            pass
    finally:
        os.close(child)


class _Forwarding:
    """Handles signals for a while: keeps them, and sends them on to a process once there is one.

    As in the agent itself, SIGHUP stays ignored where it is.
    """

    def __init__(self, handled: Iterable[signal.Signals]) -> None:
        self.received: list[signal.Signals] = []
        self._early: list[int] = []
        self._handled = handled
        self._before: dict[signal.Signals, Any] = {}
        self._process: subprocess.Popen[bytes] | _Forked | None = None

    def __enter__(self) -> _Forwarding:
        for signum in self._handled:
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def begin(self, process: subprocess.Popen[bytes] | _Forked) -> None:
        """Send what comes from now on to ``process``, and of what came before it the first."""
        self._process = process
        if self._early:
            process.send_signal(self._early[0])

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(signum))
        if self._process is None:
            self._early.append(signum)
        else:
            self._process.send_signal(signum)


class _Forked:
    """A child that :func:`_forked` has made, as ``subprocess.Popen`` is one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def send_signal(self, signum: int, /) -> None:
        """Send a signal, if it still runs."""
        if self._code is None:
            os.kill(self.pid, signum)

    def wait(self) -> int:
        """Return its exit code, negative for a signal."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


def _forked(
    argv: list[str],
    environ: Mapping[str, str],
    serve: Serve,
    leads: bool,
    restore: Callable[[], None],
) -> _Forked:
    """Fork this process twice: into the agent, which executes ``argv``, and the agent's server."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        ours.close()
        theirs.close()
        return _Forked(pid)
    try:
        restore()
        server = os.fork()
        if server == 0:
            ours.close()
            serve(theirs.detach())
        if leads:
            os.setsid()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that listed the directory
                os.set_inheritable(int(name), int(name) < 3 or int(name) == ours.fileno())
        os.execve(argv[0], argv, {**environ, env.SERVER: f"{server}:{ours.fileno()}"})
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(127)


def _record(process: proc.Process) -> Record | None:
    """Return the record of the run whose agent was ``process``, not an earlier one with its pid."""
    host, boot = os.uname().nodename, proc.boot_id()
    for record in (found for _, found in directory.records(os.environ) if found is not None):
        agent = record["agent"]
        named = (agent["pid"], agent["start_ticks"], agent["host"], agent["boot_id"])
        if named == (process.pid, process.start, host, boot):
            return record
    return None


def _error(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def check(ended: Ended, name: str) -> None:
    """Return if the job has ended well; else raise what its end means.

    Args:
        ended: the job's end.
        name: what the failures are headed by.

    Raises:
        SignalException: a signal ended the job: one of this process, or one to its agent.
        SystemExit: with 75, where the job was asked to end and is to be continued; with 2 for a
            command line that cannot be read.
        ChildFailedError: workers failed, and no restart was left.
        ElaunchError: what elaunch itself cannot do, of the class that the agent raised.
    """
    record, code = ended.record, ended.exit_code
    state = "" if record is None else record["state"]
    if ended.received or state == "STOPPED":
        signum = ended.received[0] if ended.received else signal.Signals(max(1, code - 128))
        _raise_signal(signum)
    if code == 0:
        return
    if code < 0:
        raise errors.ElaunchError(f"the agent {how_it_ended(code)}; the job has ended with it")
    if state == "PREEMPTED":
        sys.exit(PREEMPTED)
    if record is not None and record["reason"] != ended.error:
        elsewhere, failure = record.get("job_failure"), record["failure"]
        if elsewhere is not None:
            _raise_failures(name, [_elsewhere(elsewhere)])
        if failure is not None:
            parts = (failure["first"], *failure["victims"], *failure["stopped"])
            _raise_failures(name, [part for part in parts if part["exitcode"]] or [parts[0]])
        raise errors.ElaunchError(f"{record['reason']} (exit code {code})")
    kind, _, text = ended.error.partition(": ")
    found = vars(errors).get(kind)
    if isinstance(found, type) and issubclass(found, errors.ElaunchError):
        raise found(text)
    if code == errors.UsageError.exit_code:
        sys.exit(code)
    raise errors.ElaunchError(ended.error or f"the agent ended with {code}: see its messages")


def _raise_signal(signum: signal.Signals) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=signum)


def _raise_failures(name: str, workers: list[dict[str, Any]]) -> None:
    """Raise a ChildFailedError, whose first failure is the first of ``workers``."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    raise ChildFailedError(name, {worker["rank"]: _failure(worker) for worker in workers})


def _failure(worker: Mapping[str, Any]) -> Any:
    """Return a worker of a failure report as a ProcessFailure.

    torch's own constructor raises for an error file that is torn; such a one is no use here either,
    and the report says why.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path, problem = worker["error_file"], worker["error_file_problem"]
    failure = ProcessFailure(worker["local_rank"], worker["pid"], worker["exitcode"], "")
    failure.timestamp = int(worker["at"])
    if path and not problem:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            failure.error_file_data = json.load(file)
            failure.error_file, failure.message = path, failure.error_file_data["message"]
    elif problem or (worker["exitcode"] > 0 and worker["traceback"]):
        failure.message = problem or worker["traceback"]
    return failure


def _elsewhere(failure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first failure of the job, on another node, as a worker of a failure report."""
    import time

    text = {"traceback": failure["text"], "error_file": None, "error_file_problem": None}
    return {**failure, **text, "at": time.time() - failure["age"]}
