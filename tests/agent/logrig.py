"""A log pump with real workers and consoles that a test reads from."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from elaunch.agent.logs.pump import LogPlan, LogPump

SECONDS = 60.0
"""Deadline for anything that is to happen."""


def eventually(condition: Callable[[], object], what: str = "it") -> None:
    """Wait for a condition until the deadline."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {SECONDS} s"
        time.sleep(0.005)


def both(bits: int) -> Callable[[int], int]:
    """Return a stream map that gives every rank the same."""
    return lambda local_rank: bits


class Reader:
    """Reads a descriptor to its end in a thread, once it is told to begin."""

    def __init__(self, fd: int, *, begin: bool = True) -> None:
        self.fd = fd
        self.data = bytearray()
        self.thread = threading.Thread(target=self._run, daemon=True)
        if begin:
            self.thread.start()

    def _run(self) -> None:
        while chunk := self._read():
            self.data += chunk

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 65536)
        except OSError as exc:
            assert exc.errno == errno.EIO
            return b""

    def wait_for(self, data: bytes) -> None:
        """Wait until this has been read."""
        eventually(lambda: data in self.data, f"{data[:80]!r} on the console")

    def close(self) -> None:
        """Wait for the end and close."""
        if self.thread.ident is not None:
            self.thread.join(SECONDS)
            assert not self.thread.is_alive()
        os.close(self.fd)


class Rig:
    """A started pump whose console is two pipes, or one for both (``merged``)."""

    def __init__(self, plan: LogPlan, *, merged: bool = False, begin: bool = True) -> None:
        out_read, out = os.pipe()
        err_read, err = (os.dup(out_read), os.dup(out)) if merged else os.pipe()
        self.out = Reader(out_read, begin=begin)
        self.err = Reader(err_read, begin=begin and not merged)
        self.pump = LogPump(plan, out, err)
        self.pump.start()
        self.workers: list[subprocess.Popen[bytes]] = []
        self._console = [out, err]

    def run(self, codes: Mapping[int, str], round: int = 0) -> None:
        """Start a round of workers, wait for them and finish the round."""
        self.start(codes, round)
        self.wait()
        assert self.pump.finish_round(SECONDS)

    def start(self, codes: Mapping[int, str], round: int = 0) -> None:
        """Start a round of one worker per local rank, which is 10 less than its global rank."""
        ends = self.pump.open_round(round, {rank: rank + 10 for rank in codes})
        self.workers = [worker(code, ends[rank]) for rank, code in codes.items()]

    def wait(self) -> None:
        """Wait for the workers of the round."""
        for process in self.workers:
            assert process.wait(SECONDS) == 0

    def close(self) -> None:
        """Close the pump, then read the consoles to their ends."""
        self.pump.close()
        for fd in self._console:
            os.close(fd)
        self.out.close()
        self.err.close()


def worker(code: str, ends: tuple[int, int]) -> subprocess.Popen[bytes]:
    """Start Python with these stdout and stderr, which are closed here."""
    command = [sys.executable, "-S", "-E", "-c", f"import os, sys, time\n{code}"]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=ends[0], stderr=ends[1])
    finally:
        for fd in ends:
            os.close(fd)


def written(root: Path, local_rank: int, name: str = "stdout", round: int = 0) -> bytes:
    """Return what a log file holds."""
    return (root / f"attempt_{round}" / str(local_rank) / f"{name}.log").read_bytes()
