"""Histories of events for the tests of the pure half of the agent: states, decisions."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from elaunch.agent.failure.evidence import Failure
from elaunch.agent.failure.reporter import Reporter
from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.policy import events, turn
from elaunch.agent.policy.actions import Action, Nothing
from elaunch.agent.policy.state import Limits, State
from elaunch.checkpoint.records import Checkpoint, SearchOutcome
from elaunch.rendezvous.coordinator import Standalone, rules_of_one
from elaunch.rendezvous.plan import NodeStatus

READY = events.ServerReady(problem=None)
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
    return structs.replace(failure, exit=failure.exit._replace(**facts))


def gone(round: int = 0) -> events.TreeGone:
    """Return the end of all that a round left."""
    return events.TreeGone(round)


def lost(exitcode: int = -9) -> events.ServerLost:
    """Return the unexpected end of the server."""
    return events.ServerLost(exitcode)


def checkpoint(step: int, path: str = "") -> Checkpoint:
    """Return a complete checkpoint of that step."""
    return Checkpoint(Path(path or f"/ck/step_{step}.pt"), step, "torch.save")


def chosen(step: int | None, problem: str = "", path: str = "") -> events.CheckpointChosen:
    """Return what the coordinator's search found: a checkpoint of ``step``, or none."""
    found = None if step is None else checkpoint(step, path)
    return events.CheckpointChosen(SearchOutcome(found), problem or None)


class Job(Limits, frozen=True):
    """The limits of an agent that is the whole job, and what else was asked of its coordinator."""

    lifetime_budget: bool = False
    has_checkpoint_dir: bool = False


class Played:
    """One agent that takes events as its loop does; where it is the whole job, its coordinator too.

    Its directory has been looked at already, unless it is to be ``fresh``. The clock shows the time
    of the last event that has one, from the start of each round.
    """

    def __init__(self, limits: Limits, fresh: bool = False) -> None:
        self.state = State(limits)
        self.reporter: Reporter | None = None
        self.searches = 0
        self.due: float | None = None
        self._now = 0.0
        self._pending: list[events.Event] = []
        self._publisher: StatusPublisher | None = None
        if not limits.meets:
            self._be_alone(limits)
        if not fresh:
            self.take(events.DirectoryProbed())

    def _be_alone(self, limits: Limits) -> None:
        asked = limits if isinstance(limits, Job) else Job(limits.nproc, limits.max_restarts)
        self._standalone = Standalone(
            rules_of_one(asked.max_restarts, asked.lifetime_budget, asked.has_checkpoint_dir),
            self._pending.append,
            self._search,
            clock=lambda: self._now,
            draw=lambda: ("job", 1.0),
        )
        self._publisher = StatusPublisher(
            self._standalone,
            NodeStatus("", "", 0, 0),
            show=print,
            post=print,
            clock=lambda: self._now,
        )

    def take(self, event: events.Event) -> list[turn.Turn]:
        """Return the turns that the event makes, with those of the plans that follow from it."""
        self._now = getattr(event, "at", self._now)
        if isinstance(event, events.Exit):
            event = event._replace(rank=self.state.first_rank + event.local_rank)
        if isinstance(event, events.DeadlinePassed) and self.due is not None:
            self._now = self.due
        if isinstance(event, events.CheckpointChosen):
            self.searches -= 1
            self._standalone.found(event.result)
        return [self._turn(event), *self._take_plans()]

    def _search(self, _: object) -> None:
        self.searches += 1

    def _take_plans(self) -> list[turn.Turn]:
        turns = []
        while self._pending:
            turns.append(self._turn(self._pending.pop(0)))
        return turns

    def _turn(self, event: events.Event) -> turn.Turn:
        made = turn.make_turn(self.state, event)
        if self.reporter and self.state.first is None and made.before.first is not None:
            self.reporter.look(made.before)
            made = turn.accused(made, self.reporter.accuse(made.before))
        self.state = made.after
        if made.begun is not None:
            self._now = 0.0
        if self._publisher is not None:
            self._publisher.publish(made)
            self.due = self._standalone.decide()
        return made


def decisions(turns: Iterable[turn.Turn]) -> list[Decided]:
    """Return the decisions that were more than waiting in silence."""
    return [
        Decided(each.action, each.reason)
        for each in turns
        if each.reason or not isinstance(each.action, Nothing)
    ]


def play(limits: Limits, history: Iterable[events.Event]) -> tuple[State, list[Decided]]:
    """Return the last state, and the decisions that were more than waiting in silence."""
    played = Played(limits)
    decided = [each for event in history for each in decisions(played.take(event))]
    return played.state, decided


def last(limits: Limits, *history: events.Event, fresh: bool = False) -> Decided:
    """Return the last decision that follows from the last event, also if it is to wait."""
    played = Played(limits, fresh)
    for event in history[:-1]:
        played.take(event)
    return ([Decided(Nothing(), ""), *decisions(played.take(history[-1]))])[-1]
