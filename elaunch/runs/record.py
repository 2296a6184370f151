"""The record of a run: what ``state.json`` holds and what the agent's socket answers.

Both are the same JSON object, :class:`Record`. It is written whole at each change, so a reader sees
one moment of the run or another, never a mixture. States:

===========  =============================================================================
STARTING     the agent exists, no worker of the first round is running yet
RUNNING      every worker of the round was started
STOPPING     the workers are being ended, no round follows
RESTARTING   the workers of a round ended, the next round is being prepared
COMPLETED    every worker ended with exit code 0
FAILED       a worker failed and no restart was left, or the agent itself failed
STOPPED      a signal ended the run
PREEMPTED    the workers were asked to end, have saved and ended with 0: to be continued
KILLED       they were asked to and did not in time: to be continued from the last checkpoint
===========  =============================================================================

The first four are live, the others final. An agent that was killed leaves a record with a live
state: ``elaunch status`` shows it as LOST.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast

from elaunch.errors import RunDirError
from elaunch.runs.identity import AgentRecord, WorkerRecord, this_agent
from elaunch.text import arguments

SCHEMA: Final = 1
LIVE_STATES: Final = frozenset({"STARTING", "RUNNING", "STOPPING", "RESTARTING"})
FINAL_STATES: Final = frozenset({"COMPLETED", "FAILED", "STOPPED", "PREEMPTED", "KILLED"})

KEPT_ROUNDS: Final = 100
"""Rounds in a record, which is written whole at each change; a run may have thousands."""


class RestartsRecord(TypedDict):
    """Restarts so far and what is left of them."""

    used: int
    without_progress: int
    max: int
    budget: str


class CheckpointRecord(TypedDict):
    """The checkpoint that this round resumed from."""

    path: str
    step: int
    format: str


class _RoundRequired(TypedDict):
    round: int
    reason: str | None
    started_at: float
    ended_at: float | None
    recovery_s: float | None
    resumed_step: int | None


class RoundRecord(_RoundRequired, total=False):
    """One round of the run; ``recovery_s`` is from the failure before it to its running again.

    ``lasted_s`` is how long it has lasted so far, whatever is done to the clock meanwhile;
    ``planned``: the round before was asked to end, or its nodes changed, and nothing had failed.
    ``kept``: the ranks whose processes went on from the round before, without a step lost.
    """

    lasted_s: float
    planned: bool
    kept: list[int]


class NodeRecord(TypedDict):
    """One node of the round, in the order of the node ranks."""

    name: str
    host: str
    addr: str
    slots: int


class WorkerProgressRecord(TypedDict):
    """How far one worker is, where that is known; ``silent_s`` since its last report."""

    rank: int
    local_rank: int
    step: int | None
    progress: float | None
    status: str
    section: str
    doing: str
    silent_s: float | None


class ProgressRecord(TypedDict):
    """How far the workers of the round are, and the source of that.

    ``source`` is ``script`` or ``log lines``; ``limit_s`` is how long nothing may move at present
    (None: not watched, or, if ``learning``, not learned yet).
    """

    source: str
    limit_s: float | None
    learning: bool
    workers: list[WorkerProgressRecord]


class RankLatenessRecord(TypedDict):
    """How often a rank came ``last`` to a collective, and typically how far behind the others."""

    rank: int
    last: int
    behind_s: float


class LatenessRecord(TypedDict):
    """Which rank of this node comes last to the collectives, those first that do most often.

    ``collectives`` are counted, which began in the ``seconds`` before ``until``; for the share
    ``held`` of that time ranks waited for the last. ``slow`` is the rank for which they do, ``why``
    what was measured that may be the reason, or "".
    """

    collectives: int
    until: float
    seconds: float
    held: float
    slow: int | None
    ranks: list[RankLatenessRecord]
    why: str


class AwaitedRecord(TypedDict):
    """For which ``ranks`` others have waited for long, in a ``text``; [] where nobody is named."""

    ranks: list[int]
    text: str


class SavesRecord(TypedDict):
    """The saves of a run; there once a worker has used its checkpoints.

    ``step`` and ``committed_at`` are of the newest that was committed, ``seconds`` how long that
    took from its first shard to the commit; ``saving`` is the step that is on its way to the disk
    now; ``problem`` is why the last one came to nothing, empty if it did not; ``commits`` counts
    what was committed, by the agent and by the ranks themselves.
    """

    step: int | None
    committed_at: float | None
    seconds: float
    saving: int | None
    problem: str
    commits: int


class SlowestRecord(TypedDict):
    """The rank whose own part of a step takes longest, in the newest round in which that is known.

    ``step_s``: seconds of its own for a step; ``median_s``: of the ranks of this node.
    """

    rank: int
    step_s: float
    median_s: float


class LoaderRecord(TypedDict):
    """The processes of DataLoaders on this node (elaunch.agent.hangs.processes).

    ``processes``: the most that one worker has had; ``seconds``: for which all of them were watched
    together; ``busy``: the share of that in which they computed; ``cpus`` for each worker.
    """

    processes: int
    seconds: float
    busy: float
    cpus: int


Reports = Literal["", "nothing", "context", "steps"]
"""Kinds of scripts by what they report, the least first; "": of an earlier version, not known."""


class TimingRecord(TypedDict):
    """Where the time of this node's slots went, over all agents that have run it so far.

    ``seconds`` by class (elaunch.runs.verdict.CLASSES) are means over the ``slots``; their sum is
    ``wall_s``. ``reports`` is what the script shows of itself: ``steps``, ``context`` (it calls
    ``elaunch.init()``) or ``nothing``. ``step_s``: of a step, without waits and saves.
    ``spare_threads``: CPUs for each worker, where each has one thread by default; else 0.
    """

    slots: int
    wall_s: float
    seconds: dict[str, float]
    failures: int
    reports: Reports
    step_s: float | None
    slowest: SlowestRecord | None
    spare_threads: int
    loaders: LoaderRecord | None


class LateRecord(TypedDict):
    """The slow rank of a node, on ``host``, as in its LatenessRecord."""

    rank: int
    last: int
    collectives: int
    behind_s: float
    held: float
    seconds: float
    host: str
    why: str


class JobTimingRecord(TypedDict):
    """Where the time of all nodes' slots went: means over the slots of the last round's nodes."""

    nodes: int
    slots: int
    wall_s: float
    seconds: dict[str, float]
    reports: Reports
    slowest: SlowestRecord | None
    late: LateRecord | None


class _RecordRequired(TypedDict):
    schema: int
    run_id: str
    name: str
    dir: str
    state: str
    reason: str | None
    agent: AgentRecord
    started_at: float
    ended_at: float | None
    round: int
    restarts: RestartsRecord
    world_size: int | None
    nproc_per_node: int | None
    entrypoint: str
    argv: list[str]
    cwd: str
    start_method: str
    interpreter: str
    workers: list[WorkerRecord]
    checkpoint_dir: str | None
    checkpoint_glob: str | None
    checkpoint: CheckpointRecord | None
    exit_code: int | None
    failure: dict[str, Any] | None
    log_dir: str | None
    history: list[RoundRecord]


class Record(_RecordRequired, total=False):
    """One moment of a run; times in seconds since the epoch, ``argv`` the whole command line.

    The optional fields are there in a job of several nodes: this node's rank (None: not in the
    round), the nodes (the first 64 of them where this is not node 0), how many there are, whether
    this one stands by as a spare, how many nodes wait to join, the first failure of the job where
    it was on another node, and, at the end, where the time of all nodes went. Where the script
    itself writes it (elaunch.training.tracking): what started it; ``agent`` is then one of the
    workers. ``progress``, ``lateness``, ``saves`` and ``timing`` are there where something is known
    of them; ``awaited``, while it is so, in an agent's answer only. ``rounds_left_out`` are the
    rounds before those of ``history``. ``code`` is that of docs/errors.md where elaunch itself has
    ended the run. ``lasted_s``: as of a round.
    """

    node_rank: int | None
    nodes: list[NodeRecord]
    node_count: int
    standby: bool
    joining: int
    job_failure: dict[str, Any] | None
    launcher: str
    job_timing: JobTimingRecord
    progress: ProgressRecord
    lateness: LatenessRecord
    awaited: AwaitedRecord
    saves: SavesRecord
    timing: TimingRecord
    rounds_left_out: int
    lasted_s: float
    code: str
    dashboard: str


def parse(raw: bytes, source: str) -> Record:
    """Return the record in ``raw``; raise RunDirError, naming ``source``, when it holds none."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        what = "is empty" if not raw.strip() else f"is not JSON ({exc})"
        raise RunDirError(
            f"{source} {what}: it was cut off or written by something else than elaunch"
        ) from None
    return check(data, source)


def check(data: object, source: str) -> Record:
    """Return ``data`` as a record; raise RunDirError, naming ``source``, where it differs.

    Fields that are not known are a newer writer's, and stay.
    """
    import msgspec  # where records are read only: no worker pays for it

    if not isinstance(data, dict) or "schema" not in data:
        raise RunDirError(f"{source} is not the record of a run: it has no field 'schema'")
    if data["schema"] != SCHEMA:
        raise RunDirError(
            f"{source} was written by another version of elaunch: its schema is "
            f"{data['schema']!r}, this version reads {SCHEMA}"
        )
    try:
        msgspec.convert(data, Record)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:  # a half of a character: no text
        problem, _, place = str(exc).replace("`", "").partition(" - at $.")
        where = f"in the field {place!r}: " if place else ""
        raise RunDirError(f"{source} is not the record of a run: {where}{problem}") from None
    if data["state"] not in LIVE_STATES | FINAL_STATES:
        raise RunDirError(f"{source} has the unknown state {data['state']!r}")
    for one in (data, *data["workers"], *data["history"]):
        for at in (one["started_at"], one["ended_at"]):
            if at is not None and not 0.0 <= at <= 1e11:  # what no calendar shows
                raise RunDirError(f"{source} is not the record of a run: {at!r} is no time")
    return cast("Record", data)


def lasted(record: Record | RoundRecord, now: float) -> float:
    """Return how many seconds a run, or a round, has lasted that has ended, or goes on ``now``."""
    seconds = (record["ended_at"] or now) - record["started_at"]
    return max(0.0, record.get("lasted_s", seconds))


def steps(progress: ProgressRecord | None) -> list[int]:
    """Return the steps that workers have shown."""
    shown = [one["step"] for one in progress["workers"]] if progress else []
    return [step for step in shown if step is not None]


def first_record(run_id: str, name: str, directory: Path) -> Record:
    """Return the record of a run that this process writes from now on; its state is STARTING."""
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "name": name,
        "dir": str(directory),
        "state": "STARTING",
        "reason": None,
        "agent": this_agent(),
        "started_at": time.time(),
        "ended_at": None,
        "round": 0,
        "restarts": {"used": 0, "without_progress": 0, "max": 0, "budget": "lifetime"},
        "world_size": None,
        "nproc_per_node": None,
        "entrypoint": "",
        "argv": arguments(sys.argv),
        "cwd": os.getcwd(),
        "start_method": "",
        "interpreter": sys.executable,
        "workers": [],
        "checkpoint_dir": None,
        "checkpoint_glob": None,
        "checkpoint": None,
        "exit_code": None,
        "failure": None,
        "log_dir": None,
        "history": [],
    }


def new_worker(rank: int, local_rank: int) -> WorkerRecord:
    """Return the record of a worker that is about to be started."""
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": None,
        "state": "STARTING",
        "exit": None,
        "exit_code": None,
        "started_at": None,
        "ended_at": None,
    }


def add_round(record: Record, begun: RoundRecord) -> None:
    """Append a round; the oldest go once there are more than KEPT_ROUNDS, and are counted."""
    history = record["history"]
    history.append(begun)
    extra = len(history) - KEPT_ROUNDS
    if extra > 0:
        del history[:extra]
        record["rounds_left_out"] = record.get("rounds_left_out", 0) + extra


def new_round(round: int, reason: str | None, resumed_step: int | None = None) -> RoundRecord:
    """Return the record of a round that begins now."""
    return {
        "round": round,
        "reason": reason,
        "started_at": time.time(),
        "ended_at": None,
        "recovery_s": None,
        "resumed_step": resumed_step,
    }
