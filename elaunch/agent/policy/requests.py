"""Cells of the policy's table for a job, or a round of it, that is asked to end. Pure.

Preemption asks the job to save and to end. A notice (elaunch.wire.worker.Notice) goes to workers
whose scripts ask should_preempt(); they agree on the call at which all of them learn of it
(elaunch.training.preempt.preempt), save, and end with 0.

=====================================  =========================================================
what comes                             what is done
=====================================  =========================================================
SIGTERM, and a worker listens          notice, grace ``--shutdown-timeout``; a second SIGTERM goes
                                       to the workers, as does the first where nobody listens
SIGTERM after a stated deadline        nothing: the platform's own, and the deadline holds
a signal of ``--preempt-signals``,     notice, the same grace; a worker that has not asked
``elaunch preempt``, ``--preempt-at``, should_preempt() yet gets it when it does
``--notice-command``
the same with the platform's deadline  notice; the grace ends when the last SIGKILL is due by then
a node joins                           notice of the kind ``resize``: the next round follows at once
another node's workers have a notice   the workers of this node get it, too
a request on a node without workers    the other nodes' workers get the notice, by way of the plan;
                                       where no node has workers, the job ends with 75
a request while the last saves are     the saves are written out first, within their own
written                                deadline, and the job ends as it would have
all workers end with 0, one because    the run is PREEMPTED, exit code 75: to be continued
of the notice, as it has reported
the grace is over                      the workers are ended: KILLED, to be continued as well
=====================================  =========================================================

`elaunch restart` asks a round to end, so that the next one begins::

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
from typing import Final

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    NOTHING,
    AskRestart,
    Decision,
    EndTree,
    Finish,
    Hurry,
    Nothing,
    Notify,
    StopWorkers,
)
from elaunch.agent.policy.state import LOST, Phase, State, workers
from elaunch.endings import KILLED, PREEMPTED
from elaunch.errors import CheckpointError
from elaunch.rendezvous.plan import Plan, RestartRequest
from elaunch.text import duration, ranks
from elaunch.wire.worker import Notice

AT_REST: Final = frozenset({Phase.STARTING, Phase.MEETING})
"""Where an agent of several has no worker: a request there goes to the other nodes."""

Asked = events.PreemptAsked | events.SignalReceived
"""A request, or a signal of --preempt-signals."""


def on_sigterm(state: State, event: events.SignalReceived) -> Decision | None:
    """Return what SIGTERM means to workers that can be asked to end; None if none can."""
    given, notice = event.notice, state.notice
    if event.signum is not signal.SIGTERM or not state.listens or state.sigterms > 1:
        return None
    if given is None and notice is not None and notice.grace is not None:
        return Nothing(), f"SIGTERM received: {notice.reason} already, grace {notice.grace:g} s"
    if state.phase is not Phase.RUNNING:
        return None
    if given is not None:
        return _on_notice_command(state, given)
    if notice is not None and notice.kind == "stop":
        patience = state.limits.shutdown_timeout
        return Hurry(patience), f"SIGTERM received: {notice.reason} already, grace {patience:g} s"
    if state.limits.meets:
        return notify(state, Notice("a node leaves (SIGTERM)", "resize"))
    return notify(state, Notice("SIGTERM received"))


def _on_notice_command(state: State, given: Notice) -> Decision:
    """Return what the workers are sent about what --notice-command has printed."""
    notice, grace = state.notice, _grace(state, given.grace)
    if notice is not None and (notice.kind == "stop" or state.sigterms):
        return _again(notice, given.reason, grace)
    return notify(state, Notice(given.reason, "resize", grace))


def _grace(state: State, left: float | None) -> float | None:
    """Return the seconds that workers have, of those that are left until the platform ends them."""
    return None if left is None else round(left - min(state.limits.sibling_grace, left / 2), 1)


def _again(before: Notice, reason: str, grace: float | None) -> Decision:
    """Return what a notice changes that follows ``before``: the deadline, where it states one."""
    already = f"{reason}: {before.reason} already"
    if grace is None:
        return Nothing(), already
    return Notify(before._replace(grace=grace), grace), f"{already}, grace {grace:g} s"


def notify(state: State, notice: Notice) -> Decision:
    """Return the decision to notify the workers; another node that leaves limits none here."""
    listen = "no worker has called should_preempt() yet"
    if state.listens:
        listen = f"{len(state.listens)} of {workers(state.limits.nproc)} listen"
    if notice.kind == "resize" and state.interrupted is None:
        notice = notice._replace(grace=None)
        return Notify(notice, None), f"{notice.reason}: the workers are asked to save ({listen})"
    grace = state.limits.shutdown_timeout if notice.grace is None else notice.grace
    reason = (
        f"{notice.reason}: the workers are asked to save and to end ({listen}), grace {grace:g} s"
    )
    return Notify(notice, grace), reason


def asked_run(state: State, event: Asked) -> Decision:
    """Ask the workers to save and to end; the newest deadline counts."""
    grace = _grace(state, _left(event))
    if state.asked_to_end and state.notice is not None:
        return _again(state.notice, event.reason, grace)
    return notify(state, Notice(event.reason, "stop", grace))


def asked_end(state: State, event: Asked) -> Decision:
    """Begin no other round."""
    if state.asked_to_end and state.notice is not None:
        return _again(state.notice, event.reason, None)
    grace = 0.0 if state.waits else None
    return Notify(Notice(event.reason), grace), f"{event.reason}: no round follows this one"


def asked_rest(state: State, event: Asked) -> Decision:
    """End the job, or have the other nodes' workers asked."""
    if state.asked_to_end and state.notice is not None:
        return _again(state.notice, event.reason, None)
    if state.stay:
        return asked_end(state, event)
    if not state.limits.meets:
        return Finish(PREEMPTED), f"{event.reason}: no worker runs; to be continued"
    what = f"{event.reason}: no worker runs on this node; the other nodes are asked, too"
    if _left(event) is not None:
        what += ", without the deadline: they have --shutdown-timeout"
    return Notify(Notice(event.reason), state.limits.shutdown_timeout), what


def _left(event: Asked) -> float | None:
    """Return the seconds until the platform ends the job, where that is known."""
    return event.left if isinstance(event, events.PreemptAsked) else None


def ended(state: State) -> Decision:
    """Return the end of a node whose workers were asked to end, and have not failed."""
    assert state.notice is not None  # somebody asked
    if state.preempted:
        return Finish(PREEMPTED), f"preempted: {state.notice.reason}; to be continued"
    if state.lost_save:
        return Finish(CheckpointError.exit_code), LOST
    if state.completed:
        return Finish(0), "all workers ended with 0"
    if state.interrupted is not None:
        reason = f"stopped by {state.interrupted.name}; the workers had not saved and ended before"
        return Finish(128 + state.interrupted), reason
    return Finish(
        KILLED
    ), f"killed: {state.notice.reason}; the workers had not saved and ended before"


def overdue(state: State) -> Decision:
    """Return what becomes of workers that have not ended within the grace of the notice."""
    stated = None if state.notice is None else state.notice.grace
    grace = state.limits.shutdown_timeout if stated is None else stated
    problem = f"the notice was not followed for {grace:g} s"
    silent = sorted(state.first_rank + rank for rank in state.alive - state.listens)
    if silent and len(silent) == len(state.alive):
        problem += "; no worker has asked should_preempt()"
    elif silent:
        have = "has" if len(silent) == 1 else "have"
        problem += f"; {ranks(silent)} {have} not asked should_preempt()"
    elif len(late := state.alive - state.acked or state.alive) < state.limits.nproc:
        have = "has" if len(late) == 1 else "have"
        problem += f"; {ranks(state.first_rank + rank for rank in late)} {have} not ended for it"
    what = f"{problem}; ending {workers(len(state.alive))}"
    return EndTree(signal.SIGTERM, state.limits.sibling_grace), what


def overdue_at_rest(state: State) -> Decision:
    """Return what becomes of a node without workers whose request no coordinator has taken up."""
    plan = state.plan
    if plan is not None and (plan.asked or plan.phase == "ending"):
        return NOTHING  # the coordinator bounds what follows
    if state.notified_in not in (None, *AT_REST) and not state.completed:
        return ended(state)
    reason = "" if state.notice is None else state.notice.reason
    grace = state.limits.shutdown_timeout
    what = f"{reason}: no coordinator has answered for {grace:g} s; this node leaves"
    return Finish(PREEMPTED), f"{what}, to be continued"


def asked_elsewhere(state: State, plan: Plan) -> Decision:
    """Return what to send the workers when the plan says that the job is asked to end."""
    if plan.asked and not state.asked_to_end:
        return notify(state, Notice(plan.asked))
    return newcomers(state)


def newcomers(state: State) -> Decision:
    """Return what to send the workers about the nodes that the plan says are about to join."""
    plan = state.plan
    if plan is None or plan.phase != "running" or plan.round != state.round or not plan.joining:
        return NOTHING
    if state.phase is not Phase.RUNNING or state.notice is not None or not state.listens:
        return NOTHING
    number = len(plan.joining)
    what = "a node joins" if number == 1 else f"{number} nodes join"
    return notify(state, Notice(what, "resize"))


def listen_run(state: State, _: events.WorkerListens) -> Decision:
    """Send a worker that can be asked what the others were sent before."""
    return newcomers(state)


def notice_run(state: State, event: events.NoticeKnown) -> Decision:
    """Send the workers the notice that another node's workers have; a stated deadline is newer."""
    before, notice = state.notice, event.notice
    if before is not None and (before.grace is not None or notice.grace is None):
        return NOTHING
    if before is not None and not before.kind == notice.kind == "stop":
        return NOTHING
    return notify(state, notice)


MOMENT_S: Final = 5.0
"""Seconds after a restarted round has begun, in which the same request asks for no other one."""


def stop(state: State, plan: Plan) -> Decision:
    """Return how this node's part of a round ends that the plan ends because of a request."""
    grace, others = state.limits.shutdown_timeout, workers(len(state.alive))
    if state.left:  # the others wait for it, and cannot save
        return EndTree(), f"{plan.reason}; killing {others}"
    if state.listens:
        what = f"{plan.reason}; {others} may save, grace {grace:g} s"
        return Notify(Notice(plan.reason, "resize"), grace), what
    reason = f"{plan.reason}; stopping {others}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


def restart(state: State, event: events.RestartAsked) -> Decision:
    """Ask for another round, unless one begins already or none can follow."""
    plan, what = state.plan, event.reason
    if plan is None:
        return Nothing(), f"{what}: no round runs yet"
    if state.restart is not None and state.restart.round == plan.round:
        return AskRestart(state.restart), f"{what}: round {plan.round} is being restarted already"
    if problem := _refusal(state, plan):
        return Nothing(), f"{what}: {problem}"
    before = RestartRequest(plan.round - 1, what)
    if state.restart == before and (begun := _age(state, plan, event.at)) < MOMENT_S:
        what += f": round {plan.round} has begun for this {duration(begun)} ago"
        return AskRestart(before), f"{what}; for another, ask {MOMENT_S:g} s after that"
    ends = f"round {plan.round} is to end, and the next begins from the newest checkpoint"
    return AskRestart(RestartRequest(plan.round, what)), f"{what}: {ends}"


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
