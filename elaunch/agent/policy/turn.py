"""One turn of the loop, and the round that it may begin. Pure.

:func:`make_turn` makes a :class:`Turn` of an event; the loop acts on it and shows it to observers.
The :class:`Round` in it is made once, and passed whole to every part of a round: the worker group,
the workers' links, the hang watch, the saver, the run's record and the event log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from elaunch import env
from elaunch.agent.policy import events, nodes
from elaunch.agent.policy.actions import Action, StartRound
from elaunch.agent.policy.state import State, follow, observe
from elaunch.agent.policy.table import decide
from elaunch.checkpoint.records import Checkpoint, Stage
from elaunch.rendezvous.plan import Plan, column


class Round(Struct, frozen=True, dict=True):
    """A round on this node.

    Attributes:
        round: its number.
        nproc: how many workers this node has in it.
        restarts: how many restarts the job has had.
        reason: why it follows the round before; empty in round 0.
        checkpoint: the newest as it began, from which it resumes (``resumes_from``).
        plan: of a job of several nodes; None: this node is the whole job.
        name: of this node in the plan.
        kept: the local ranks of the workers that the round before had as well, and in which round
            the process of each was started.
        slots: how many workers each node has, by node rank.
        present: the ranks that go on from the round before, on all nodes.
    """

    round: int
    nproc: int
    restarts: int = 0
    reason: str = ""
    checkpoint: Checkpoint | None = None
    plan: Plan | None = None
    name: str = ""
    kept: Mapping[int, int] = {}
    slots: Sequence[int] = ()
    present: Sequence[int] = ()

    @cached_property
    def place(self) -> env.NodePlace:
        """Where this node stands; the address of one that is the whole job is left empty."""
        if self.plan is None:
            return env.only_node("", self.nproc)
        return nodes.place(self.plan, self.name)

    @property
    def first_rank(self) -> int:
        """The rank of this node's first worker."""
        return self.place.first_rank

    @property
    def own_ranks(self) -> frozenset[int]:
        """The ranks of this node's workers."""
        return frozenset(range(self.first_rank, self.first_rank + self.nproc))

    def born(self, local_rank: int) -> int:
        """Return the round in which the process of a worker was started."""
        return self.kept.get(local_rank, self.round)

    @property
    def resumes_from(self) -> Checkpoint | None:
        """The checkpoint that its workers begin from; None where others go on from where they are.

        Then ``checkpoint`` is what a round would resume from that none of them lives to see.
        """
        return None if self.present else self.checkpoint

    @property
    def resumed(self) -> str:
        """The name of the checkpoint that it resumes from, or ""."""
        return "" if self.checkpoint is None else self.checkpoint.name

    def resumes(self, stage: Stage) -> bool:
        """Whether it resumes from that save, out of the agents' memory."""
        return self.checkpoint is not None and self.checkpoint.uuid == stage.uuid

    def node_of(self, rank: int) -> int:
        """Return the node rank of the node that ``rank`` runs on."""
        first = 0
        for node_rank, node in enumerate(self.plan.nodes if self.plan else ()):
            first += node.slots
            if rank < first:
                return node_rank
        return 0


class Turn(Struct, frozen=True):
    """One turn of the loop: an event, the decision about it, the states before and after that.

    ``before`` has the event written into it already, ``after`` is where the action leads; ``begun``
    is the round that begins, if one does.
    """

    before: State
    event: events.Event
    action: Action
    reason: str
    after: State
    begun: Round | None = None


def make_turn(state: State, event: events.Event) -> Turn:
    """Return the turn that ``event`` makes in ``state``."""
    if isinstance(event, events.Exit) and state.kept.get(event.local_rank) == event.round:
        # The server knows its first round, and its rank there.
        rank = state.first_rank + event.local_rank
        event = event._replace(round=state.round, rank=rank)
    if isinstance(event, events.WorkerStands) and event.local_rank in state.entering:
        event = replace(event, round=state.round)  # it may have said so as this round began
    return _decided(observe(state, event), event)


def accused(made: Turn, culprit: str) -> Turn:
    """Return the turn in which a round failed, with its ``culprit``: only what is said changes."""
    return _decided(replace(made.before, culprit=culprit), made.event) if culprit else made


def _decided(before: State, event: events.Event) -> Turn:
    action, reason = decide(before, event)
    begun = _begun(before, action, reason) if isinstance(action, StartRound) else None
    return Turn(before, event, action, reason, follow(before, action, reason), begun)


def _begun(state: State, action: StartRound, reason: str) -> Round:
    assert state.plan is not None  # it names the round
    return Round(
        round=action.round,
        nproc=state.limits.nproc,
        restarts=state.plan.restarts,
        reason=reason if action.round > 0 else "",
        checkpoint=action.checkpoint,
        plan=state.plan if state.limits.meets else None,
        name=state.name,
        kept=state.births(action.keeps),
        slots=column(state.plan.nodes, "slots"),
        present=state.plan.present,
    )
