"""Cells of the policy's table for the coordinator's plan and for the store. Pure.

The coordinator decides when a round begins and ends, and what follows it
(elaunch.rendezvous.decide.decide), also where one node is the whole job. This module decides what
the agent does about that, and which state it publishes after every event (:func:`own_state`).
"""

from __future__ import annotations

import signal
from pathlib import Path

from elaunch import env
from elaunch.agent.policy import events, requests
from elaunch.agent.policy.actions import (
    NOTHING,
    Decision,
    EndTree,
    Finish,
    Hurry,
    Meet,
    Nothing,
    StartRound,
    StopWorkers,
    TakeStacks,
)
from elaunch.agent.policy.state import LOST, Phase, State, failure, failure_code, workers
from elaunch.checkpoint.records import Checkpoint
from elaunch.endings import PREEMPTED
from elaunch.errors import CheckpointError, UsageError
from elaunch.rendezvous.plan import AgentState, Plan, column
from elaunch.text import ranks_do


def own_state(state: State) -> tuple[AgentState, int]:
    """Return the state that this agent publishes, and of which round (-1: of none)."""
    if _leaves(state):
        return "leaving", state.round if state.member else -1
    if state.cut_off or not state.name:
        return "ready" if state.phase is Phase.MEETING else "joining", -1
    if _missed(state):
        assert state.plan is not None
        return "ended", state.plan.round
    if state.member != state.name:
        return "ready" if state.phase is Phase.MEETING else "joining", -1
    if state.phase is Phase.RUNNING:
        return "running", state.round
    if state.phase in (Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING) and state.finish is None:
        return "failed" if state.failed else "running", state.round
    done = state.completed and not (state.failed or state.strayed)
    return "finished" if done else "ended", state.round


def _leaves(state: State) -> bool:
    """Whether this agent is on its way out; workers that were asked to save are not hurried."""
    if state.meeting_failed is not None or state.phase is Phase.ENDED:
        return True
    if state.notice is None or state.failed:
        return state.interrupted is not None
    if state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING):
        return False
    return state.interrupted is not None


def _missed(state: State) -> bool:
    """Whether a round with this node ended before the node had read its plan, or never began."""
    plan = state.plan
    if plan is None or plan.phase == "over" or plan.node_rank(state.name) is None:
        return False
    if state.phase not in (Phase.STARTING, Phase.MEETING):
        return False
    if plan.phase == "running":
        return bool(missing(state))
    return state.member != state.name or state.round < plan.round


def missing(state: State) -> frozenset[int]:
    """Return the workers that have ended before the round began which was to keep them."""
    plan = state.plan
    if plan is None or plan.round <= state.round:
        return frozenset()
    return plan.keeps(state.name, state.limits.nproc) - state.stay


def place(plan: Plan, name: str) -> env.NodePlace:
    """Return where the node ``name`` stands in the plan's round."""
    node_rank = plan.node_rank(name)
    assert node_rank is not None  # the round was begun because the plan names us
    slots, roles = column(plan.nodes, "slots"), column(plan.nodes, "role")
    in_role = [n if role == roles[node_rank] else 0 for n, role in zip(slots, roles, strict=True)]
    return env.NodePlace(
        node_rank=node_rank,
        addrs=tuple(column(plan.nodes, "addr")),
        first_rank=sum(slots[:node_rank]),
        world_size=sum(slots),
        first_role_rank=sum(in_role[:node_rank]),
        role_world_size=sum(in_role),
    )


def is_decided(state: State) -> bool:
    """Whether the plan says what ended the round in which this node is."""
    plan = state.plan
    return plan is not None and (plan.round > state.round or plan.phase != "running")


def at_rest(state: State, what: str) -> Decision:
    """Return what the plan means for an agent without workers; ``what`` has brought it here."""
    plan = state.plan
    if state.meeting_failed is not None:
        problem = state.meeting_failed.problem
        if _has_done_its_part(state):
            return Finish(0), f"all workers of this node ended with 0; {problem}"
        return Finish(state.meeting_failed.exit_code), problem
    if plan is not None and plan.phase == "over":
        unused = "; this node took part in no round"
        unused = unused if state.limits.meets and not state.member else ""
        if state.lost_save and not plan.exit_code:
            return Finish(CheckpointError.exit_code), LOST
        return Finish(plan.exit_code or 0), plan.reason + unused
    if plan is not None and _stays_in_vain(state, plan):
        grace, others = state.limits.sibling_grace, workers(len(state.stay))
        why = f"{plan.reason}; stopping {others}, grace {grace:g} s"
        return StopWorkers(signal.SIGTERM, grace), why
    if plan is not None and state.name in plan.not_sharing and not _begins(state, plan):
        return Finish(UsageError.exit_code), (
            "--checkpoint-dir of this node is not that of the job: what was written here is not "
            f"seen on {plan.nodes[0].host}; mount the same file system here, or give "
            "--checkpoint-local on all nodes"
        )
    if plan is not None and state.preempted and state.asked_to_end and _moved_on(state, plan):
        return requests.ended(state)
    if state.asked_to_end:  # no round follows here; the coordinator ends the job
        return _meet(state, what)
    if plan is not None and _begins(state, plan):
        first_rank = place(plan, state.name).first_rank
        keeps = plan.keeps(state.name, state.limits.nproc)
        begins = StartRound(plan.round, _checkpoint(state, plan), first_rank, keeps)
        return begins, plan.reason
    return _meet(state, what)


def _has_done_its_part(state: State) -> bool:
    """Whether the workers ended with 0 in a round of which nobody has said that it failed."""
    plan = state.plan
    if plan is None or (plan.round, plan.phase) != (state.round, "running"):
        return False
    spoiled = state.failed or state.preempted or state.asked_to_end or state.lost_save
    return state.completed and not spoiled


def _meet(state: State, what: str) -> Decision:
    """Wait for a plan; ``what`` has brought the agent here, "" if it is there already."""
    if not what:
        return NOTHING
    return Meet(), f"{what}; waiting for the other nodes" if state.limits.meets else ""


def _moved_on(state: State, plan: Plan) -> bool:
    """Whether the job goes on without what this node's workers were asked to end for."""
    return plan.round > state.round or plan.phase in ("ending", "forming")


def _begins(state: State, plan: Plan) -> bool:
    if plan.phase != "running" or plan.node_rank(state.name) is None or state.cut_off:
        return False
    if missing(state):
        return False
    return state.member != state.name or plan.round > state.round


def _stays_in_vain(state: State, plan: Plan) -> bool:
    """Whether workers stay for the next round, and that has none of them."""
    if not state.stay:
        return False
    if plan.phase == "running":
        is_in = plan.node_rank(state.name) is not None
        keeps = is_in and bool(plan.keeps(state.name, state.limits.nproc))
        return plan.round > state.round and not keeps
    return plan.phase == "forming" and plan.anew is None


def _checkpoint(state: State, plan: Plan) -> Checkpoint | None:
    found = plan.checkpoint
    if found is None:
        return None
    if "://" in found.path:
        return Checkpoint(found.path, found.step, found.format, uuid=found.uuid)
    path = Path(found.path)
    if state.limits.checkpoint_root is not None:
        path = state.limits.checkpoint_root / path
    return Checkpoint(path, found.step, found.format, uuid=found.uuid)


def after_round(state: State) -> Decision:
    """Report that nothing of the round is left here, and go on as the plan says."""
    over = state.plan is not None and state.plan.phase == "over"
    if state.interrupted is not None and not over:
        if state.notice is not None and _lost_another(state):
            return Finish(PREEMPTED), f"preempted: {state.notice.reason}; to be continued"
        return requests.ended(state) if state.preempted else stopped(state.interrupted)
    if state.asked_in_round and not state.completed and not over and not state.limits.meets:
        return _asked_and_not_done(state)
    if state.preempted and state.notice is not None:
        return at_rest(state, f"all workers of this node have saved ({state.notice.reason})")
    if state.failed:
        return at_rest(state, failure(state))
    if state.completed:
        return at_rest(state, "all workers of this node ended with 0")
    if state.stay:
        return at_rest(state, stay(state, state.stay))
    return at_rest(state, "the workers of this node have ended")


def stay(state: State, local_ranks: frozenset[int]) -> str:
    """Return that these workers go on in the next round."""
    if not local_ranks:
        return "the other nodes may go on"
    who = ranks_do((state.first_rank + local_rank for local_rank in local_ranks), "stay")
    return f"{who} for the next round"


def _lost_another(state: State) -> bool:
    """Whether another node was lost before the workers here could save, as they were asked to."""
    plan = state.plan
    return plan is not None and (plan.round, plan.cause) == (state.round, "lost")


def _asked_and_not_done(state: State) -> Decision:
    """End the job on its only node: the workers did not end as they were asked."""
    if not state.failed or state.notice is None:
        return requests.ended(state)
    return Finish(failure_code(state)), f"{failure(state)}; no restart: {state.notice.reason}"


def stopped(signum: signal.Signals) -> Decision:
    """Leave, as a person or a scheduler has asked."""
    return Finish(128 + signum), f"stopped by {signum.name}"


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────


def plan_start(state: State, event: events.PlanSeen) -> Decision:
    """Leave if the job is over; anything else waits for the imports."""
    return at_rest(state, "") if event.plan.phase == "over" else NOTHING


def plan_meet(state: State, event: events.PlanSeen) -> Decision:
    """Start a round, or leave."""
    plan = event.plan
    if plan.phase == "forming" and not (state.limits.meets or _stays_in_vain(state, plan)):
        return Nothing(), plan.reason  # a backoff
    return at_rest(state, "")


def plan_run(state: State, event: events.PlanSeen) -> Decision:
    """End this node's part of a round that ends, or that goes on without it."""
    plan, others = event.plan, workers(len(state.alive))
    if plan.round > state.round:
        return EndTree(), f"round {plan.round} has begun without this node; killing {others}"
    if plan.round == state.round and plan.phase != "running":
        return _ending(state, plan)
    if plan.round == state.round and plan.node_rank(state.member) is None:
        return EndTree(), "the other nodes have gone on without this one; killing its workers"
    return requests.asked_elsewhere(state, plan)


def _ending(state: State, plan: Plan) -> Decision:
    """Stop the workers. One that lost a peer can only hang; for growth it may save first."""
    limits, others = state.limits, workers(len(state.alive))
    peer_gone = plan.cause in ("failure", "lost") or plan.phase == "over"
    peer_gone = peer_gone and plan.exit_code != PREEMPTED
    if plan.cause == "asked" and state.notice is None:
        return requests.stop(state, plan)
    stacks = _stacks_first(state, plan)
    if stacks is not None:
        return stacks
    lost = plan.cause in ("failure", "lost") and not _is_hang(plan)
    if lost and (keeps := state.may_stay) is not None:
        return EndTree(keeps=keeps), f"{plan.reason}; {stay(state, keeps)}"
    if state.notice is not None and not peer_gone:
        return _may_save(state, f"{plan.reason}; {others} may save", state.notice.grace)
    grace = limits.sibling_grace if peer_gone else limits.shutdown_timeout
    reason = f"{plan.reason}; stopping {others}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


def _stacks_first(state: State, plan: Plan) -> Decision | None:
    """Return what comes before this node's workers are stopped for a hang that the plan reports.

    None: nothing, or nothing any more.
    """
    if state.taking:
        return NOTHING if state.stacks is None else None
    if not state.limits.takes_stacks or not _is_hang(plan):
        return None
    return TakeStacks(), f"{plan.reason}; taking the stacks of {workers(len(state.alive))}"


def _is_hang(plan: Plan) -> bool:
    return plan.failure is not None and plan.failure.is_hang


def _may_save(state: State, what: str, stated: float | None) -> Decision:
    if stated is not None:
        return Nothing(), f"{what}, grace {stated:g} s"
    grace = state.limits.shutdown_timeout
    return Hurry(grace), f"{what}, grace {grace:g} s"


# ── this node and the store ──────────────────────────────────────────────────────────────────────


def cut_run(state: State, event: events.CutOff) -> Decision:
    """Kill the workers: the others may go on without them."""
    return EndTree(), f"cut off: {event.reason}; killing {workers(len(state.alive))}"


def cut_rest(state: State, event: events.CutOff) -> Decision:
    """Say so; kill the workers that stay for a round, if any."""
    if state.stay:
        return cut_run(state, event)
    return Nothing(), f"cut off: {event.reason}"


def fenced_run(_: State, __: events.Fenced) -> Decision:
    """Sweep: the server has killed the workers."""
    reason = "this agent could not renew its lease in time: its workers were killed, since the"
    return EndTree(), f"{reason} other nodes may go on without them"


def fenced_rest(state: State, event: events.Fenced) -> Decision:
    """Sweep, too, if workers had stayed for a round."""
    return fenced_run(state, event) if state.stay else NOTHING


def fail_run(state: State, event: events.MeetingFailed) -> Decision:
    """Stop the workers: this node can take part no more."""
    grace = state.limits.shutdown_timeout
    what, _, _ = event.problem.partition(", the last attempt")  # the result has all of it
    reason = f"{what}; stopping {workers(len(state.alive))}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


def fail_rest(state: State, _: events.MeetingFailed) -> Decision:
    """Leave."""
    return at_rest(state, "")


def rejoined(_: State, event: events.Rejoined) -> Decision:
    """Say so."""
    return Nothing(), f"a member again, as {event.name}"


def logged(
    _: State, event: events.StillWaiting | events.StoreSilent | events.StoreBack
) -> Decision:
    """Say what the rendezvous says."""
    return Nothing(), event.reason
