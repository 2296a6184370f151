"""A whole job as its store has it: the coordinator's plan beside the members.

The plan gives the ranks, the members are the agents that are there. A node of the plan is

=========  ==========================================================================
state      meaning
=========  ==========================================================================
alive      a member; its workers run, or are about to
failed     a worker of this round failed by itself there
finished   all its workers of this round exited with 0
ended      nothing of this round is left there
leaving    its agent was asked to end
gone       no member any more: it died or was cut off
refused    a member with a record that cannot be read
left       no member any more, and the job is over
=========  ==========================================================================

and a member that is not in the round stands by as a spare, or is joining. The job itself is

==========  =========================================================================
state       meaning
==========  =========================================================================
FORMING     agents gather, nobody runs
RUNNING     the nodes run a round
ENDING      they stop it; another follows, or the end
COMPLETED   over, with exit code 0
FAILED      over, with another
STOPPED     over by a signal, and no worker had failed
PREEMPTED   over because it was asked to end, and all workers have saved: to be continued
LOST        not over, and no agent is there any more
UNREADABLE  (in a list) nothing that this version or this secret can read
==========  =========================================================================

Nothing here reads a store: see elaunch.monitor.jobreader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from elaunch.endings import PREEMPTED
from elaunch.rendezvous.decide.members import Applicant, by_hint
from elaunch.rendezvous.plan import NodeStatus, NodeTimes, Phase, Plan
from elaunch.rendezvous.times import total

NodeState = Literal[
    "alive",
    "failed",
    "finished",
    "ended",
    "leaving",
    "gone",
    "refused",
    "left",
    "spare",
    "joining",
]
JobState = Literal[
    "FORMING",
    "RUNNING",
    "ENDING",
    "COMPLETED",
    "FAILED",
    "STOPPED",
    "PREEMPTED",
    "LOST",
    "UNREADABLE",
]

# Start-up facts of the agents that hold the budget of restarts.
MAX_RESTARTS_FACT: Final = "max_restarts"
BUDGET_FACT: Final = "restart_budget"

_OF_ROUND: Final = ("failed", "finished", "ended")
_LIVE: Final = ("FORMING", "RUNNING", "ENDING")


@dataclass(frozen=True)
class PresentAgent:
    """A member: its record, and seconds since it was last renewed, if known."""

    record: NodeStatus
    age_s: float | None = None


@dataclass(frozen=True)
class StoredJob:
    """One job, as a store holds it at one moment.

    Attributes:
        plan, version: the newest plan; None and 0 before the first.
        members: the members by name.
        refused: entries that cannot be read: name → why.
    """

    plan: Plan | None = None
    version: int = 0
    members: Mapping[str, PresentAgent] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing: no such job, or its last traces are gone."""
        return self.plan is None and not self.members and not self.refused


@dataclass(frozen=True)
class NodeView:
    """One node; ``rank`` and ``ranks`` (first and last of its workers) only if it is in the round.

    ``record`` is None where the node is no member.
    """

    name: str
    host: str
    addr: str
    slots: int
    role: str
    state: NodeState
    rank: int | None = None
    ranks: tuple[int, int] | None = None
    age_s: float | None = None
    record: NodeStatus | None = None

    @property
    def note(self) -> str:
        """Return why the agent leaves and what it wants a reader to see."""
        if self.record is None:
            return ""
        return "; ".join(filter(None, (self.record.reason, self.record.note)))


@dataclass(frozen=True)
class Restarts:
    """Restarts of the whole job, and what is allowed; None where no agent reports it."""

    used: int
    without_progress: int
    max: int | None
    budget: str | None


@dataclass(frozen=True)
class JobView:
    """One reading of a job.

    Attributes:
        place: the store, as messages name it.
        nodes: of the round, by node rank; ``spares`` and ``joining``: the others.
        refused: entries that cannot be read: (name, why).
        problem: why nothing could be read at all, or "".
        stale: why this is older than the reading, or "": the store does not answer meanwhile.
        read_at: seconds since the epoch, by the reader's clock.
    """

    run_id: str
    place: str
    plan: Plan | None
    version: int
    nodes: tuple[NodeView, ...]
    spares: tuple[NodeView, ...]
    joining: tuple[NodeView, ...]
    refused: tuple[tuple[str, str], ...]
    problem: str
    read_at: float
    stale: str = ""

    @property
    def phase(self) -> Phase | None:
        """Return the plan's phase; forming before the first plan, None if nothing is readable."""
        if self.problem:
            return None
        return self.plan.phase if self.plan else "forming"

    @property
    def state(self) -> JobState:
        """Return how the job stands; see the table above."""
        if self.phase is None:
            return "UNREADABLE"
        if self.plan is not None and self.plan.phase == "over":
            return _end(self.plan)
        if self.plan is not None and not self.present:
            return "LOST"
        return {"forming": "FORMING", "running": "RUNNING", "ending": "ENDING"}[self.phase]  # type: ignore[return-value]

    @property
    def live(self) -> bool:
        """Whether the job goes on."""
        return self.state in _LIVE

    @property
    def present(self) -> int:
        """Return how many members there are."""
        here = sum(node.record is not None for node in self.everyone)
        return here + len(self.refused)

    @property
    def everyone(self) -> tuple[NodeView, ...]:
        """Return nodes, spares and newcomers."""
        return (*self.nodes, *self.spares, *self.joining)

    @property
    def reason(self) -> str:
        """Return why the job is in its state."""
        said = self.plan.reason if self.plan else ""
        if self.plan and self.plan.waits:
            # What is waited for is mostly the plan's reason, and for how long.
            more = "" if self.plan.waits.startswith(said) else f"{said}; "
            said = more + self.plan.waits
        if self.problem or self.state != "LOST":
            return self.problem or said
        last = f"; the last word of the coordinator: {said}" if said else ""
        return f"no agent is there any more, and the job had not ended{last}"

    @property
    def times(self) -> NodeTimes | None:
        """Return where the time of the round's nodes went, as they have last published it."""
        if self.plan is not None and self.plan.phase == "over":
            return self.plan.times
        records = (node.record for node in self.nodes)
        return total(one.times for one in records if one is not None and one.times is not None)

    @property
    def restarts(self) -> Restarts | None:
        """Return the restarts so far with their budget; None without a plan."""
        if self.plan is None:
            return None
        return Restarts(
            self.plan.restarts,
            self.plan.without_progress,
            *_budget(node.record for node in self.everyone if node.record is not None),
        )


def view_job(run_id: str, place: str, found: StoredJob, now: float) -> JobView:
    """Return the view of what a store holds; ``now`` in seconds since the epoch."""
    plan = found.plan
    nodes = tuple(_nodes(plan, found)) if plan else ()
    taken = {node.name for node in nodes}
    others = {name: present for name, present in found.members.items() if name not in taken}
    spares = [name for name in (plan.spares if plan else ()) if name in others]
    newcomers = _in_order(others.keys() - set(spares), others, plan)
    return JobView(
        run_id=run_id,
        place=place,
        plan=plan,
        version=found.version,
        nodes=nodes,
        spares=tuple(_apart(name, others[name], "spare") for name in spares),
        joining=tuple(_apart(name, others[name], "joining") for name in newcomers),
        refused=tuple(sorted(found.refused.items())),
        problem="",
        read_at=now,
    )


def unreadable(run_id: str, place: str, problem: str, now: float) -> JobView:
    """Return the view of a job of which nothing can be read, for ``problem``."""
    return JobView(run_id, place, None, 0, (), (), (), (), problem, now)


def _nodes(plan: Plan, found: StoredJob) -> Iterator[NodeView]:
    first = 0
    for rank, node in enumerate(plan.nodes):
        present = found.members.get(node.name)
        yield NodeView(
            node.name,
            node.host,
            node.addr,
            node.slots,
            node.role,
            "refused" if node.name in found.refused else _node_state(present, plan),
            rank,
            (first, first + node.slots - 1) if node.slots else None,
            present.age_s if present else None,
            present.record if present else None,
        )
        first += node.slots


def _node_state(present: PresentAgent | None, plan: Plan) -> NodeState:
    if present is None:
        return "left" if plan.phase == "over" else "gone"
    state = present.record.state
    if state == "leaving":
        return state
    # Of an earlier round: it has read of the new one and not begun it yet.
    of_round = present.record.round == plan.round
    return state if of_round and state in _OF_ROUND else "alive"


def _apart(name: str, present: PresentAgent, state: NodeState) -> NodeView:
    """Return an agent that has no rank in this round."""
    record = present.record
    leaving = record.state == "leaving"
    return NodeView(
        name,
        record.host,
        record.addr,
        record.slots,
        record.role,
        "leaving" if leaving else state,
        age_s=present.age_s,
        record=record,
    )


def _in_order(
    names: Iterable[str], others: Mapping[str, PresentAgent], plan: Plan | None
) -> list[str]:
    """Return newcomers as the plan has them, then as they would be ranked."""
    announced = {name: place for place, name in enumerate(plan.joining if plan else ())}

    def key(name: str) -> tuple[object, ...]:
        record = others[name].record
        return announced.get(name, len(announced)), by_hint(
            Applicant(name, record.host, record.hint)
        )

    return sorted(names, key=key)


def _end(plan: Plan) -> JobState:
    if plan.exit_code == 0:
        return "COMPLETED"
    if plan.exit_code == PREEMPTED and plan.failure is None:
        return "PREEMPTED"
    by_signal = plan.exit_code is not None and plan.exit_code > 128
    return "STOPPED" if by_signal and plan.failure is None else "FAILED"


def _budget(records: Iterator[NodeStatus]) -> tuple[int | None, str | None]:
    """Return the job's budget as the agents report it: restarts, and of which kind."""
    for record in records:
        allowed = record.facts.get(MAX_RESTARTS_FACT, "")
        if allowed.isdecimal():
            return int(allowed), record.facts.get(BUDGET_FACT)
    return None, None
