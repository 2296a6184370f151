"""Real processes for the tests of the server's half: they say when they are there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Life = Callable[[], object]


def fork(life: Life) -> int:
    """Fork a child that lives ``life`` and ends; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            life()
        finally:
            os._exit(0)
    return pid


class Ready:
    """A pipe on which processes say that they are where the test wants them."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def say(self) -> None:
        """Say so, with this process's pid; called in the process."""
        os.write(self._write, b"%d\n" % os.getpid())

    def wait(self, number: int = 1) -> list[int]:
        """Wait until ``number`` processes have said so; return their pids in that order."""
        found = b""
        while found.count(b"\n") < number:
            found += os.read(self._read, 100)
        return [int(line) for line in found.split()]


def sleep() -> None:
    """Sleep for longer than a test takes."""
    time.sleep(110)


def ignoring(ready: Ready) -> Life:
    """Return the life of a process that ignores SIGTERM."""

    def life() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.say()
        sleep()

    return life


def sleeping(ready: Ready) -> Life:
    """Return the life of a process that dies of SIGTERM."""

    def life() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ready.say()
        sleep()

    return life


@contextmanager
def root(life: Life) -> Iterator[int]:
    """Fork a process that the test looks below; at the end it and its session are killed."""

    def lead() -> None:
        os.setsid()
        life()

    pid = fork(lead)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        sys.stdout.flush()
