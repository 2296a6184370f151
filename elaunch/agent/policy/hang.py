"""Cells of the policy's table for a hang: stacks are taken, then the round ends. Pure.

::

    RUNNING ──hang seen──► RUNNING, stacks are taken ──taken, or overdue──► STOPPING ──► …

A node whose plan reports a hang on another one has its own stacks taken first, too: the worker that
the others wait for may be here.

Until the stacks are there, everything else goes on as in any round that runs: a worker may still
end, a signal may come. A round whose workers all end with 0 meanwhile did not hang.
"""

from __future__ import annotations

import signal

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import NOTHING, Decision, StopWorkers, TakeStacks
from elaunch.agent.policy.state import State, workers
from elaunch.rendezvous.plan import Plan


def hang_run(state: State, event: events.HangSeen) -> Decision:
    """Take the stacks, unless the round ends already (elaunch.agent.policy.state)."""
    if state.hang != event:
        return NOTHING
    return TakeStacks(), f"{event.reason}; taking the stacks of {workers(len(state.alive))}"


def stacks_run(state: State, _: events.StacksTaken) -> Decision:
    """Stop the workers: what they were doing is known."""
    return _stop(state, "stacks captured") if state.taking else NOTHING


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
