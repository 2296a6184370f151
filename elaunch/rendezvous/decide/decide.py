"""Every decision of the coordinator: ``decide(view, now, rules) -> (step, reason)``. Pure.

=========  =====================================================================================
phase      what is decided
=========  =====================================================================================
forming    is anybody missing, and for how long (elaunch.rendezvous.decide.formation)
running    has a worker failed, a node gone, are all done, is the job asked to end, or the round
           to be restarted, does a node join
ending     has everyone ended; may a round follow; who is in it
           (elaunch.rendezvous.decide.formation)
over       nothing
=========  =====================================================================================

The step is a plan to publish, a search for a checkpoint, an eviction, or a wait; the reason is the
text that the plan carries to the log of every agent, to the status page, and to the tests. A new
cause of a new round is one arm here and one row in tests/rendezvous/decide/test_decide.py.

Newcomers while a round runs are announced, then let in with a new round, or kept as spares:

==================  ==============================================================================
newcomers           what happens
==================  ==============================================================================
there is room       announced (``Plan.joining``); when all are ready, and none came for
                    ``debounce`` seconds, the round ends for them: ten cost one restart
workers listen      announced when all are ready: the workers save and end by themselves; the round
                    is ended if they have not within ``preempt_grace`` seconds
the job is full     ``Plan.spares``: they replace the next that is lost
lost many times     spares, too, for as long as others suffice (elaunch.rendezvous.decide.members)
``--on-join never`` announced; they are in the next round, whatever it begins for
a node is done      as never: the job is about to end
==================  ==============================================================================
"""

from __future__ import annotations

import signal

from msgspec.structs import replace

from elaunch.endings import PREEMPTED
from elaunch.errors import StoreError
from elaunch.rendezvous import text
from elaunch.rendezvous.decide import formation
from elaunch.rendezvous.decide.budget import LOSS_APART
from elaunch.rendezvous.decide.formation import over, publish
from elaunch.rendezvous.decide.members import READY_PATIENCE, order, unstable, waiting
from elaunch.rendezvous.decide.view import Decision, Evict, Publish, Rules, Search, View, Wait
from elaunch.rendezvous.plan import Cause, Node, NodeStatus, Plan
from elaunch.text import count

MOST_NAMED = 3
"""Lost nodes that a reason names."""


def decide(view: View, now: float, rules: Rules) -> Decision:
    """Return what to do now, and why.

    A wait with a reason is published every ``remind`` seconds: agents that receive no plan for much
    longer conclude that no coordinator is left (elaunch.rendezvous.waiting).

    Args:
        view: the plan and the members, as the coordinator has them.
        now: the coordinator's monotonic clock.
        rules: what the user asked for.
    """
    step, reason = _decide(view, now, rules)
    if isinstance(step, Publish):
        return Publish(replace(step.plan, waits="")), reason
    if isinstance(step, Search | Evict) or not reason or view.plan.phase == "over":
        return step, reason
    due = view.published_at + rules.remind
    if now < due:
        return Wait(due if step.until is None else min(step.until, due)), reason
    waits = f"{reason}, for {_rounded(now - view.phase_since, rules.remind):g} s"
    return Publish(replace(view.plan, waits=waits)), reason


def _rounded(seconds: float, unit: float) -> float:
    """Return the largest of 1, 2, 4, 8 … ``unit`` in ``seconds``: the text changes that often."""
    while 2 * unit <= seconds:
        unit *= 2
    return unit


def _decide(view: View, now: float, rules: Rules) -> Decision:
    plan = view.plan
    if view.unannounced:
        return publish(plan)
    if plan.phase == "over":
        return Wait(), plan.reason
    stopped = _stopped(view, rules)
    if stopped is not None:
        return publish(stopped)
    if plan.phase == "running":
        ended = _ended(view, now, rules) or _never_began(view, now, rules)
        if ended is not None:
            return publish(ended)
        asked = formation.end_request(view)
        if asked and not plan.asked:
            return Publish(replace(plan, asked=asked)), f"the job is asked to end: {asked}"
        again = None if asked or plan.asked else formation.restart_request(view)
        if again is not None:
            return publish(again)
        return _running(view, now, rules)
    return formation.decide(view, now, rules)


def _stopped(view: View, rules: Rules) -> Plan | None:
    """Return the job's end if all agents were asked to leave, or the one that hosts the store."""
    leaving = [one.record for one in view.present.values() if one.record.state == "leaving"]
    if not leaving:
        return None
    mine = view.present.get(view.me)
    if rules.hosted_by_me and mine is not None and mine.record.state == "leaving":
        first = mine.record
        reason = (
            f"node {text.node(first)} leaves ({first.reason or 'it was told to'}) and the store, "
            "which it hosts, goes with it; etcd (--rdzv-backend etcd) survives the loss of any node"
        )
    elif len(leaving) == len(view.present):
        first = leaving[0]
        reason = first.reason or "every agent was told to leave"
    else:
        return None
    code = 128 + signal.SIGTERM if first.exit_code is None else first.exit_code
    return over(view.plan, code, reason)


def _ended(view: View, now: float, rules: Rules) -> Plan | None:
    """Return what follows if the round that runs has come to its end, one way or another."""
    plan = view.plan
    lost, left, stopped, finished = [], [], [], 0
    for node in plan.nodes:
        member, absent = view.present.get(node.name), view.absent.get(node.name)
        record = member.record if member else (absent.last if absent else None)
        of_round = record is not None and record.round == plan.round
        if record is not None and of_round and record.state == "finished":
            finished += 1  # what it had to do is done, whether it is still there or not
        elif member is None:
            lost.append((node, absent))
        elif member.record.state == "leaving":
            left.append(member.record)
        elif of_round and member.record.state == "ended" and member.record.failure is None:
            stopped.append(node)
    if finished == len(plan.nodes):
        preempted = _preempted(view)
        if preempted is not None:
            return preempted
        return over(replace(plan, failure=None), 0, "all workers ended with 0")
    if lost:
        lines = [text.gone(node, absent, rules.heartbeat_timeout) for node, absent in lost]
        more = f" and {len(lines) - MOST_NAMED} more nodes" if len(lines) > MOST_NAMED else ""
        all_left = all(absent is not None and absent.cause == "left" for _, absent in lost)
        cause: Cause = "left" if all_left else "lost"
        reason = "; ".join(lines[:MOST_NAMED]) + more
        return formation.without(view, cause, reason, [node for node, _ in lost], now)
    if left:
        why = f": {left[0].reason}" if left[0].reason else ""
        reason = f"{text.named(left)} {'leaves' if len(left) == 1 else 'leave'}{why}"
        return replace(plan, phase="ending", cause="left", reason=reason, failure=None)
    failed = formation.first_failure(view, now)
    if failed is not None:
        reason = text.failure(failed)
        return replace(plan, phase="ending", cause="failure", reason=reason, failure=failed)
    if stopped and plan.asked:
        reason = f"the workers of {text.named(stopped)} had not saved and ended before"
        return replace(plan, phase="ending", cause="left", reason=reason, failure=None)
    if stopped:
        were = "was" if len(stopped) == 1 else "were"
        reason = f"{text.named(stopped)} {were} cut off from the store; the workers there are dead"
        return formation.without(view, "lost", reason, stopped, now)
    return None


def _idle(view: View) -> list[Node]:
    """Return the nodes of the round that runs which are there and have not started their part."""
    present, plan = view.present, view.plan
    return [
        n for n in plan.nodes if n.name in present and present[n.name].record.round < plan.round
    ]


def _never_began(view: View, now: float, rules: Rules) -> Plan | None:
    """Return the job's end if a node has not started its workers for as long as nodes may take."""
    patience, idle = rules.patience, _idle(view)
    if not idle or now < view.phase_since + patience:
        return None
    reason = f"{text.nodes(idle)} did not start round {view.plan.round} in {patience:g} s"
    return over(view.plan, StoreError.exit_code, reason)


def _running(view: View, now: float, rules: Rules) -> Decision:
    """Return what to do about newcomers, and which nodes have yet to start the round."""
    step, reason = (Wait(), "") if view.plan.asked else _newcomers(view, now, rules)
    idle = _idle(view)
    if not idle or not isinstance(step, Wait):
        return step, reason
    until = view.phase_since + rules.patience
    until = until if step.until is None else min(until, step.until)
    return Wait(until), f"waiting for {text.nodes(idle)} to start round {view.plan.round}"


def _preempted(view: View) -> Plan | None:
    """Return what follows when all have ended with 0, and some because they were asked to."""
    plan = view.plan
    records = [view.present[node.name].record for node in plan.nodes if node.name in view.present]
    preempted = [record for record in records if record.preempted]
    if not preempted:
        return None
    stop = next((record for record in preempted if record.preempted == "stop"), None)
    if stop is not None:
        reason = f"preempted: {stop.reason}; to be continued"
        return over(replace(plan, failure=None), PREEMPTED, reason)
    reason = f"{preempted[0].reason}; the workers have saved"
    return replace(plan, phase="ending", cause="joined", reason=reason, failure=None)


def _newcomers(view: View, now: float, rules: Rules) -> Decision:
    """Return what to do about agents that are not in the round that runs."""
    plan = view.plan
    members = {node.name for node in plan.nodes}
    there = {
        name: one
        for name, one in view.present.items()
        if name not in members and name not in plan.not_sharing and one.record.state != "leaving"
    }
    if not there and not plan.spares and not plan.joining:
        return Wait(), ""
    ranked = order((), waiting((*plan.joining, *plan.spares), there))
    hosts = unstable(view, now)
    steady = tuple(name for name in ranked if there[name].record.host not in hosts)
    room = 0 if rules.static else max(0, rules.max_nodes - len(plan.nodes))
    joining = steady[:room]
    spares = tuple(name for name in ranked if name not in joining)
    waits: list[float | None] = [view.round_began + LOSS_APART] if hosts else []
    if joining and rules.on_join != "never" and not _nearly_done(view):
        begin = _may_begin(view, joining, rules, now)
        if begin is not None and _may_save(view, rules):
            if joining != plan.joining and begin > now:
                return Wait(begin), ""
            if joining != plan.joining:
                return Publish(replace(plan, joining=joining, spares=spares)), plan.reason
            begin = view.published_at + rules.preempt_grace
        if begin is not None and begin <= now:
            reason = _joined([view.present[name].record for name in joining])
            plan = replace(plan, phase="ending", cause="joined", reason=reason, failure=None)
            return Publish(replace(plan, joining=joining, spares=spares)), reason
        waits.append(begin)
    if (joining, spares) != (plan.joining, plan.spares):
        announce = view.last_newcomer_at + rules.debounce
        if announce <= now:
            return Publish(replace(plan, joining=joining, spares=spares)), plan.reason
        waits.append(announce)
    return Wait(min((wait for wait in waits if wait is not None), default=None)), ""


def _may_begin(view: View, joining: tuple[str, ...], rules: Rules, now: float) -> float | None:
    """Return when the round may end for ``joining``; None: not before one reports more."""
    them = [view.present[name] for name in joining]
    begin = max(one.since for one in them)
    if rules.on_join == "graceful":
        begin += rules.debounce
    ready = [one for one in them if one.record.rests]
    if len(ready) == len(them):
        return begin
    patience = max(begin, min(one.since for one in them) + READY_PATIENCE)
    return patience if ready or patience > now else None


def _members(view: View) -> list[NodeStatus]:
    """Return the records of the running round's nodes in that round."""
    plan = view.plan
    known = (view.present.get(node.name) for node in plan.nodes)
    return [s.record for s in known if s is not None and s.record.round == plan.round]


def _nearly_done(view: View) -> bool:
    """Whether a node of the round is done; its workers would be started again for a newcomer."""
    return any(one.state == "finished" and not one.preempted for one in _members(view))


def _may_save(view: View, rules: Rules) -> bool:
    """Whether the workers save and end by themselves when newcomers are announced."""
    return rules.on_join == "graceful" and any(one.listens for one in _members(view))


def _joined(records: list[NodeStatus]) -> str:
    if len(records) == 1:
        return f"node {text.node(records[0])} joins"
    return f"{count(len(records))} join: {text.nodes(records)}"
