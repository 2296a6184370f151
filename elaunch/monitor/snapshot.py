"""One frozen reading of a run: how it stands, its workers' use of the machine, its checkpoints.

A worker's tree is the worker and its descendants, such as the processes of a DataLoader. CPU is in
percent of one core, between two measurements. Memory is resident memory in bytes; a tree's counts
pages that its processes share once for each of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elaunch.errors import ElaunchError, RunDirError
from elaunch.monitor.standing import Standing, living, lost_reason, read_standing
from elaunch.runs.directory import RunDir
from elaunch.runs.record import Record, WorkerRecord

if TYPE_CHECKING:
    import psutil

GONE: Final = "GONE"
RUNNING: Final = "RUNNING"
STARTING: Final = "STARTING"

# The server ends the workers within 0.5 s of the agent's death.
WORKERS_END_S: Final = 0.7
RETRY_S: Final = 0.05
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


@dataclass(frozen=True)
class WorkerView:
    """One worker: its record, its state as seen now, and what it takes while it runs."""

    record: WorkerRecord
    state: str
    usage: Usage | None


@dataclass(frozen=True)
class LatestCheckpoint:
    """The newest complete checkpoint now; ``age_s`` by its file's time of change."""

    path: str
    step: int
    format: str
    age_s: float


@dataclass(frozen=True)
class RunView:
    """One reading of a run with its workers and checkpoints."""

    standing: Standing
    record: Record
    workers: tuple[WorkerView, ...]
    latest: LatestCheckpoint | None
    latest_note: str | None
    measurements: Mapping[int, Measurement]


def take(run: RunDir, before: Mapping[int, Measurement] | None = None) -> RunView:
    """Read the run now; raise RunDirError when neither its agent nor a file can be read.

    ``before`` are the measurements of the last reading; without them the CPU is sampled for 0.1 s.
    """
    standing = read_standing(run)
    record = standing.record
    if record is None:
        raise RunDirError(standing.reason or f"nothing can be read in {run.path}")
    if standing.agent == "gone":
        standing = _settle(standing, record)
    pids = _running(standing, record["workers"])
    if not before or not pids <= before.keys():
        before = _first_measurement(pids)
    measurements = measure(pids)
    used = usage(before, measurements)
    latest, note = _latest_checkpoint(record, standing.taken_at)
    return RunView(
        standing=standing,
        record=record,
        workers=tuple(
            WorkerView(worker, _state(worker, pids, standing), used.get(worker["pid"] or 0))
            for worker in record["workers"]
        ),
        latest=latest,
        latest_note=note,
        measurements=measurements,
    )


def _settle(standing: Standing, record: Record) -> Standing:
    """Give the workers of a killed agent the time in which they are ended before naming any."""
    survivors = living(record["workers"])
    if not survivors:
        return standing
    deadline = time.monotonic() + WORKERS_END_S
    while survivors and time.monotonic() < deadline:
        time.sleep(RETRY_S)
        survivors = living(survivors)
    return replace(standing, reason=lost_reason(record, survivors))


def _running(standing: Standing, workers: Sequence[WorkerRecord]) -> frozenset[int]:
    """Return the pids of the workers that run and can be seen from here."""
    if standing.agent == "elsewhere" or not standing.here:
        return frozenset()
    running = (worker for worker in workers if worker["state"] == RUNNING)
    return frozenset(worker["pid"] for worker in living(running) if worker["pid"])


def _state(worker: WorkerRecord, running: Collection[int], standing: Standing) -> str:
    lost = worker["state"] in (STARTING, RUNNING) and worker["pid"] not in running
    return GONE if lost and standing.agent in ("gone", "ended", "runs") else worker["state"]


def _first_measurement(pids: Collection[int]) -> Mapping[int, Measurement]:
    measurements = measure(pids)
    if measurements:
        time.sleep(SAMPLE_S)
    return measurements


def _latest_checkpoint(record: Record, now: float) -> tuple[LatestCheckpoint | None, str | None]:
    """Return the newest complete checkpoint, and what was passed over or went wrong.

    It costs little, however large the checkpoint is: a person waits for the result.
    """
    if record["checkpoint_dir"] is None:
        return None, None
    if "://" in record["checkpoint_dir"]:
        return _latest_at_url(record["checkpoint_dir"], now)
    from elaunch.checkpoint.search.latest import find_latest

    try:
        glob = record["checkpoint_glob"]
        search = find_latest(Path(record["checkpoint_dir"]), glob=glob, content=False)
        found = search.checkpoint
        changed = Path(found.path).stat().st_mtime if found else None
    except (ElaunchError, OSError) as exc:
        return None, f"cannot be looked for: {exc}"
    note = None
    if search.passed_over:
        newest = search.passed_over[0]
        note = f"passed over {newest.path.name}: {newest.reason}"
    if found is None or changed is None:
        return None, note
    age_s = max(0.0, now - changed)
    return LatestCheckpoint(str(found.path), found.step, found.format, age_s), note


def _latest_at_url(url: str, now: float) -> tuple[LatestCheckpoint | None, str | None]:
    """Return the newest that is committed at a URL; its files are not fetched for that."""
    from elaunch.checkpoint.storage.storage import open_storage

    try:
        found = next(open_storage(url).newest_first(), None)
    except (ElaunchError, OSError) as exc:
        return None, f"cannot be looked for: {exc}"
    if found is None:
        return None, None
    age_s = max(0.0, now - found.committed)
    return LatestCheckpoint(str(found.place), found.step, "elaunch", age_s), None


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
