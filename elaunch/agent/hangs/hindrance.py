"""Why a rank may be slower than others, as far as its machine shows it; nothing is guessed.

===========  =======================================================================================
steal        the share of the machine's processor time that other virtual machines took
throttled    the time for which the cgroup's CPU limit held its processes up
swap         the share of the rank's memory that is not in memory
===========  =======================================================================================

The first two are counted from the begin of the round on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from elaunch import proc
from elaunch.text import duration

WORTH: Final = 0.02
"""The share of the time, or of the memory, from which something is named."""
_STEAL: Final = 7
_TIMES: Final = 8


class Hindrances(NamedTuple):
    """What has been counted by a moment of the monotonic clock; times in ticks and seconds."""

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


def count() -> Hindrances:
    """Return what has been counted so far; what the machine does not show is 0."""
    stolen, ticks = _ticks(Path("/proc/stat"))
    return Hindrances(time.monotonic(), stolen, ticks, _throttled())


def _ticks(stat: Path) -> tuple[int, int]:
    """Return the ticks of all processors that were stolen, and all of them."""
    try:
        with stat.open() as file:
            fields = [int(field) for field in file.readline().split()[1 : _TIMES + 1]]
    except (OSError, ValueError):
        return 0, 0
    return (fields[_STEAL] if len(fields) > _STEAL else 0), sum(fields)


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
