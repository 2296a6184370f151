"""The one document of a job, as a reader on one machine sees it.

It is the run's record (elaunch.runs.record) with what was seen beside it: whether the agent lives,
what the workers take of the machine, what other nodes' agents say of theirs, the newest checkpoint,
the failed rounds. ``elaunch.views.read`` makes it; ``status``, ``why``, ``top``, the dashboard,
``/metrics`` and OTLP show it. Each fact is computed here or there, once.

===========  ===================================================================================
agent        meaning
===========  ===================================================================================
answers      the reading is live
silent       its process runs but has not answered in time; the reading is ``state.json``
stopped      its process is suspended; the reading is ``state.json``
gone         it was killed: a live state becomes LOST
elsewhere    it runs on another host or in another container; the reading is ``state.json``
runs         there is none: the script keeps the record itself, and runs
ended        the state is final
===========  ===================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal

from msgspec import Struct

from elaunch.errors import RunDirError
from elaunch.runs.directory import RunDir
from elaunch.runs.identity import WorkerRecord
from elaunch.runs.record import (
    LIVE_STATES,
    AwaitedRecord,
    Record,
    RestartsRecord,
    RoundRecord,
    WorkerProgressRecord,
    lasted,
)
from elaunch.runs.usage import Usage
from elaunch.text import duration, one_line

LOST: Final = "LOST"
UNREADABLE: Final = "UNREADABLE"
GONE: Final = "GONE"
BAD: Final = frozenset({"FAILED", LOST, "KILLED", UNREADABLE})
QUIET: Final = 0.5
"""Share of the hang timeout after which a silent rank is named."""
BEHIND: Final = 2
"""Steps by which a rank is behind that is named: one is what any reading may show."""

AgentState = Literal["answers", "silent", "stopped", "gone", "elsewhere", "runs", "ended"]


class WorkerSeen(Struct, frozen=True):
    """One worker: its record, its state as seen now, what it takes while it runs, how far it is."""

    record: WorkerRecord
    state: str
    usage: Usage | None = None
    progress: WorkerProgressRecord | None = None

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.record["rank"]

    @property
    def step(self) -> int | None:
        """The step that it has reported last."""
        return self.progress and self.progress["step"]

    @property
    def silent_s(self) -> float | None:
        """Seconds since it last said anything; None where that is not known, or of no interest."""
        return self.progress and self.progress["silent_s"]

    @property
    def doing(self) -> str:
        """Its last call of ``ctx``, or ""."""
        return self.progress["doing"] if self.progress else ""


class NodeSeen(Struct, frozen=True):
    """One node of the round: its ranks and, of another one than ``here``, what its agent says.

    ``age_s`` is how old that is, None where it has not answered in this round; ``problem`` why it
    does not answer now, or ""; ``awaited`` for which rank its ranks have waited for long.
    """

    number: int
    host: str
    first: int
    slots: int
    here: bool = False
    workers: tuple[WorkerSeen, ...] = ()
    age_s: float | None = None
    problem: str = ""
    awaited: AwaitedRecord | None = None

    @property
    def note(self) -> str:
        """A remark on the reading for people, or ""."""
        seen = f"seen {duration(self.age_s)} ago: " if self.problem and self.age_s else ""
        return one_line(seen + self.problem)


class JudgedNode(Struct, frozen=True):
    """A node with its ranks, the worst first: level, rank, and what is known of its worker.

    =====  ==================================================================
    level  of a rank; a node has that of its worst rank
    =====  ==================================================================
    2      it has failed, is gone, or is silent for long
    1      it is behind the others, or comes last to the collectives
    0      nothing is known against it
    =====  ==================================================================
    """

    seen: NodeSeen
    level: int
    ranks: tuple[tuple[int, int, WorkerSeen | None], ...]


class LatestCheckpoint(Struct, frozen=True):
    """The newest complete checkpoint now; ``age_s`` by its file's time of change."""

    path: str
    step: int
    format: str
    age_s: float


class JobDocument(Struct, frozen=True, dict=True):
    """One reading of a run; one in a list has what stands in its record, and no more.

    Attributes:
        record: None where none can be read; the state is UNREADABLE then, and the reason is why.
        written_at: when the record was written, in seconds since the epoch, if it may be out of
            date.
        workers: of this node.
        nodes: of the round, by node rank.
        latest_note: what was skipped in the search for ``latest``, or went wrong.
        failures: the failed rounds in short, the newest first, for a screen.
    """

    run: RunDir
    record: Record | None
    state: str
    reason: str | None
    agent: AgentState
    read_at: float
    written_at: float | None = None
    workers: tuple[WorkerSeen, ...] = ()
    nodes: tuple[NodeSeen, ...] = ()
    latest: LatestCheckpoint | None = None
    latest_note: str | None = None
    failures: tuple[dict[str, Any], ...] = ()

    @property
    def known(self) -> Record:
        """The record; RunDirError where none can be read."""
        if self.record is None:
            raise RunDirError(self.reason or f"nothing can be read in {self.run.path}")
        return self.record

    @property
    def run_id(self) -> str:
        """The run's id; the name of its directory where no record can be read."""
        return self.run.path.name if self.record is None else self.record["run_id"]

    @property
    def live(self) -> bool:
        """Whether the run goes on, as far as can be seen from here."""
        return self.state in LIVE_STATES

    @property
    def here(self) -> bool:
        """Whether the run is or was one of this machine, or nothing is known of it."""
        return self.record is None or self.record["agent"]["host"] == os.uname().nodename

    @property
    def duration_s(self) -> float | None:
        """How long the run has lasted in seconds; None where its end is not known."""
        if self.record is None:
            return None
        return self._lasted(self.record, self.agent in ("answers", "ended"))

    def round_s(self, entry: RoundRecord) -> float | None:
        """Return how long a round of it has lasted in seconds; None where its end is not known."""
        return self._lasted(entry, entry["ended_at"] is not None or self.agent == "answers")

    def _lasted(self, part: Record | RoundRecord, known: bool) -> float | None:
        if known:
            return lasted(part, self.read_at)
        return max(0.0, self.read_at - part["started_at"]) if self.live else None

    @property
    def others(self) -> tuple[NodeSeen, ...]:
        """The other nodes of a run that goes on, which the agent on this machine can ask."""
        if self.agent not in ("answers", "silent", "stopped") or len(self.nodes) < 2:
            return ()
        return tuple(node for node in self.nodes if not node.here)

    @cached_property
    def everyone(self) -> tuple[WorkerSeen, ...]:
        """The workers of all nodes by rank, as far as they are known."""
        found = [*self.workers, *(worker for node in self.others for worker in node.workers)]
        return tuple(sorted(found, key=lambda worker: worker.rank))

    @property
    def awaited(self) -> AwaitedRecord | None:
        """For which rank others have waited for long, as this node says, or another one."""
        everyone = (self.known.get("awaited"), *(node.awaited for node in self.others))
        return next(filter(None, everyone), None)

    @property
    def restarts(self) -> RestartsRecord:
        """The restarts; none was without progress if a checkpoint is newer than the last resumed.

        The agents look for that only when they restart again.
        """
        used, resumed, latest = self.known["restarts"], self.known["checkpoint"], self.latest
        newer = latest is not None and (resumed is None or latest.step > resumed["step"])
        return {**used, "without_progress": 0} if newer else used

    @property
    def gist(self) -> object:
        """The state, without amounts and ages: a change of it is one that is shown."""
        record = self.record
        how = (self.run, self.state, self.agent, self.reason, record and record["round"])
        if record is None or not self.nodes:  # one of a list
            return how
        workers = tuple((one.record["pid"], one.state, one.record["exit"]) for one in self.workers)
        latest = self.latest and (self.latest.path, self.latest.step)
        return how, tuple(record["restarts"].items()), workers, latest, "awaited" in record

    @property
    def silent(self) -> list[WorkerSeen]:
        """The workers that have been silent for half of the hang timeout."""
        progress = self.known.get("progress")
        limit = progress and progress["limit_s"]
        return [one for one in self.everyone if limit and (one.silent_s or 0.0) > QUIET * limit]

    @property
    def behind(self) -> list[WorkerSeen]:
        """The workers that are behind most others, if few are and all have reported a step."""
        workers = self.everyone
        steps = [one.step for one in workers if one.step is not None]
        first = max(steps, default=0) - BEHIND
        behind = [one for one in workers if steps and (one.step or 0) <= first]
        few = len(steps) == len(workers) and len(behind) < len(workers) / 2
        return behind if few else []

    @property
    def judged(self) -> list[JudgedNode]:
        """The nodes with their ranks, the worst first."""
        if self.record is None:
            return []
        known = {worker.rank: worker for worker in self.everyone}
        levels, found = dict(self._levels(self.record)), []
        for node in self.nodes:
            # The record of a script, or of a job that has not begun, has no number of slots.
            span = range(node.first, node.first + node.slots) if node.slots else known
            ranks = [(levels.get(rank, 0), rank, known.get(rank)) for rank in span]
            ranks.sort(key=lambda one: (-one[0], one[1]))
            worst = max((one[0] for one in ranks), default=0)
            found.append(JudgedNode(node, max(worst, int(bool(node.note))), tuple(ranks)))
        return sorted(found, key=lambda one: (-one.level, one.seen.number))

    def _levels(self, record: Record) -> Iterator[tuple[int, int]]:
        """Yield ranks with their levels, of one rank the worst last."""
        yield from ((worker.rank, 1) for worker in self.behind)
        yield from ((rank, 1) for rank in (self.awaited or {"ranks": []})["ranks"])
        lateness = record.get("lateness")
        if lateness is not None and lateness["slow"] is not None and self.live:
            yield lateness["slow"], 1
        bad = (worker for worker in self.everyone if worker.state in ("FAILED", GONE))
        yield from ((worker.rank, 2) for worker in (*self.silent, *bad))
        failed = (one for one in self.failures if one["round"] == record["round"])
        yield from ((rank, 2) for one in failed for rank in one["ranks"])


def round_nodes(record: Record) -> tuple[NodeSeen, ...]:
    """Return the nodes of the round with the ranks of each.

    Of many nodes the record has the first; the run's own is behind them if it is none of those.
    """
    here, slots = record["agent"]["host"], record["nproc_per_node"] or 0
    own, first, found = record.get("node_rank", 0), 0, []
    nodes: Sequence[Mapping[str, Any]] = record.get("nodes") or ()
    for number, node in enumerate(nodes or [{"host": here, "slots": slots}]):
        found.append(NodeSeen(number, str(node["host"]), first, node["slots"], number == own))
        first += node["slots"]
    if own is not None and own >= len(found):
        first = min((worker["rank"] for worker in record["workers"]), default=first)
        found.append(NodeSeen(own, here, first, slots, True))
    return tuple(found)


def progress_of(record: Record, live: bool) -> dict[int, WorkerProgressRecord]:
    """Return how far each worker of this node is, by its rank.

    Of a run that is no longer ``live`` it is of no interest how long ago it said anything.
    """
    progress = record.get("progress")
    workers = progress["workers"] if progress else []
    return {one["rank"]: one if live else {**one, "silent_s": None} for one in workers}
