"""Histories of events for the tests of the pure half of the agent: states, decisions."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elaunch.agent.failure.ends import Failure
from elaunch.agent.policy import events, turn
from elaunch.agent.policy.actions import Action, Nothing
from elaunch.agent.policy.state import Limits, State
from elaunch.checkpoint.records import Checkpoint, SearchOutcome

READY = events.ServerReady(problem=None, preload_s=0.1)
DEADLINE = events.DeadlinePassed()
TERM = events.SignalReceived(signal.SIGTERM)
INT = events.SignalReceived(signal.SIGINT)
USR1 = events.SignalReceived(signal.SIGUSR1)


@dataclass(frozen=True)
class Decided:
    """One decision that did something or said something."""

    action: Action
    reason: str


def started(rank: int, round: int = 0, at: float = 0.0) -> events.WorkerStarted:
    """Return the start of a worker."""
    return events.WorkerStarted(round, rank, 1000 + rank, at)


def exited(
    rank: int, code: int, round: int = 0, at: float = 1.0, stopped: bool = False
) -> events.Exit:
    """Return the end of a worker; ``stopped``: it had been told to end."""
    return events.Exit(round, rank, rank, 1000 + rank, code, at, stopped)


def left(rank: int, exitcode: int, at: float = 0.0, **known: Any) -> Failure:
    """Return a worker's end at ``at``, in seconds since 1970, with what it left behind."""
    local_rank = known.pop("local_rank", rank)
    return Failure(events.Exit(0, rank, local_rank, 4000 + rank, exitcode, at), at, **known)


def changed(failure: Failure, **facts: Any) -> Failure:
    """Return a worker's end that differs in these facts of its exit."""
    return replace(failure, exit=replace(failure.exit, **facts))


def gone(round: int = 0) -> events.TreeGone:
    """Return the end of all that a round left."""
    return events.TreeGone(round)


def lost(exitcode: int = -9) -> events.ServerLost:
    """Return the unexpected end of the server."""
    return events.ServerLost(exitcode)


def checkpoint(step: int) -> Checkpoint:
    """Return a complete checkpoint of that step."""
    return Checkpoint(Path(f"/ck/step_{step}.pt"), step, "torch.save")


def chosen(
    step: int | None, problem: str | None = None, number: int = 0
) -> events.CheckpointChosen:
    """Return what a search found: a checkpoint of ``step``, or none; 0: of the newest search."""
    found = None if step is None else checkpoint(step)
    return events.CheckpointChosen(SearchOutcome(found), problem, number=number)


def step(state: State, event: events.Event) -> tuple[State, Action, str]:
    """Do what the agent's loop does with one event, but for acting."""
    if isinstance(event, events.CheckpointChosen) and not event.number:
        event = replace(event, number=state.search)
    if isinstance(event, events.Exit):
        event = replace(event, rank=state.first_rank + event.local_rank)
    taken = turn.take(state, event)
    return taken.after, taken.action, taken.reason


def play(limits: Limits, history: Iterable[events.Event]) -> tuple[State, list[Decided]]:
    """Return the last state, and the decisions that were more than waiting in silence."""
    state, decided = State(limits), []
    for event in history:
        state, action, reason = step(state, event)
        if reason or not isinstance(action, Nothing):
            decided.append(Decided(action, reason))
    return state, decided


def last(limits: Limits, *history: events.Event) -> Decided:
    """Return the decision on the last event, also if it is to wait."""
    state, _ = play(limits, history[:-1])
    _, action, reason = step(state, history[-1])
    return Decided(action, reason)
