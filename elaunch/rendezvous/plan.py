"""The two records of a rendezvous: an agent's status, and the coordinator's plan.

Each agent owns one record in the store and replaces it when something changes; the coordinator owns
the plan. Both hold everything that matters at this moment, not what has changed: an agent that
comes late, or takes over as coordinator, has read everything with one look.

States of an agent (``NodeStatus.state``), each of the round ``NodeStatus.round``::

    joining ──server is ready──► ready ──its round began──► running ──► finished (all exited 0)
                                   ▲                          │              │
                                   └────── the next round ── ended ◄─ failed ◄┘ (ended from outside)

``failed``: a worker failed by itself, the others are being stopped. ``ended``: nothing of the round
is left on this node. ``leaving``: the agent is to end; it withdraws when its workers are gone.

Phases of a plan::

    forming ──► running ──► ending ──► running (the next round) …
       └───────────┴───────────┴─────► over

forming: nobody runs, agents gather. running: ``nodes`` run the round. ending: they stop it, for
``reason``. over: the job has ended with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, overload

from msgspec import Meta, Struct

from elaunch.errors import HangError
from elaunch.runs.record import Reports

AgentState = Literal["joining", "ready", "running", "failed", "finished", "ended", "leaving"]
Phase = Literal["forming", "running", "ending", "over"]
Cause = Literal["", "failure", "lost", "left", "joined", "asked"]
Preempted = Literal["", "stop", "resize"]
Survivors = Literal["", "wait", "work"]

_MOST = 2**53
Line = Annotated[str, Meta(max_length=1_000)]
"""One line; elaunch.rendezvous.records refuses control characters in it."""
Text = Annotated[str, Meta(max_length=60_000)]
Whole = Annotated[int, Meta(ge=-_MOST, le=_MOST)]
Count = Annotated[int, Meta(ge=0, le=_MOST)]
Rank = Annotated[int, Meta(ge=-1, le=_MOST)]
"""A rank or a round; -1 before there is one."""
Port = Annotated[int, Meta(ge=0, le=65_535)]
Slots = Annotated[int, Meta(ge=0, le=1_000_000)]
Code = Annotated[int, Meta(ge=0, le=255)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
StartFacts = Annotated[Mapping[Line, Line], Meta(max_length=100)]


UNSTABLE: Final = 3
"""Rounds in a row that lose one node without progress: then others that suffice go on without."""
MOST_LOSSES: Final = 10
"""Such rounds after which a job that needs this node ends."""


class SameFailure(Struct, frozen=True, forbid_unknown_fields=True):
    """The rounds in a row that failed for one cause, or lost one node, without progress."""

    signature: Line
    rounds: tuple[Rank, ...]

    @property
    def hosts(self) -> Sequence[str]:
        """The hosts of the nodes, where some were lost."""
        return self.signature.split(", ")


class WorkerFailure(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The first worker of a node that failed, short enough to be sent to every other node.

    ``rank`` is the worker's rank in the job, ``exitcode`` negative for a signal, ``text`` the
    cause as people read it (elaunch.agent.failure.report.render), at most 4,000 characters;
    ``age`` is the seconds since then when this was written, for no clock is shared; ``summary`` is
    what happened in one line where the end of this worker does not show it: a hang, or the culprit
    if that is another rank (elaunch.rendezvous.text.accused); ``signature`` is what the same
    failure has in common from round to round, where --max-same-failures asks for it.
    """

    rank: Rank
    local_rank: Rank = 0
    host: Line = ""
    pid: Count = 0
    exitcode: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
    text: Text = ""
    age: Seconds = 0.0
    node: Line = ""
    summary: Text = ""
    signature: Line = ""

    @property
    def is_hang(self) -> bool:
        """Whether the round hung, and no worker has failed."""
        return bool(self.summary) and self.exitcode == HangError.exit_code


class PlanCheckpoint(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The checkpoint that a round resumes from.

    The path is relative where every node has a directory of its own (--checkpoint-local). ``uuid``
    is that of a checkpoint which the agents have in memory and still write; "" for all others.
    """

    path: Text
    step: Whole
    format: Line
    uuid: Line = ""


class HeldShards(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The shards of one save that an agent has in memory, and that are in no checkpoint yet.

    ``path`` is where the checkpoint will be, ``round`` the one that has saved it, on ``world_size``
    ranks; ``ranks`` are those whose shards these are. ``writing``: some of them are not on the disk
    yet.
    """

    path: Text
    step: Whole
    round: Rank
    uuid: Line
    world_size: Count
    ranks: tuple[Rank, ...]
    writing: bool = False


class JobSeen(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How far an agent has seen the job; ``lost``: it has found that etcd lost its memory since."""

    job: Line
    phase: Phase
    round: Rank
    restarts: Count = 0
    without_progress: Count = 0
    step: Whole | None = None
    lost: bool = False


class RankPace(Struct, frozen=True, forbid_unknown_fields=True):
    """The rank whose own part of a step takes longest, and the median of those it is one of."""

    rank: Rank
    step_s: Seconds
    median_s: Seconds


class LateRank(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The rank of a node, on ``host``, for which the others of that node wait in collectives.

    It is ``last`` in so many of the ``collectives`` of some ``seconds``, typically ``behind_s``
    after the others, and for the share ``held`` of that time they wait; ``why``: what was measured.
    """

    rank: Rank
    last: Count
    collectives: Count
    behind_s: Seconds
    held: Seconds
    seconds: Seconds
    host: Line = ""
    why: Line = ""


class NodeTimes(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where the time of a node's slots went so far, or that of several ``nodes``.

    ``seconds`` by class (elaunch.runs.verdict.CLASSES) are means over the ``slots``; their sum is
    ``wall_s``. ``reports`` is what the script shows of itself (elaunch.runs.record.TimingRecord).
    """

    slots: Slots
    wall_s: Seconds
    seconds: Annotated[Mapping[Line, Seconds], Meta(max_length=100)]
    nodes: Count = 1
    late: LateRank | None = None
    pace: RankPace | None = None
    reports: Reports = ""


class RestartRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Somebody asks that ``round`` end and another one begin."""

    round: Rank
    reason: Text


class NodeStatus(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The status of one node, as its agent reports it.

    Attributes:
        host: the machine's name, for messages and for the order of newcomers.
        addr: the address that the other nodes reach this one at.
        port: of a socket that this agent has bound for the workers' store of the next round.
        slots: workers that it starts.
        role: ``--role``.
        hint: the order that the user or the scheduler gave (``--node-rank``, SLURM_PROCID,
            JOB_COMPLETION_INDEX), or None.
        facts: what must be the same on all nodes, name → short text (script hash, torch version).
        state, round: how it is, and in which round; -1 before the first.
        failure: the first failure on this node in ``round``.
        reason: why it leaves, if it does.
        exit_code: what it ends with, if it leaves (128 + n for a signal).
        note: for which rank this node's ranks have waited for long, or "".
        listens: whether its workers can be asked to save and to end (should_preempt()).
        preempted: why its workers, which have ended with 0, are not done: the job was asked to end
            (``stop``) or its nodes change (``resize``); or "".
        asks: why a command asks on this node that the whole job end, to be continued; or "".
        restart: which round a command asks on this node to end, so that the next one begins.
        seen: what it last read of the job, so that a store that has lost its memory goes on where
            the job was. The Meeting writes it, and ``seq``, which counts what this agent has
            written.
        peer_port: the port on which other agents reach this one; 0: none.
        probe: the name of the file that it has written where all nodes should see it
            (elaunch.rendezvous.decide.checkpoints), or "".
        held: what it has in memory of saves that are not committed, while it has no workers.
        kept: the local ranks of its workers that stay for the next round, when nothing else is left
            of a round that has failed.
        survivors: whether workers, here and elsewhere, can go on without those that have ended
            here: they ``wait`` for the next round, or ``work``, as none that has failed here was
            among them yet; or "": all are to begin anew.
        times: where the time of its slots went, as of when it was written.
    """

    host: Line
    addr: Line
    port: Port
    slots: Slots
    role: Line = "default"
    hint: Count | None = None
    facts: StartFacts = {}
    state: AgentState = "joining"
    round: Rank = -1
    failure: WorkerFailure | None = None
    reason: Text = ""
    exit_code: Code | None = None
    note: Text = ""
    listens: bool = False
    preempted: Preempted = ""
    asks: Text = ""
    restart: RestartRequest | None = None
    seen: JobSeen | None = None
    seq: Count = 0
    peer_port: Port = 0
    probe: Line = ""
    held: tuple[HeldShards, ...] = ()
    kept: tuple[Rank, ...] = ()
    survivors: Survivors = ""
    times: NodeTimes | None = None

    @property
    def rests(self) -> bool:
        """Whether the agent has no workers, and waits for the others."""
        return self.state in ("ready", "ended", "finished")

    def has_ended(self, round_number: int) -> bool:
        """Return whether nothing of that round is left on its node."""
        return self.round >= round_number and self.state in ("ended", "finished")


class Node(Struct, frozen=True):
    """One node of a round; the rank of a node is its index in ``Plan.nodes``.

    ``peer_port`` is the port at ``addr`` on which its agent takes other agents' requests; 0: none.
    """

    name: str
    host: str
    addr: str
    slots: int
    role: str
    peer_port: int = 0


class NodeList(Sequence[Node]):
    """The nodes of a plan as they are sent: a column for each field, with one object for all nodes.

    A column is one text, its values joined by commas, a list, or ``(value, number)`` where all have
    the same. An agent of a large job needs its own rank in it and no node, so a Node is made only
    when it is asked for. ``digest`` names the list: equal digests are equal lists.
    """

    def __init__(self, columns: Mapping[str, Column], digest: str) -> None:
        self.digest = digest
        self._columns = columns
        self._number = length(columns["name"])

    def column(self, name: str) -> Sequence[Any]:
        """Return one field of all nodes, in their order."""
        column = self._columns[name]
        is_number = name in NUMBERS
        if isinstance(column, tuple):
            return [int(column[0]) if is_number else column[0]] * column[1]
        values = column.split(",") if isinstance(column, str) else column
        return list(map(int, values)) if is_number else values

    def rank_of(self, name: str) -> int | None:
        """Return the index of the node ``name``; None: it is not there."""
        column = self._columns["name"]
        if isinstance(column, str):  # without an object for each of the others
            before, found, _ = f",{column},".partition(f",{name},")
            return before.count(",") if found and "," not in name else None
        names = self.column("name")
        return names.index(name) if name in names else None

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Node]:
        return map(Node, *(self.column(name) for name in Node.__struct_fields__))

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | Sequence[Node]:
        """Return one node, or some."""
        if isinstance(index, slice):
            return tuple(self)[index]
        return Node(*(self.column(name)[index] for name in Node.__struct_fields__))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NodeList):
            return self.digest == other.digest
        return isinstance(other, tuple) and len(other) == len(self) and tuple(self) == other

    __hash__ = None  # type: ignore[assignment]


Column = str | list[str] | tuple[str, int]
NUMBERS = ("slots", "peer_port")
"""Fields of a node that are numbers; as text in a column."""


def length(column: Column) -> int:
    """Return of how many nodes a column is."""
    if isinstance(column, str):
        return column.count(",") + 1
    return column[1] if isinstance(column, tuple) else len(column)


def column(nodes: Sequence[Node], name: str) -> Sequence[Any]:
    """Return one field of all nodes, in their order."""
    if isinstance(nodes, NodeList):
        return nodes.column(name)
    return [getattr(node, name) for node in nodes]


class Plan(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The newest decision that the coordinator has published.

    Attributes:
        job: the incarnation id, random; a later job with the same run id has another. Agents know
            each other by it where there is no --rdzv-secret-file, so it is long.
        round: the round that runs, or ran last; -1 before the first. It only grows.
        reason: why this phase began: a log line, a status text, what tests assert.
        cause: why a round ends; ``failure`` alone counts as a restart.
        nodes: of ``round``, by node rank.
        spares: names of agents that stand by.
        joining: names of newcomers that the next round will have.
        anew: by node, the local ranks whose workers ``round`` starts, where all others go on in
            their processes; while it is decided what follows ``round``, that some may. None: all
            are started anew.
        master_addr, master_port: where the workers' store of ``round`` is: on ``nodes[0]``.
        checkpoint: what ``round`` resumes from; None: a fresh start.
        restarts, without_progress: of the whole job: rounds that followed a failure, and those
            since a newer checkpoint was last seen. ``crashes``: rounds in a row that failed soon
            after their start (elaunch.rendezvous.decide.budget).
        failure: the first failure of the round that ended last, of the whole job, with its
            ``host`` and ``node``; None without one. ``same``: the rounds in a row that failed as
            the one before this did, with --max-same-failures. ``losses``: those that lost the
            nodes which the last such round lost.
        waits: what the coordinator waits for, and for how long, if that takes long; or "".
        notice: a warning for every node (they differ in their start-up facts), or "".
        facts: the start-up facts of ``nodes[0]``, for a newcomer to compare with its own.
        strict: whether a newcomer whose facts differ is to end with an error.
        asked: why the job is asked to end while ``round`` runs (``NodeStatus.asks``), or "": the
            workers of all nodes are asked to save and to end, and no round follows.
        exit_code: of every agent, when over.
        not_sharing: names of agents that do not share the checkpoint directory, and so end.
        coordinator: the name of the agent that wrote this.
        times: when over, where the time of the slots of all nodes of ``round`` went.
    """

    job: Line
    round: Rank = -1
    phase: Phase = "forming"
    reason: Text = ""
    cause: Cause = ""
    nodes: Sequence[Node] = ()
    spares: tuple[Line, ...] = ()
    joining: tuple[Line, ...] = ()
    anew: Mapping[Line, tuple[Rank, ...]] | None = None
    master_addr: Line = ""
    master_port: Port = 0
    checkpoint: PlanCheckpoint | None = None
    restarts: Count = 0
    without_progress: Count = 0
    crashes: Count = 0
    failure: WorkerFailure | None = None
    same: SameFailure | None = None
    losses: SameFailure | None = None
    waits: Text = ""
    notice: Text = ""
    facts: StartFacts = {}
    strict: bool = False
    asked: Text = ""
    exit_code: Code | None = None
    not_sharing: tuple[Line, ...] = ()
    coordinator: Line = ""
    times: NodeTimes | None = None

    @property
    def unstable(self) -> Sequence[str]:
        """The hosts that were lost in UNSTABLE rounds in a row without progress."""
        return self.losses.hosts if self.losses and len(self.losses.rounds) >= UNSTABLE else ()

    @property
    def world_size(self) -> int:
        """Workers of the round on all nodes."""
        return sum(column(self.nodes, "slots"))

    @property
    def present(self) -> list[int]:
        """The ranks of ``round`` that go on from the round before."""
        names, slots = column(self.nodes, "name"), column(self.nodes, "slots")
        found, first = list[int](), 0
        for name, number in zip(names, slots, strict=True):
            found += [first + local_rank for local_rank in sorted(self.keeps(name, number))]
            first += number
        return found

    def keeps(self, name: str, slots: int) -> frozenset[int]:
        """Return the local ranks of the workers of a node that go on from the round before."""
        if self.anew is None:
            return frozenset()
        return frozenset(range(slots)).difference(self.anew.get(name, ()))

    def node_rank(self, name: str) -> int | None:
        """Return the rank of the node ``name`` in this round, None if it is not in it."""
        if isinstance(self.nodes, NodeList):
            return self.nodes.rank_of(name)
        return next((rank for rank, node in enumerate(self.nodes) if node.name == name), None)
