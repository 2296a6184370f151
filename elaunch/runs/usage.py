"""The use that processes make of the machine, measured now.

A worker's tree is the worker and its descendants, such as the processes of a DataLoader. CPU is in
percent of one core, between two measurements. Memory is resident memory in bytes; a tree's counts
pages that its processes share once for each of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from elaunch import proc

PAGE: Final = os.sysconf("SC_PAGE_SIZE")
# The system counts CPU time in ticks of 10 ms: a shorter time would show little.
SAMPLE_S: Final = 0.1


@dataclass(frozen=True)
class Measurement:
    """One worker at one moment: CPU seconds so far, bytes of memory, threads."""

    at: float
    cpu_s: float
    rss: int
    threads: int
    tree_cpu_s: float
    tree_rss: int


@dataclass(frozen=True)
class Usage:
    """One worker's use of the machine; CPU in percent of one core, memory in bytes."""

    cpu_percent: float
    rss: int
    threads: int
    tree_cpu_percent: float
    tree_rss: int


def measure_since(
    last: Mapping[int, Measurement], pids: Collection[int]
) -> tuple[Mapping[int, Measurement], Mapping[int, Measurement]]:
    """Return measurements of ``pids`` from before, and those of now.

    Those from before are ``last`` if all processes are in it and it is not too young to show what
    they take; otherwise they are made anew, and SAMPLE_S pass.
    """
    until = time.monotonic() - SAMPLE_S
    if not all(pid in last and last[pid].at <= until for pid in pids):
        last = measure(pids)
        if last:
            time.sleep(SAMPLE_S)
    return last, measure(pids)


def measure(pids: Iterable[int]) -> dict[int, Measurement]:
    """Measure each process of ``pids`` that runs and may be seen."""
    measured = {}
    for pid in pids:
        taken = [_taken(pid), *(_taken(below.pid) for below in proc.descendants(pid))]
        if taken[0] is not None:
            cpu_s, rss, threads = taken[0]
            tree = [one for one in taken if one is not None]
            tree_cpu_s, tree_rss = sum(one[0] for one in tree), sum(one[1] for one in tree)
            now = time.monotonic()
            measured[pid] = Measurement(now, cpu_s, rss, threads, tree_cpu_s, tree_rss)
    return measured


def usage(before: Mapping[int, Measurement], now: Mapping[int, Measurement]) -> dict[int, Usage]:
    """Return what each process took from ``before`` to ``now``; 0 % for one that is new."""
    return {pid: _between(before.get(pid, last), last) for pid, last in now.items()}


def _taken(pid: int) -> tuple[float, int, int] | None:
    """Return the CPU seconds of a process so far, its bytes of memory, and its threads."""
    found = proc.stat(f"/proc/{pid}")
    if found is None:
        return None
    fields = found[1]
    return proc.ticks(fields) / proc.TICKS, int(fields[21]) * PAGE, int(fields[17])


def _between(before: Measurement, now: Measurement) -> Usage:
    seconds = now.at - before.at
    share = 100.0 / seconds if seconds > 0 else 0.0
    # A descendant that ended takes its seconds with it.
    return Usage(
        cpu_percent=max(0.0, now.cpu_s - before.cpu_s) * share,
        rss=now.rss,
        threads=now.threads,
        tree_cpu_percent=max(0.0, now.tree_cpu_s - before.tree_cpu_s) * share,
        tree_rss=now.tree_rss,
    )
