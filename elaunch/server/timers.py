"""The watchdog of ``torch.distributed.elastic.timer``: kill a process whose timer has expired.

``TORCHELASTIC_ENABLE_FILE_TIMER=1`` asks for it, as under torchrun. A script calls
``timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))`` and then
``with timer.expires(after=60): …``. The client opens the named pipe anew for each request, so that
the write fails where no process reads, and writes one line of JSON (torch 2.13,
``torch/distributed/elastic/timer/file_based_local_timer.py``):

===============  ===============================================================================
field            is
===============  ===============================================================================
pid              the process that asks
scope_id         names the timer within the process
expiration_time  seconds since 1970 on this machine's clock; negative: the timer is released
signal           what the process gets when the time has come; 0 or less: nothing
===============  ===============================================================================

The server reads the pipe in its loop. Only processes below the server get a signal. Unlike
torchrun's agent, nothing else ends by it: an expired timer is the failure of one worker.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from elaunch import proc
from elaunch.proc import Process
from elaunch.server import processes

_LONGEST_LINE = 1 << 16
_MOST_TIMERS = 10_000


class Timer(NamedTuple):
    """One timer that runs; ``due`` is on the monotonic clock."""

    process: Process
    scope: str
    due: float
    signum: int


class Timers:
    """Owns the server's end of the named pipe and knows the timers that run."""

    def __init__(self) -> None:
        self._pipe: int | None = None
        self._rest = b""
        self._running: dict[tuple[int, str], Timer] = {}

    def open(self, path: str | None) -> str | None:
        """Read the pipe at ``path`` from now on, if there is one; return why it cannot be."""
        if path is None:
            return None
        try:
            # Open for writing, too: a pipe without a writer is always ready, with nothing in it.
            self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return f"the pipe of the timers, {path}, cannot be opened: {error.strerror}"
        return None

    @property
    def files(self) -> list[int]:
        """The descriptor to wait for."""
        return [] if self._pipe is None else [self._pipe]

    @property
    def due(self) -> float:
        """When the next timer expires, on the monotonic clock."""
        return min((timer.due for timer in self._running.values()), default=math.inf)

    def read(self) -> None:
        """Read the requests that are in the pipe."""
        assert self._pipe is not None  # it was waited for
        try:
            data = self._rest + os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest = b""
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        """Start, replace or release a timer; what is no request is skipped."""
        try:
            request: Any = json.loads(line)
            pid, scope = int(request["pid"]), str(request["scope_id"])
            expires, signum = float(request["expiration_time"]), int(request["signal"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return
        self._running.pop((pid, scope), None)
        process = proc.read_process(pid) if 0 < pid <= processes.MAX_PID else None
        if expires < 0 or not math.isfinite(expires) or process is None:
            return
        if len(self._running) < _MOST_TIMERS:
            due = time.monotonic() + max(0.0, expires - time.time())
            self._running[pid, scope] = Timer(process, scope, due, signum)

    def expired(self, root: int) -> Iterator[Timer]:
        """Kill what is due below ``root``; yield each timer whose process got its signal.

        Of one process, the timer counts that expired first and has a signal; its others go.
        """
        now = time.monotonic()
        due = sorted((t for t in self._running.values() if t.due <= now), key=lambda t: t.due)
        if not due:
            return
        below = {process.pid for process in proc.descendants(root)}
        for pid in dict.fromkeys(timer.process.pid for timer in due):
            first = next((t for t in due if t.process.pid == pid and t.signum > 0), None)
            self._forget(pid)
            if first is not None and pid in below and _send(first):
                yield first

    def _forget(self, pid: int) -> None:
        for key in [key for key in self._running if key[0] == pid]:
            del self._running[key]

    def clear(self) -> None:
        """Forget all timers: the round is over."""
        self._running.clear()

    def close(self) -> None:
        """Close the pipe, in a fork."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def _send(timer: Timer) -> bool:
    try:
        return processes.send_signal(timer.process, timer.signum)
    except (OSError, ValueError):  # a number that is no signal
        return False


def worker_above(pid: int, workers: Iterable[int]) -> int | None:
    """Return which of ``workers`` the process is, or is below."""
    own = set(workers)
    while pid not in own:
        process = proc.read_process(pid)
        if process is None or process.ppid <= 1:
            return None
        pid = process.ppid
    return pid
