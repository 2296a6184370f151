"""How a round comes about: who is there, is it enough, may it be, from which checkpoint. Pure.

1. Every node of the round before has ended it, or is gone.
2. After a failure: the budget has a restart left (elaunch.rendezvous.decide.budget).
3. Enough nodes are there. At first all of ``max_nodes``, or ``min_nodes`` and nobody came for
   ``settle`` seconds; later the live ones go on at once. Too few wait for ``join_timeout`` seconds.
4. The newest checkpoint is known, a backoff is over, and the nodes run the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from elaunch.endings import KILLED, PREEMPTED, exit_code
from elaunch.errors import JoinTimeoutError, SameFailureError, StoreError, SymmetryError
from elaunch.rendezvous import text
from elaunch.rendezvous.decide import budget, checkpoints, members
from elaunch.rendezvous.decide.members import Enough, Few, NeverARound
from elaunch.rendezvous.decide.view import (
    Decision,
    Evict,
    LastKnown,
    Publish,
    Rules,
    Search,
    SearchResult,
    View,
    Wait,
)
from elaunch.rendezvous.plan import (
    MOST_LOSSES,
    Cause,
    Node,
    NodeStatus,
    Plan,
    PlanCheckpoint,
    SameFailure,
    Survivors,
    WorkerFailure,
)
from elaunch.rendezvous.text import differences
from elaunch.text import count


def decide(view: View, now: float, rules: Rules) -> Decision:
    """Return what to do while no round runs, or while one is being ended."""
    plan = view.plan
    nodes = ((node, view.present.get(node.name)) for node in plan.nodes)
    late = [node for node, one in nodes if one and not one.record.has_ended(plan.round)]
    late = late or (_staying(view) if plan.phase == "forming" and plan.anew is None else [])
    if late:
        return _await_end(view, now, rules, late)
    fenced = _await_fences(view, now, rules) if view.evicted else None
    if fenced is not None:
        return fenced
    if _all_done(view):
        return publish(over(plan, 0, "all workers ended with 0"))
    late_save = checkpoints.awaited(view, rules, ended_at(view))
    if late_save is not None and late_save[1] > now:
        return Wait(late_save[1]), late_save[0]
    if plan.phase == "ending":
        plan = _judged(view, now, rules)
        view = replace(view, plan=plan)
    anew = None
    if _staying(view):
        enough = members.enough(view, now, rules)
        anew = _anew(view, enough.names) if isinstance(enough, Enough) else None
        if anew is None:
            return _pause(view, f"{plan.reason}; all workers are started anew", now)
    verdict: budget.Again | None = None
    if plan.cause == "failure" and not members.is_behind(view):
        judged = _verdict(view, rules, anew is not None)
        if not isinstance(judged, budget.Again):
            return judged
        verdict = judged
    if plan.asked or end_request(view):
        return _preempted(view)
    view = checkpoints.with_sharing_nodes_only(view)
    enough = members.enough(view, now, rules)
    if isinstance(enough, NeverARound):
        return publish(over(plan, enough.exit_code, enough.problem))
    if isinstance(enough, Few):
        return _too_few(view, now, rules, enough)
    if enough.settled > now:
        return Wait(enough.settled), "waiting for more nodes"
    if rules.has_checkpoint_dir and checkpoints.is_unknown(view, enough.names):
        return _search(view, rules, enough.names)
    others = checkpoints.not_sharing(view, enough.names)
    if others:
        return publish(
            over(plan, checkpoints.NOT_SHARED, checkpoints.sharing_problem(view, others))
        )
    if view.search_result is not None and view.search_result.problem:
        return _unreadable(plan, view.search_result)
    if verdict is not None:
        until = ended_at(view) + verdict.backoff * view.jitter
        if until > now:
            return _pause(view, verdict.reason, until, anew)
    return _after_losses(view, now, enough) or _start(view, rules, enough, verdict)


def end_request(view: View) -> str:
    """Return why an agent asks that the whole job end, to be continued; or ""."""
    asked = (one.record.asks for one in view.present.values() if one.record.state != "leaving")
    return next((reason for reason in asked if reason), "")


def restart_request(view: View) -> Plan | None:
    """Return the plan that ends the round which runs, if an agent asks for that; or None."""
    plan = view.plan
    for one in view.present.values():
        found = one.record.restart
        if found is not None and found.round == plan.round and one.record.state != "leaving":
            return replace(plan, phase="ending", cause="asked", reason=found.reason, failure=None)
    return None


def _staying(view: View) -> list[Node]:
    """Return the nodes of the round that has ended on which workers stay for the next one."""
    there = ((node, view.present.get(node.name)) for node in view.plan.nodes)
    return [node for node, one in there if one and one.record.kept]


def _anew(view: View, names: Sequence[str]) -> Mapping[str, tuple[int, ...]] | None:
    """Return the workers that a round of these nodes starts, as in ``Plan.anew``."""
    plan, records = view.plan, {name: view.present[name].record for name in names}
    able = all(one.survivors and one.round == plan.round for one in records.values())
    known = records.keys() <= {node.name for node in plan.nodes}
    if plan.cause not in ("failure", "lost") or not (able and known and _staying(view)):
        return None
    ended = ((name, set(range(one.slots)).difference(one.kept)) for name, one in records.items())
    return {name: tuple(sorted(ranks)) for name, ranks in ended if ranks}


def _all_done(view: View) -> bool:
    """Whether all workers of a round that was asked to end had ended with 0 by themselves."""
    plan = view.plan
    if plan.cause != "asked" or plan.phase != "ending":
        return False
    records = [view.present[node.name].record for node in plan.nodes if node.name in view.present]
    done = [one for one in records if one.state == "finished" and not one.preempted]
    return len(done) == len(plan.nodes) and all(one.round == plan.round for one in done)


def _preempted(view: View) -> Decision:
    """Return the end of a job that was asked to end, of which nothing runs any more.

    A round that failed after it was asked has failed; one that failed before would be followed by
    another, which now comes later. So would one that has lost a node.
    """
    plan = view.plan
    if plan.asked and plan.cause == "failure" and plan.failure is not None:
        reason = f"{text.failure(plan.failure)}; no restart: {plan.asked}"
        return publish(over(plan, exit_code(plan.failure.exitcode), reason))
    records = [view.present[node.name].record for node in plan.nodes if node.name in view.present]
    unsaved = any(one.round == plan.round and one.state == "ended" for one in records)
    if plan.anew is not None and any(one.preempted for one in records):
        unsaved = False  # the workers that go on have saved, and newcomers had nothing yet
    if plan.asked and plan.cause == "left" and unsaved:
        reason = f"killed: {plan.asked}; the workers had not saved and ended before"
        return publish(over(plan, KILLED, reason))
    what = "" if plan.failure is None else f"{text.failure(plan.failure)}; "
    reason = f"{what}preempted: {plan.asked or end_request(view)}; to be continued"
    return publish(over(replace(plan, failure=None), PREEMPTED, reason))


def publish(plan: Plan) -> Decision:
    """Return the decision to publish ``plan``."""
    return Publish(plan), plan.reason


def over(plan: Plan, exit_code: int, reason: str) -> Plan:
    """Return the end of the job."""
    return replace(plan, phase="over", exit_code=exit_code, reason=reason)


# ── the end of the round before ──────────────────────────────────────────────────────────────────


def ended_at(view: View) -> float:
    """Return when the last node of the round had ended, or was gone."""
    times = [view.leads_since]
    for node in view.plan.nodes:
        if node.name in view.present:
            times.append(view.present[node.name].changed)
        elif node.name in view.absent:
            times.append(view.absent[node.name].at)
    return max(times)


def first_failure(view: View, now: float) -> WorkerFailure | None:
    """Return the first failure of the plan's round: the one that happened longest ago.

    Likely victims of another rank, where it is not known of which, come after all others.
    """
    plan = view.plan
    failed = []
    for rank, node in enumerate(plan.nodes):
        member = view.present.get(node.name)
        if member is None or member.record.round != plan.round or member.record.failure is None:
            continue
        if member.failed_at is not None:
            failed.append((member.failed_at, rank, node, member.record.failure))
    if not failed:
        return None
    at, _, node, found = min(failed, key=lambda one: (one[3].summary == text.UNACCUSED, *one[:2]))
    age = round(max(0.0, now - at), 3)
    return replace(found, host=node.host, node=node.name, age=age)


def _await_end(view: View, now: float, rules: Rules, late: list[Node]) -> Decision:
    plan, ttl = view.plan, rules.heartbeat_timeout
    until, whom = view.phase_since + rules.patience, text.nodes(late)
    did_not = f"{whom} did not end round {plan.round} in"
    if now >= until:
        return publish(over(plan, StoreError.exit_code, f"{did_not} {rules.patience:g} s"))
    others = tuple(node.name for node in late if node.name != view.me)
    owed = max(view.phase_since + rules.end_timeout, view.evict_tried_at + ttl)
    if others and now >= owed:
        return Evict(others), f"{did_not} {now - view.phase_since:.0f} s: evicted"
    wait = Wait(min(until, owed) if others else until)
    return wait, f"waiting for {whom} to end round {plan.round}"


def _await_fences(view: View, now: float, rules: Rules) -> Decision | None:
    """Wait until no worker is left of a node that was evicted, though it may be alive.

    Its agent has moved its fence on while etcd had no leader. That a plan is accepted shows that
    there is one, from which it learns the truth or nothing: one more lifetime is enough. What is
    waited for is not published meanwhile, as that would be another such plan.
    """
    gone = [one.at for one in view.absent.values() if one.cause != "left"]
    if not gone:
        return None
    ttl = rules.heartbeat_timeout
    until = max(gone) + ttl
    if until <= now:
        if view.published_at < until:
            return publish(view.plan)
        until = view.published_at + ttl
    return None if until <= now else (Wait(until), "")


def _judged(view: View, now: float, rules: Rules) -> Plan:
    """Return the plan with the cause as it looks now that all have ended.

    A node that loses a peer often fails before the peer is known to be lost: a failure in a round
    in which a node was lost, too, is that node's doing. A node that had ended its part before is
    not to blame.
    """
    plan = view.plan
    if plan.cause != "failure" and not (plan.asked and plan.cause == "left"):
        return plan
    for node in plan.nodes:
        absent = view.absent.get(node.name)
        if absent is None or (absent.last and absent.last.has_ended(plan.round)):
            continue
        cause: Cause = "left" if absent.cause == "left" else "lost"
        reason = text.gone(node, absent, rules.heartbeat_timeout)
        return without(view, cause, reason, [node], view.phase_since)
    failed = first_failure(view, now) or plan.failure
    if failed is None or plan.cause == "left":
        return plan
    return replace(plan, failure=failed, reason=text.failure(failed))


def without(view: View, cause: Cause, reason: str, gone: Sequence[Node], at: float) -> Plan:
    """Return the plan whose round ends because nodes are ``gone``, as was seen ``at`` that time."""
    plan, losses = view.plan, view.plan.losses
    if cause == "lost":
        hosts = ", ".join(sorted(node.host for node in gone))[: text.MOST_CHARACTERS]
        apart = at - view.round_began >= budget.LOSS_APART
        losses = budget.repeated(losses, hosts, plan.round, apart)
    return replace(plan, phase="ending", cause=cause, reason=reason, failure=None, losses=losses)


# ── may there be another ─────────────────────────────────────────────────────────────────────────


def _after_losses(view: View, now: float, enough: Enough) -> Decision | None:
    """Return what comes before a round with a node that was lost, or instead; None: nothing."""
    plan, losses = view.plan, view.plan.losses
    if plan.cause != "lost" or losses is None or checkpoints.progressed(view):
        return None
    stayed = {node.name for node in plan.nodes} if view.absent else set()
    came = [view.present[name].record.host for name in enough.names if name not in stayed]
    if not any(host in losses.hosts for host in came):
        return None
    if len(losses.rounds) >= MOST_LOSSES:
        reason = f"{text.lost(losses)} without progress"
        reason = f"{plan.reason}; {reason}" if plan.phase == "ending" else reason
        return publish(over(plan, SameFailureError.exit_code, reason))
    until = ended_at(view) + budget.backoff(len(losses.rounds) - 1) * view.jitter
    return (Wait(until), f"{text.lost(losses)}: a backoff") if until > now else None


def _verdict(view: View, rules: Rules, goes_on: bool) -> budget.Again | Decision:
    """Return that the budget has another restart, or the decision that comes before or instead.

    ``goes_on``: workers that stay go on.
    """
    plan, found = view.plan, view.search_result
    spent = budget.Spent(plan.restarts, plan.without_progress, plan.crashes)
    unknown = rules.has_checkpoint_dir and (found is None or found.again)
    if unknown and not budget.hopeless(rules, spent):
        return _search(view, rules)
    if found is not None and found.problem:
        return _unreadable(plan, found)
    step = _step(checkpoints.newest(view))
    spent = spent.refilled(_step(plan.checkpoint), step)
    failed = plan.failure or WorkerFailure(rank=-1, exitcode=1, text=plan.reason)
    why, survivors = text.failure(failed), _survivors(view) if goes_on else ""
    verdict = budget.verdict(rules, spent, why, step, _lived_long(view), survivors)
    if isinstance(verdict, budget.NoMore):
        return publish(over(plan, exit_code(failed.exitcode), verdict.reason))
    same = _same(view)
    if same is not None and 0 < rules.max_same_failures <= len(same.rounds):
        numbers = ", ".join(map(str, same.rounds))
        reason = f"the same failure in rounds {numbers} without progress (--max-same-failures)"
        return publish(over(plan, SameFailureError.exit_code, f"{text.failure(failed)}; {reason}"))
    return verdict


def _survivors(view: View) -> Survivors:
    """Return what workers of the round do that stay for the next one."""
    waits = any(one.record.survivors == "wait" for one in view.present.values())
    return "wait" if waits else "work"


def _same(view: View) -> SameFailure | None:
    """Return the rounds in a row that failed as the plan's did."""
    plan = view.plan
    if plan.failure is None:
        return plan.same
    progressed = checkpoints.progressed(view)
    return budget.repeated(plan.same, plan.failure.signature, plan.round, progressed)


def _lived_long(view: View) -> bool:
    """Whether the round ran long enough not to have died at its start."""
    failed = view.plan.failure
    member = None if failed is None else view.present.get(failed.node)
    failed_at = member.failed_at if member else None
    return (
        ended_at(view) if failed_at is None else failed_at
    ) - view.round_began >= budget.LONG_ENOUGH


def _search(view: View, rules: Rules, names: tuple[str, ...] = ()) -> Decision:
    reason = "looking for the newest checkpoint"
    if view.searching:
        return Wait(), reason
    if rules.checkpoint_local and not view.plan.reason:
        # The agents to be asked know each other by the job's incarnation id: publish it.
        return _pause(view, f"{reason} on {count(len(view.present))}", view.leads_since)
    present = {name: member.record for name, member in view.present.items()}
    seen = (record.seen.job for record in present.values() if record.seen is not None)
    jobs = frozenset([view.plan.job, *seen])
    return Search(present, checkpoints.probes(view, names), names, jobs), reason


def _unreadable(plan: Plan, found: SearchResult) -> Decision:
    return publish(over(plan, found.exit_code, f"cannot look for checkpoints: {found.problem}"))


def _step(checkpoint: PlanCheckpoint | None) -> int | None:
    return None if checkpoint is None else checkpoint.step


# ── waiting where everyone can see why ───────────────────────────────────────────────────────────


def _pause(
    view: View, reason: str, until: float, anew: Mapping[str, tuple[int, ...]] | None = None
) -> Decision:
    """Wait until then, with a plan that says why; what the verdict rests on stays in the plan."""
    plan = replace(view.plan, phase="forming", reason=reason, joining=(), spares=(), anew=anew)
    return (Wait(until) if plan == view.plan else Publish(plan)), reason


def _too_few(view: View, now: float, rules: Rules, few: Few) -> Decision:
    """Wait for more nodes; the error after ``join_timeout`` names who is there and who went."""
    waiting = view.plan.phase == "forming"
    until = (view.phase_since if waiting else now) + rules.join_timeout
    if now >= until:
        problem = few.text(f" after {rules.join_timeout:g} s", now)
        return publish(over(view.plan, JoinTimeoutError.exit_code, problem))
    publish_at = view.published_at + max(rules.settle, 1.0)
    if (
        waiting and publish_at > now
    ):  # to name them all for each that comes takes long where many do
        return Wait(min(until, publish_at, few.again or until)), view.plan.reason
    reason = few.text("", None)
    if reason == view.plan.reason:
        return Wait(min(until, few.again or until)), reason
    return _pause(view, reason, until)


# ── the round ────────────────────────────────────────────────────────────────────────────────────


def _before(view: View, rules: Rules) -> LastKnown:
    """Return where the job was: by the plan, or by what agents saw of it before.

    Agents that have yet to find this store may know of the round in which a run was killed here.
    """
    plan, known, last = view.plan, view.known, view.plan.round
    if last < 0 and rules.hosted_by_me and rules.killed_in is not None:
        last = rules.killed_in
    before = LastKnown(last, plan.restarts, plan.without_progress, _step(plan.checkpoint))
    if known is None or known.round <= plan.round:
        return before
    return replace(
        known,
        round=max(last, known.round),
        restarts=max(before.restarts, known.restarts),
        without_progress=max(before.without_progress, known.without_progress),
    )


def _start(view: View, rules: Rules, enough: Enough, verdict: budget.Again | None) -> Decision:
    plan, before = view.plan, _before(view, rules)
    nodes = tuple(_node(name, view.present[name].record) for name in enough.names)
    checkpoint = checkpoints.newest(view, enough.names)
    notice = differences([(n.host, view.present[n.name].record.facts) for n in nodes])
    if notice and rules.strict_symmetry:
        return publish(over(plan, SymmetryError.exit_code, f"{notice} (--strict-symmetry)"))
    spent = budget.Spent(before.restarts, before.without_progress, plan.crashes)
    spent = spent.refilled(before.step, _step(checkpoint))
    if verdict is not None:
        spent = spent.counted(_lived_long(view))
    first = view.present[nodes[0].name].record
    new = replace(
        plan,
        round=before.round + 1,
        phase="running",
        cause="",
        nodes=nodes,
        spares=enough.spares,
        joining=(),
        anew=_anew(view, enough.names),
        master_addr=first.addr,
        master_port=first.port,
        checkpoint=checkpoint,
        restarts=spent.restarts,
        without_progress=spent.without_progress,
        crashes=spent.crashes,
        failure=plan.failure if verdict else None,
        same=_same(view),
        losses=None if plan.losses and checkpoints.progressed(view) else plan.losses,
        notice="; ".join(filter(None, (notice, _counts_anew(view, before)))),
        facts=first.facts,
        strict=rules.strict_symmetry,
    )
    reason = _why_again(plan, rules, verdict) if verdict else _why(view, new, rules, before)
    return publish(replace(new, reason=reason))


def _node(name: str, record: NodeStatus) -> Node:
    return Node(name, record.host, record.addr, record.slots, record.role, record.peer_port)


def _why_again(plan: Plan, rules: Rules, verdict: budget.Again) -> str:
    """Return the reason of a round after a failure; on one node the backoff was logged before."""
    if rules.standalone and verdict.backoff and plan.failure is not None:
        return text.failure(plan.failure)
    return verdict.reason


def _why(view: View, new: Plan, rules: Rules, before: LastKnown) -> str:
    plan = view.plan
    if rules.standalone and plan.round < 0:
        return "first start"
    resumes = budget.resumes_from(_step(new.checkpoint))
    start = f", {resumes}" if rules.has_checkpoint_dir else ""
    start = start if new.anew is None else ", in their processes"
    if rules.standalone:
        return f"{plan.reason}{start}"
    with_whom = f"{count(len(new.nodes))}, {count(new.world_size, 'worker')}{_left_out(new)}"
    if plan.round < 0 and view.known is None:
        return f"first start: {with_whom}{start}"
    if plan.round < before.round:
        return f"the store lost its memory; going on with {with_whom}{start}"
    what = plan.reason if plan.phase == "ending" else _enough_again(plan)
    return f"{what}; going on with {with_whom}{start}"


def _enough_again(plan: Plan) -> str:
    """Return the reason of a round for which nodes were missing, with those that were lost."""
    losses, enough = plan.losses, "enough nodes are there again"
    if plan.cause != "lost" or losses is None or losses.rounds[-1] != plan.round:
        return enough
    return f"{text.lost(replace(losses, rounds=(plan.round,)))}; {enough}"


def _left_out(new: Plan) -> str:
    """Return that a round goes on without a node that was lost again and again, if it does."""
    hosts = new.unstable
    if new.losses is None or not hosts or any(node.host in hosts for node in new.nodes):
        return ""
    return f" ({text.lost(new.losses)}: it stands by)"


def _counts_anew(view: View, before: LastKnown) -> str:
    """Return that the restarts of an earlier run are forgotten, where one is known of."""
    if view.known is not None or view.plan.round >= 0 or before.round < 0:
        return ""
    return (
        f"the last run with this run id was killed here in round {before.round}: this one goes on "
        f"with round {before.round + 1}, and restarts are counted from 0 again"
    )
