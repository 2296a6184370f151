"""The arms of ``decide`` for a hang: stacks are taken, then the round ends as by a failure. Pure.

::

    RUNNING ──hang seen──► RUNNING, stacks are taken ──taken, or overdue──► STOPPING ──► …

A node whose plan reports a hang on another one has its own stacks taken first, too: the worker that
the others wait for may be here.

Until the stacks are there, everything else goes on as in any round that runs: a worker may still
end, a signal may come. A round whose workers all end with 0 meanwhile did not hang.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import NOTHING, Decision, StopWorkers, TakeStacks
from elaunch.agent.policy.state import Phase, State, workers
from elaunch.rendezvous.plan import Plan


def _on_hang(state: State, event: events.HangSeen) -> Decision:
    if state.hang != event or state.phase is not Phase.RUNNING:
        return NOTHING
    return TakeStacks(), f"{event.reason}; taking the stacks of {workers(len(state.alive))}"


def _on_stacks(state: State, event: events.StacksTaken) -> Decision:
    if not state.taking or event.round != state.round or state.phase is not Phase.RUNNING:
        return NOTHING
    return _stop(state, "stacks captured")


def elsewhere(state: State, plan: Plan) -> Decision | None:
    """Return what comes before this node's workers are stopped for a hang that the plan reports.

    None: nothing, or nothing any more.
    """
    if state.taking:
        return NOTHING if state.stacks is None else None
    if not state.limits.takes_stacks or plan.failure is None or not plan.failure.is_hang:
        return None
    return TakeStacks(), f"{plan.reason}; taking the stacks of {workers(len(state.alive))}"


def overdue(state: State) -> Decision:
    """Return what follows when the stacks do not come."""
    return _stop(state, "no stacks captured in time")


def _stop(state: State, what: str) -> Decision:
    grace, others = state.limits.sibling_grace, workers(len(state.alive))
    reason = f"round hung; {what}; stopping {others}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


ARMS: dict[type, Callable[[State, Any], Decision]] = {
    events.HangSeen: _on_hang,
    events.StacksTaken: _on_stacks,
}
