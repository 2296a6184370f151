"""A round that somebody asks to end, so that the next one begins: the arms of ``decide``. Pure.

::

    `elaunch restart` ──► RestartAsked ──► AskRestart, published ──► the coordinator ──► a plan:
    the round ends, cause ``asked`` ──► each node: the workers save, or are stopped ──► …

It is no failure, and uses no restart. Workers that ask should_preempt() have ``--shutdown-timeout``
to save and to end, as for a node that joins; others get SIGTERM and as long.

Two requests a moment apart are one restart: the second takes part in that which is under way, or
whose round has just begun, if it gives the same reason.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any, Final

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    AskRestart,
    Decision,
    Nothing,
    Notify,
    StopWorkers,
)
from elaunch.agent.policy.state import Phase, State, workers
from elaunch.rendezvous.plan import Plan, RestartRequest
from elaunch.text import duration
from elaunch.wire.worker import Notice

MOMENT_S: Final = 5.0
"""Seconds after a restarted round has begun, in which the same request asks for no other one."""


def stop(state: State, plan: Plan) -> Decision:
    """Return how this node's part of a round ends that the plan ends because of a request."""
    grace, others = state.limits.shutdown_timeout, workers(len(state.alive))
    if state.listens:
        what = f"{plan.reason}; {others} may save, grace {grace:g} s"
        return Notify(Notice(plan.reason, "resize"), grace), what
    reason = f"{plan.reason}; stopping {others}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


def _on_asked(state: State, event: events.RestartAsked) -> Decision:
    plan = state.plan
    if plan is None:
        return Nothing(), f"{event.reason}: no round runs yet"
    if state.restart is not None and state.restart.round == plan.round:
        what = f"round {plan.round} is being restarted already"
        return AskRestart(state.restart), f"{event.reason}: {what}"
    if problem := _refusal(state, plan):
        return Nothing(), f"{event.reason}: {problem}"
    begun = _age(state, plan, event.at)
    if state.restart == RestartRequest(plan.round - 1, event.reason) and begun < MOMENT_S:
        what = f"round {plan.round} has begun for this {duration(begun)} ago"
        what += f"; for another, ask {MOMENT_S:g} s after that"
        return AskRestart(state.restart), f"{event.reason}: {what}"
    what = f"round {plan.round} is to end, and the next begins from the newest checkpoint"
    return AskRestart(RestartRequest(plan.round, event.reason)), f"{event.reason}: {what}"


def _age(state: State, plan: Plan, now: float) -> float:
    """Return for how many seconds the plan's round has run here; inf if it does not."""
    if plan.phase != "running" or plan.node_rank(state.name) is None:
        return math.inf
    if state.began is None or state.round < plan.round:
        return 0.0  # its workers start
    return max(0.0, now - state.began)


def _refusal(state: State, plan: Plan) -> str:
    """Return why the round that the plan shows cannot be asked to end; or ""."""
    if state.interrupted is not None:
        return f"not while this node ends after {state.interrupted.name}"
    if plan.phase == "over":
        return f"the job is over: {plan.reason}"
    if state.asked_to_end or plan.asked:
        return f"the job is asked to end: {state.notice.reason if state.notice else plan.asked}"
    if plan.phase == "forming":
        return f"no round runs: {plan.reason}"
    if plan.phase == "ending" or state.phase in (Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING):
        return f"round {plan.round} ends already"
    return ""


ARMS: dict[type, Callable[[State, Any], Decision]] = {events.RestartAsked: _on_asked}
