"""What the event log says of a worker: its ranks, its process, how it ended."""

from __future__ import annotations

from elaunch import env
from elaunch.agent.policy import events, nodes
from elaunch.agent.policy.state import State
from elaunch.agent.status.eventlog import WorkerFacts


def worker_facts(state: State, event: events.WorkerStarted | events.WorkerExited) -> WorkerFacts:
    """Return the facts of the worker that ``event`` is about, in the round of ``state``."""
    place = env.only_node("", state.limits.nproc)
    if state.plan is not None and state.plan.node_rank(state.member) is not None:
        place = nodes.place(state.plan, state.member)
    code = event.exitcode if isinstance(event, events.WorkerExited) else None
    return WorkerFacts(
        rank=state.first_rank + event.local_rank,
        local_rank=event.local_rank,
        role_rank=place.first_role_rank + event.local_rank,
        role_world_size=place.role_world_size,
        pid=event.pid,
        exit_code=code,
    )
