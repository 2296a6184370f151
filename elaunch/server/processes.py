"""The kernel's side of a process tree: subreaper, parent-death signal, kill, sweep.

A subreaper is the parent that orphans below it come back to, so whatever a worker starts, however
it daemonises, stays a descendant of the server and can be found and killed (prctl(2)).

A process can change what ``ps`` shows of it (:func:`set_title`). A fork can make a call that would
change this process (:func:`call_in_fork`), and its variables can be read as they are now
(:func:`environment_of_fork`).

A sweep ends everything below the server: politely for the grace, then by SIGKILL, then it gives up
by name. A process in uninterruptible sleep cannot be killed, and one of another user may not be
signalled (a worker has called ``sudo``): both are reported as survivors, not waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

from elaunch import proc
from elaunch.proc import Process
from elaunch.wire.local import Message

MAX_PID = 1 << 22
"""The largest pid that Linux gives."""
_ARG_START, _ARG_END = 45, 46  # fields 48 and 49, counted from the one after the name
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # made once, and not by each worker anew


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if _LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Make orphans below this process its children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int = 0, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process, by SIGKILL, when the thread that forked it ends.

    With the parent's pid, a process whose parent has ended already ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if parent and os.getppid() != parent:
        os._exit(1)


def send_signal(process: Process, signum: int) -> bool:
    """Signal ``process`` unless its pid is another's by now; True when the signal was sent.

    False also where this user may not signal it.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel before 5.3: the check and the signal are not one step there
        return _is_same(process) and _kill(process.pid, signum)
    try:
        if not _is_same(process):
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def _is_same(process: Process) -> bool:
    now = proc.read_process(process.pid)
    return now is not None and now.start == process.start


def signal_child(pid: int, signum: int, group: bool) -> None:
    """Signal a child, or its group; it may have become another user's, and gets nothing then."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, signum)
            return
    _kill(pid, signum)  # just forked, it leads no group yet


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def session(pid: int) -> int:
    """Return the session of a process, which is the pid of who has begun it; 0 if it is gone."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0


def outlive_parent() -> None:
    """Take :func:`die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def raise_open_files() -> tuple[int, int]:
    """Raise this process' soft limit on open files to the hard limit; return both as they were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a hard limit above what the kernel takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


class ForkedCall:
    """A call that a fork of this process makes; ``file`` can be read when it has returned."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.file, write_end = os.pipe()
        parent = os.getpid()
        self._pid = -1
        collects = gc.isenabled()
        gc.disable()  # a fork begins with Python code (os.register_at_fork)
        with contextlib.suppress(OSError):  # at a limit on processes, which is no answer
            self._pid = os.fork()
        if self._pid == 0:
            gc.freeze()  # the parent's garbage may end threads of the parent's: a TCPStore does
        if collects:
            gc.enable()
        if self._pid == 0:
            try:
                die_with_parent(parent)
                os.write(write_end, json.dumps(call()).encode())
            finally:
                os._exit(0)
        os.close(write_end)

    def answer(self) -> Any:
        """Wait for the end of the fork; return what ``call()`` returned, by way of JSON.

        An exception there ends the fork, and the answer is None.
        """
        with open(self.file, "rb") as pipe:
            data = pipe.read()
        with contextlib.suppress(ChildProcessError):  # a thread that waits for all children has
            if self._pid > 0:
                os.waitpid(self._pid, 0)
        return json.loads(data) if data else None


def call_in_fork(call: Callable[[], Any], meanwhile: Callable[[int], None] | None = None) -> Any:
    """Return what ``call()`` returns in a fork of this process; see :class:`ForkedCall`.

    ``meanwhile`` is called with the file that can be read when the fork has returned.
    """
    made = ForkedCall(call)
    if meanwhile is not None:
        meanwhile(made.file)
    return made.answer()


_POINTER = ctypes.sizeof(ctypes.c_void_p)
_LONGEST_ENVIRONMENT = 8 << 20
"""Bytes of the largest environment; more is taken for something else."""


def environment_of_fork(pid: int) -> dict[str, str] | None:
    """Return the variables of a fork of this process as it has them now; None if unknown.

    /proc/PID/environ shows what a process was started with. A fork has libc's ``environ`` where
    this process has it, until it executes a program; that is unknown then, as where the kernel
    does not let this process read the other's memory.
    """
    here = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ"))
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            (array,) = _pointers(os.pread(memory.fileno(), _POINTER, here))
            texts = _texts(memory.fileno(), array)
    except (OSError, ValueError, OverflowError):
        return None
    pairs = (os.fsdecode(text).partition("=") for text in texts)
    return {name: value for name, _, value in pairs}


def _pointers(data: bytes) -> list[int]:
    return memoryview(data[: len(data) // _POINTER * _POINTER]).cast("P").tolist()


def _texts(memory: int, array: int) -> list[bytes]:
    """Return the texts that an array of pointers with a NULL at its end points to."""
    texts: list[bytes] = []
    read = 0
    while read < _LONGEST_ENVIRONMENT:
        pointers = _pointers(os.pread(memory, 4096, array))
        if not pointers:
            raise ValueError("the array leads nowhere")
        for pointer in pointers:
            if pointer == 0:
                return texts
            texts.append(_text(memory, pointer))
            read += len(texts[-1])
        array += len(pointers) * _POINTER
    raise ValueError("no environment is that long")


def _text(memory: int, pointer: int) -> bytes:
    text = b""
    while len(text) < _LONGEST_ENVIRONMENT:
        chunk = os.pread(memory, 512, pointer + len(text))
        before, end, _ = chunk.partition(b"\0")
        text += before
        if end:
            return text
        if not chunk:
            raise ValueError("the text leads nowhere")
    raise ValueError("no variable is that long")


@functools.cache  # the same in each fork
def _arguments() -> tuple[int, int]:
    _, fields = proc.stat("/proc/self") or ("", [])
    return int(fields[_ARG_START]), int(fields[_ARG_END])


def set_title(title: str) -> None:
    """Have ``ps`` show ``title`` for this process, cut to the room there is.

    The kernel shows the memory that holds the arguments (``arg_start`` … ``arg_end`` of
    proc_pid_stat(5)) as it is while its last byte is NUL, as the end of the last argument is. Where
    it is not, a process has renamed itself and everything up to the first NUL is the title. The
    process' short name (comm) stays as it is.
    """
    try:
        start, end = _arguments()
        text = os.fsencode(title)[: max(0, end - start - 2)] + b"\0"
        # By way of the file: an address that is not what it seems to be gives an error, no crash.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(text.ljust(end - start, b"."))
    except (OSError, ValueError, IndexError):  # a sandbox's /proc; the title is cosmetic
        return


LOOK_AGAIN = 0.02
"""Seconds between looks while killing: a process that forks in the same moment is found then."""


class Sweep:
    """One ``sweep`` of the agent; ``step`` it whenever a child ended or ``next_look`` has come.

    ``spared`` returns the pids of those below ``root`` that live on, with all that is below them.
    """

    def __init__(self, message: Message, root: int, spared: Callable[[], Iterable[int]]) -> None:
        self._round, self._kept = message["round"], message.get("keeps") or []
        self._root = root
        self._spared = spared
        self._killed: dict[int, str] = {}
        self._survivors: list[Process] = []
        self._refused: set[int] = set()
        now = time.monotonic()
        self._kill_at = now + message["grace"]
        self._give_up_at = self._kill_at + message["deadline"]
        if message["signum"]:
            for process in self._living():
                # One that ignores it ends by itself: multiprocessing's resource tracker does.
                ignores = proc.ignores(process.pid, message["signum"])
                if send_signal(process, message["signum"]) and not ignores:
                    self._killed[process.pid] = process.name

    def _living(self) -> list[Process]:
        return proc.descendants(self._root, exclude=self._spared())

    def next_look(self) -> float:
        """Return when to step next, on the monotonic clock, if no child ends before."""
        now = time.monotonic()
        return self._kill_at if now < self._kill_at else now + LOOK_AGAIN

    def step(self) -> bool:
        """Kill what is due; True when nothing is left or nothing more can be done."""
        living = self._living()
        if not living:
            # Look twice: a process that forks between two reads hides in one of them.
            return not self._living()
        now = time.monotonic()
        if now < self._kill_at:
            return False
        refused, self._refused = self._refused, set()
        for process in living:
            if send_signal(process, signal.SIGKILL):
                self._killed[process.pid] = process.name
            else:
                self._refused.add(process.pid)
        # One that is still there at the second look has not just ended: it may not be signalled.
        if now < self._give_up_at and not all(process.pid in refused for process in living):
            return False
        self._survivors = living
        return True

    def outcome(self) -> Message:
        """Return the ``swept`` message."""
        survivors = [
            [each.pid, each.name, proc.user(each.pid) if each.pid in self._refused else None]
            for each in self._survivors
        ]
        killed = [[pid, name] for pid, name in self._killed.items()]
        swept = {"op": "swept", "round": self._round, "kept": self._kept}
        return {**swept, "killed": killed, "survivors": survivors}
