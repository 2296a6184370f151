"""One frozen reading of a run: how it stands, its workers' use of the machine, its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elaunch.errors import ElaunchError, RunDirError
from elaunch.monitor.standing import Standing, living, lost_reason, read_standing
from elaunch.runs.directory import RunDir
from elaunch.runs.identity import WorkerRecord
from elaunch.runs.record import AwaitedRecord, Record, RestartsRecord, WorkerProgressRecord
from elaunch.runs.usage import Measurement, Usage, measure_since, usage
from elaunch.text import duration, one_line

GONE: Final = "GONE"
RUNNING: Final = "RUNNING"
STARTING: Final = "STARTING"

# The server ends the workers within 0.5 s of the agent's death.
WORKERS_END_S: Final = 0.7
RETRY_S: Final = 0.05
PATIENCE_S: Final = 0.3
"""Seconds that a screen waits for the agents of other nodes; what comes later is shown next."""


@dataclass(frozen=True)
class WorkerView:
    """One worker: its record, its state as seen now, and what it takes while it runs."""

    record: WorkerRecord
    state: str
    usage: Usage | None


@dataclass(frozen=True)
class NodeReading:
    """The answer of another node's agent about its workers.

    ``age_s`` is how old that is, None where it has not answered in this round; ``problem`` why it
    does not answer now, or ""; ``awaited`` for which rank its ranks have waited for long.
    """

    node: int
    host: str
    workers: tuple[WorkerView, ...] = ()
    progress: tuple[WorkerProgressRecord, ...] = ()
    age_s: float | None = None
    problem: str = ""
    awaited: AwaitedRecord | None = None

    @property
    def note(self) -> str:
        """A remark on the reading for people, or ""."""
        seen = f"seen {duration(self.age_s)} ago: " if self.problem and self.age_s else ""
        return one_line(seen + self.problem)


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
    others: tuple[NodeReading, ...] = ()

    @property
    def awaited(self) -> AwaitedRecord | None:
        """For which rank others have waited for long, as this node says, or another one."""
        everyone = (self.record.get("awaited"), *(node.awaited for node in self.others))
        return next(filter(None, everyone), None)

    @property
    def restarts(self) -> RestartsRecord:
        """The restarts; none was without progress if a checkpoint is newer than the last resumed.

        The agents look for that only when they restart again.
        """
        used, resumed, latest = self.record["restarts"], self.record["checkpoint"], self.latest
        newer = latest is not None and (resumed is None or latest.step > resumed["step"])
        return {**used, "without_progress": 0} if newer else used

    @property
    def has_others(self) -> bool:
        """Whether the run goes on and has other nodes, which its agent on this machine can ask."""
        here = self.standing.agent in ("answers", "silent", "stopped")
        return here and len(self.record.get("nodes") or ()) > 1


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
    before, measurements = measure_since(before or {}, pids)
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
    if worker["pid"] in running or worker["state"] not in (STARTING, RUNNING):
        return worker["state"]
    over = standing.agent in ("gone", "ended", "runs")
    # An agent that does not answer may have started it since.
    quiet = standing.agent in ("silent", "stopped") and standing.here
    return GONE if over or (quiet and worker["state"] == RUNNING) else worker["state"]


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
