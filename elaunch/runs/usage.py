"""What processes take of the machine, measured now.

A worker's tree is the worker and its descendants, such as the processes of a DataLoader. CPU is in
percent of one core, between two measurements. Memory is resident memory in bytes; a tree's counts
pages that its processes share once for each of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import psutil

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
    wanted = tuple(pids)
    if not wanted:
        return {}
    import psutil

    children: dict[int, list[psutil.Process]] = {}
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
            processes[process.pid] = process
    measured = {}
    for pid in wanted:
        with contextlib.suppress(psutil.Error, KeyError):
            measured[pid] = _measure_one(processes[pid], children)
    return measured


def usage(before: Mapping[int, Measurement], now: Mapping[int, Measurement]) -> dict[int, Usage]:
    """Return what each process took from ``before`` to ``now``; 0 % for one that is new."""
    return {pid: _between(before.get(pid, last), last) for pid, last in now.items()}


def _measure_one(
    process: psutil.Process, children: Mapping[int, list[psutil.Process]]
) -> Measurement:
    cpu_s, rss, threads = _take(process)
    tree_cpu_s, tree_rss = cpu_s, rss
    for descendant in _descendants(process.pid, children):
        more_cpu_s, more_rss = _take_if_there(descendant)
        tree_cpu_s += more_cpu_s
        tree_rss += more_rss
    return Measurement(time.monotonic(), cpu_s, rss, threads, tree_cpu_s, tree_rss)


def _take(process: psutil.Process) -> tuple[float, int, int]:
    with process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss, process.num_threads()


def _take_if_there(process: psutil.Process) -> tuple[float, int]:
    import psutil

    try:
        cpu_s, rss, _ = _take(process)
    except psutil.Error:
        return 0.0, 0
    return cpu_s, rss


def _descendants(
    pid: int, children: Mapping[int, list[psutil.Process]]
) -> Iterator[psutil.Process]:
    for child in children.get(pid, ()):
        yield child
        yield from _descendants(child.pid, children)


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
