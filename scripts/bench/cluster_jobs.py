"""Two agents as users start them, one worker each, on loopback: failures, joins, deaths.

=========  ====================================================================================
family     from … to
=========  ====================================================================================
recovery   just before ``os._exit(7)`` of rank 1, while rank 0 waits in a collective → all ranks
           of the next complete round are through their first all-reduce
grow       an agent is started with ``--nnodes 1:2`` → its worker is through its first step; then
           the second agent is started → both workers are through their first step together
shrink     the second agent and all its processes are SIGKILLed → the survivor's worker is
           through its first step alone
leader     the leader of three etcd members is SIGKILLed while two agents train
=========  ====================================================================================

What does not come about within a limit is "never". All stamps are of one monotonic clock.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from cluster_figures import COLUMNS, ETCD, OURS, Case, Figure, Options, Trial
from cluster_places import Place, place
from figures import Sample
from job import POLL, Job

START_SECONDS = 90.0
HEARTBEAT_TIMEOUT = 3.0
"""elaunch's default; torchrun's own defaults come to 15 s or more."""
TRAINED_STEPS = 10
AFTER_LEADER = 2 * HEARTBEAT_TIMEOUT


Found = TypeVar("Found")


class Step(NamedTuple):
    """One line of jobs/train.py."""

    mono: float
    world: int
    rank: int
    step: int
    pid: int


def recovery_cases(options: Options) -> list[Case]:
    """Return the case of a worker that fails."""
    figure = Figure(
        "recovery",
        "a worker of two agents fails → next round's first all-reduce",
        "s",
        dict.fromkeys(OURS, 0.25),
    )
    repeats = dict.fromkeys(COLUMNS, options.repeats)
    return [Case("recovery", "recovery", (figure,), _recovery, repeats)]


def grow_cases(options: Options) -> list[Case]:
    """Return the case of one agent, then two."""
    figures = (
        Figure("alone", "--nnodes 1:2, one agent: start → trains", "s", dict.fromkeys(OURS, 4.0)),
        Figure("joined", "second agent started → both train", "s", dict.fromkeys(OURS, 1.8)),
    )
    return [Case("grow", "one agent, then two", figures, _grow, _slow(options))]


def shrink_cases(options: Options) -> list[Case]:
    """Return the case of an agent that dies with its workers."""
    figure = Figure(
        "survivor",
        "second agent and its workers SIGKILLed → survivor trains",
        "s",
        dict.fromkeys(OURS, HEARTBEAT_TIMEOUT + 0.5),
    )
    return [Case("shrink", "two agents, then one", (figure,), _shrink, _slow(options))]


def leader_cases(options: Options) -> list[Case]:
    """Return the case of etcd's leader that dies."""
    figures = (
        Figure("leader-steps", "etcd's leader (of three) killed: steps lost", "steps", {ETCD: 0}),
        Figure("leader-restarts", "… restarts", "count", {ETCD: 0}),
        Figure("leader-pause", "… longest time between two steps of 50 ms", "ms"),
    )
    return [Case("leader", "etcd's leader", figures, _leader, {ETCD: options.repeats})]


def _slow(options: Options) -> dict[str, int]:
    """Return the samples of a case that takes torchrun a minute or two."""
    few = min(options.slow_repeats, options.repeats)
    return {column: options.repeats if column in OURS else few for column in COLUMNS}


# ── the cases ────────────────────────────────────────────────────────────────────────────────────


def _recovery(trial: Trial) -> Mapping[str, Sample]:
    limit = trial.options.never_recovers
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(place(trial.column, trial.root))
        first, _ = _two_agents(stack, trial.root, where, "2", "exit_in_collective")
        failed_at = _await(first, lambda: _failed_at(first), START_SECONDS)
        ready = _until(lambda: _next_round(first), failed_at + limit)
        if ready is None:
            return {"recovery": _never(limit, first)}
        round_number, moment = ready
        return {"recovery": Sample(moment - failed_at, detail={"round": round_number})}


def _failed_at(job: Job) -> float | None:
    stamp = job.read_stamps("exit").get((0, 1))
    return None if stamp is None else float(stamp["mono"])


def _next_round(job: Job) -> tuple[int, float] | None:
    """Return the first round after the failure that both ranks were in, and when they were."""
    stamps = job.read_stamps("joined")
    for round_number in sorted({number for number, _ in stamps if number > 0}):
        both = [
            stamps[round_number, rank]["mono"] for rank in (0, 1) if (round_number, rank) in stamps
        ]
        if len(both) == 2:
            return round_number, max(both)
    return None


def _grow(trial: Trial) -> Mapping[str, Sample]:
    limit = trial.options.never_joins
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(place(trial.column, trial.root))
        first = stack.enter_context(where.agent(trial.root, "1:2", "train"))
        alone = _await(first, lambda: _first_step(first.stamps, 1, 0.0), START_SECONDS)
        found = {"alone": Sample(alone - first.started)}
        second = stack.enter_context(where.agent(trial.root, "1:2", "train", first.stamps))
        both = _until(lambda: _first_step(first.stamps, 2, 0.0), second.started + limit)
        found["joined"] = _never(limit, second) if both is None else Sample(both - second.started)
        return found


def _shrink(trial: Trial) -> Mapping[str, Sample]:
    limit = trial.options.never_survives
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(place(trial.column, trial.root))
        first, second = _two_agents(stack, trial.root, where, "1:2", "train")
        _await_training(first)
        killed_at = time.monotonic()
        _kill(second)
        alone = _until(lambda: _first_step(first.stamps, 1, killed_at), killed_at + limit)
        found = _never(limit, first) if alone is None else Sample(alone - killed_at)
        return {"survivor": found}


def _leader(trial: Trial) -> Mapping[str, Sample]:
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(place(trial.column, trial.root, members=3))
        first, second = _two_agents(stack, trial.root, where, "2", "train")
        _await_training(first)
        before = {step.pid for step in _steps(first.stamps)}
        leader = where.leader()
        killed_at = time.monotonic()
        leader.kill()
        time.sleep(AFTER_LEADER)
        for job in (first, second):
            if job.process.poll() is not None:
                raise job.error(f"an agent ended with {job.process.returncode}")
        steps = [step for step in _steps(first.stamps) if step.rank == 0]
        restarts = len({step.pid for step in _steps(first.stamps)} - before)
    pauses = [b.mono - a.mono for a, b in itertools.pairwise(steps) if b.mono > killed_at]
    lost = sum(max(0, a.step - b.step + 1) for a, b in itertools.pairwise(steps))
    return {
        "leader-steps": Sample(float(lost)),
        "leader-restarts": Sample(float(restarts)),
        "leader-pause": Sample(max(pauses) * 1000) if pauses else Sample(math.inf, "no step after"),
    }


# ── what they share ──────────────────────────────────────────────────────────────────────────────


def _two_agents(
    stack: contextlib.ExitStack, root: Path, where: Place, nodes: str, job: str
) -> tuple[Job, Job]:
    """Start two agents; the first hosts the store, and all workers stamp in its directory."""
    first = stack.enter_context(where.agent(root, nodes, job))
    where.await_host(first)
    return first, stack.enter_context(where.agent(root, nodes, job, first.stamps))


def _await_training(job: Job) -> None:
    """Wait until two workers have trained some steps together."""

    def trained() -> bool | None:
        ranks = {s.rank for s in _steps(job.stamps) if s.world == 2 and s.step >= TRAINED_STEPS}
        return True if len(ranks) == 2 else None

    _await(job, trained, START_SECONDS)


def _steps(stamps: Path) -> list[Step]:
    """Return all steps of all workers in the order of time."""
    found = []
    for path in stamps.glob("train.*"):
        pid = int(path.suffix[1:])
        for line in path.read_text().splitlines(keepends=True):
            fields = line.split()
            if line.endswith("\n") and len(fields) == 4:  # else it is being written
                world, rank, step = map(int, fields[1:])
                found.append(Step(float(fields[0]), world, rank, step, pid))
    return sorted(found)


def _first_step(stamps: Path, world: int, after: float) -> float | None:
    """Return when all ranks of a world of that size were through a step, none before ``after``."""
    first: dict[int, float] = {}
    for step in _steps(stamps):
        if step.world == world and step.mono >= after:
            first.setdefault(step.rank, step.mono)
    return max(first.values()) if len(first) == world else None


def _await(job: Job, look: Callable[[], Found | None], timeout: float) -> Found:
    """Return what ``look`` finds.

    Raises:
        JobError: the agent ended first, or nothing was found for ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    while (found := look()) is None:
        if job.process.poll() is not None:
            raise job.error(f"ended with {job.process.returncode} before it trained")
        if time.monotonic() > until:
            raise job.error(f"not ready after {timeout:g} s")
        time.sleep(POLL)
    return found


def _until(look: Callable[[], Found | None], until: float) -> Found | None:
    """Return what ``look`` finds before the moment ``until``, or None."""
    while (found := look()) is None and time.monotonic() < until:
        time.sleep(POLL)
    return found


def _never(limit: float, job: Job) -> Sample:
    return Sample(math.inf, f"not within {limit:g} s", {"output": str(job.error("last lines"))})


def _kill(job: Job) -> None:
    """SIGKILL an agent and all its processes at once, the agent first."""
    pids = job.pids() - {job.process.pid}
    for pid in (job.process.pid, *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
