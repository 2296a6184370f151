"""Processes as /proc shows them: whether a worker, or its DataLoader, is busy, or held up.

`WorkerActivity` tells whether a process gets anything done: with all below it, it computes, reads
or writes. It is asked only of a worker that is in no collective, by ``--hang-timeout auto``: a
worker that evaluates or saves while the others wait for it is busy, one that waits for a lock is
not. A worker that hangs in a loop counts as busy, too: nothing tells that from a long computation.

`LoaderActivity` tells how busy the processes of a DataLoader are, of any script. torch calls them
``pt_data_worker``. Each prepares batches ahead until its queue is full, and then waits. So where it
computes nearly all of the time, its queue is never full: the training takes the batches as fast as
they come. Only its first thread counts, which runs the dataset's code. One that waits for a disk is
not busy, and nothing is known of a DataLoader without processes of its own.

`Hindrances` are why a rank may be slower than others, as far as its machine shows it; nothing is
guessed. The first two are counted from the begin of the round on:

===========  =======================================================================================
steal        the share of the machine's processor time that other virtual machines took
throttled    the time for which the cgroup's CPU limit held its processes up
swap         the share of the rank's memory that is not in memory
===========  =======================================================================================
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from elaunch import proc
from elaunch.runs.record import LoaderRecord
from elaunch.text import duration

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
        stats = [stat for each in everyone if (stat := proc.stat(f"/proc/{each}")) is not None]
        ticks = sum(proc.ticks(fields) for _, fields in stats)
        transferred = sum(map(_transferred, everyone))
        before = self._readings.get(pid, _ActivityReading(now, ticks, transferred, 0))
        allowed = BUSY * proc.TICKS * (now - before.at)
        busy = abs(ticks - before.ticks) > allowed + 1 or (
            abs(transferred - before.transferred) > BYTES
        )
        self._readings[pid] = _ActivityReading(now, ticks, transferred, before.busy + busy)
        return self._readings[pid].busy


def _transferred(pid: int) -> int:
    """Return the bytes that a process has read and written, as far as this user may know."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0
    return int(fields[1]) + int(fields[3])


NAME: Final = "pt_data_worker"


class _Seen(NamedTuple):
    """A process at a moment: seconds since boot, and its first thread's processor time."""

    at: float
    computed: float


class LoaderActivity:
    """Adds up the time of all DataLoader processes that it has seen; one thread may look."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._most = 0
        self._computed = self._lived = 0.0

    def look(self, workers: Iterable[int]) -> None:
        """Read the DataLoader processes below these workers; a new one counts from its start."""
        seen: dict[str, _Seen] = {}
        for worker in workers:
            found = dict(filter(None, map(_read, proc.children(worker))))
            self._most = max(self._most, len(found))
            seen |= found
        for key, one in seen.items():
            before = self._seen.get(key) or _Seen(int(key.partition(".")[2]) / proc.TICKS, 0.0)
            self._computed += one.computed - before.computed
            self._lived += max(0.0, one.at - before.at)
        self._seen = seen

    def record(self, slots: int) -> LoaderRecord | None:
        """Return what is known of so many workers; None where none has had such a process."""
        if not self._most or self._lived <= 0:
            return None
        cpus = proc.cpus() // slots
        busy = min(1.0, self._computed / self._lived)
        return {"processes": self._most, "seconds": self._lived, "busy": busy, "cpus": cpus}


def _read(pid: int) -> tuple[str, _Seen] | None:
    found = proc.stat(f"/proc/{pid}/task/{pid}")
    if found is None or found[0] != NAME:
        return None
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return f"{pid}.{found[1][19]}", _Seen(now, proc.ticks(found[1]) / proc.TICKS)


WORTH: Final = 0.02
"""The share of the time, or of the memory, from which something is named."""
_TIMES: Final = 9
"""Fields of a line of /proc/stat up to the stolen time, which is the last that counts."""


class Hindrances(NamedTuple):
    """Counts by a moment of the monotonic clock; times in ticks and seconds."""

    at: float
    stolen: int
    ticks: int
    throttled: float

    def since(self, before: Hindrances, pid: int) -> str:
        """Return what hindered the process ``pid`` since ``before``, or ""."""
        return ", ".join(self._named(before, pid))

    def _named(self, before: Hindrances, pid: int) -> Iterator[str]:
        ticks, seconds = self.ticks - before.ticks, self.at - before.at
        stolen = (self.stolen - before.stolen) / ticks if ticks > 0 else 0.0
        if stolen >= WORTH:
            yield f"{100 * stolen:.0f} % of its node's processor time was stolen by other machines"
        throttled = self.throttled - before.throttled
        if throttled > WORTH * seconds:
            told = f"{duration(throttled)} of {duration(seconds)}"
            yield f"its cgroup's CPU limit has held it up for {told}"
        swapped = _swapped(pid)
        if swapped >= WORTH:
            yield f"{100 * swapped:.0f} % of its memory is swapped out"


def hindrances() -> Hindrances:
    """Return what has been counted so far; what the machine does not show is 0."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(field) for field in file.readline().split()[1:_TIMES]]
    except (OSError, ValueError):
        ticks = []
    stolen = ticks[-1] if len(ticks) == _TIMES - 1 else 0
    return Hindrances(time.monotonic(), stolen, sum(ticks), _throttled())


def _throttled(proc_dir: Path = Path("/proc/self")) -> float:
    """Return for how many seconds this process's cgroup was throttled."""
    try:
        found = proc.cgroup_file("cpu", "cpu.stat", "cpu.stat", proc_dir)
        lines = found.read_text().splitlines() if found else []
        counts = {name: int(value) for name, value in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0.0
    return counts.get("throttled_time", 0) / 1e9 + counts.get("throttled_usec", 0) / 1e6


def _swapped(pid: int) -> float:
    """Return the share of a process's memory that is swapped out."""
    fields = proc.status(pid)
    try:
        swap, resident = (int(fields[name].split()[0]) for name in ("VmSwap", "VmRSS"))
    except (KeyError, ValueError, IndexError):
        return 0.0
    return swap / (swap + resident) if swap + resident > 0 else 0.0
