"""Whether a process gets anything done: with all below it, it computes, reads or writes.

It is asked only of a worker that is in no collective, by ``--hang-timeout auto``: a worker that
evaluates or saves while the others wait for it is busy, one that waits for a lock is not. A worker
that hangs in a loop counts as busy, too: nothing tells that from a long computation.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from elaunch import proc

BUSY: Final = 0.03
"""Share of one processor's time; a worker that waits uses less, although it is asked."""
BYTES: Final = 1 << 16


class _ActivityReading(NamedTuple):
    at: float
    ticks: int
    transferred: int
    busy: int


class WorkerActivity:
    """Counts for each process the moments at which it was busy; one thread may ask."""

    def __init__(self) -> None:
        self._readings: dict[int, _ActivityReading] = {}

    def __call__(self, pid: int) -> int:
        """Return a number that has grown if the process was busy since the last call."""
        now = time.monotonic()
        everyone = (pid, *(below.pid for below in proc.descendants(pid)))
        ticks = sum(map(_ticks, everyone))
        transferred = sum(map(_transferred, everyone))
        before = self._readings.get(pid, _ActivityReading(now, ticks, transferred, 0))
        allowed = BUSY * proc.TICKS * (now - before.at)
        busy = abs(ticks - before.ticks) > allowed + 1 or (
            abs(transferred - before.transferred) > BYTES
        )
        self._readings[pid] = _ActivityReading(now, ticks, transferred, before.busy + busy)
        return self._readings[pid].busy


def _ticks(pid: int) -> int:
    found = proc.stat(f"/proc/{pid}")
    return 0 if found is None else proc.ticks(found[1])


def _transferred(pid: int) -> int:
    """Return the bytes that a process has read and written, as far as this user may know."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0
    return int(fields[1]) + int(fields[3])
