"""Newcomers while a round runs: announced, then let in with a new round, or kept as spares. Pure.

==================  ==============================================================================
newcomers           what happens
==================  ==============================================================================
there is room       announced (``Plan.joining``); when all are ready, and none came for
                    ``debounce`` seconds, the round ends for them: ten cost one restart
workers listen      announced when all are ready: the workers save and end by themselves; the round
                    is ended if they have not within ``preempt_grace`` seconds
the job is full     ``Plan.spares``: they replace the next that is lost
``--on-join never`` announced; they are in the next round, whatever it begins for
a node is done      as never: the job is about to end
==================  ==============================================================================
"""

from __future__ import annotations

from msgspec.structs import replace

from elaunch.rendezvous import text
from elaunch.rendezvous.decide.members import READY_PATIENCE, order, waiting
from elaunch.rendezvous.decide.view import Decision, Publish, Rules, View, Wait
from elaunch.rendezvous.plan import NodeStatus
from elaunch.text import count


def decide(view: View, now: float, rules: Rules) -> Decision:
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
    room = 0 if rules.static else max(0, rules.max_nodes - len(plan.nodes))
    joining, spares = ranked[:room], ranked[room:]
    waits = []
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
