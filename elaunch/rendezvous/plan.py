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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AgentState = Literal["joining", "ready", "running", "failed", "finished", "ended", "leaving"]
Phase = Literal["forming", "running", "ending", "over"]
Cause = Literal["", "failure", "lost", "left", "joined"]
Preempted = Literal["", "stop", "resize"]


@dataclass(frozen=True)
class NodeStatus:
    """What one agent reports of itself.

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
        failure: the first failure on this node in ``round``, as WorkerFailure.to_dict makes it;
            with ``age``, the seconds since then when this record was written (no clock is shared).
        reason: why it leaves, if it does.
        exit_code: what it ends with, if it leaves (128 + n for a signal).
        note: what the agent wants a reader to see (a stuck process), or "".
        listens: whether its workers can be asked to save and to end (should_preempt()).
        preempted: why its workers, which have ended with 0, are not done: the job was asked to end
            (``stop``) or its nodes change (``resize``); or "".
        asks: why a command asks on this node that the whole job end, to be continued; or "".
        seen: what it last read of the job (job, phase, round, restarts, without_progress, step),
            so that a store that has lost its memory goes on where the job was; with ``lost``, if
            this agent has found that etcd did lose it. The Meeting writes it, and ``seq``, which
            counts what this agent has written.
        courier: the port on which other agents reach this one; 0: none.
        probe: the name of the file that it has written where all nodes should see it
            (elaunch.rendezvous.decide.sharing), or "".
    """

    host: str
    addr: str
    port: int
    slots: int
    role: str = "default"
    hint: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    state: AgentState = "joining"
    round: int = -1
    failure: Mapping[str, Any] | None = None
    reason: str = ""
    exit_code: int | None = None
    note: str = ""
    listens: bool = False
    preempted: Preempted = ""
    asks: str = ""
    seen: Mapping[str, Any] | None = None
    seq: int = 0
    courier: int = 0
    probe: str = ""


@dataclass(frozen=True)
class Node:
    """One node of a round; the node's rank is its place in ``Plan.nodes``.

    ``courier`` is the port at ``addr`` on which its agent takes other agents' requests; 0: none.
    """

    name: str
    host: str
    addr: str
    slots: int
    role: str
    courier: int = 0


@dataclass(frozen=True)
class Plan:
    """What the coordinator has decided and published last.

    Attributes:
        job: the incarnation id, random; a later job with the same run id has another. Agents know
            each other by it where there is no --rdzv-secret-file, so it is long.
        round: the round that runs, or ran last; -1 before the first. It only grows.
        reason: why this phase began: a log line, a status text, what tests assert.
        cause: why a round ends; ``failure`` alone counts as a restart.
        nodes: of ``round``, by node rank.
        spares: names of agents that stand by.
        joining: names of newcomers that the next round will have.
        master_addr, master_port: where the workers' store of ``round`` is: on ``nodes[0]``.
        checkpoint: path, step and format of what ``round`` resumes from; None: a fresh start. The
            path is relative where every node has a directory of its own (--checkpoint-local).
        restarts, without_progress: of the whole job: rounds that followed a failure, and those
            since a newer checkpoint was last seen. ``crashes``: rounds in a row that failed soon
            after their start (elaunch.rendezvous.decide.budget).
        failure: the first failure of the round that ended last, of the whole job: a
            WorkerFailure with ``rank``, ``host`` and ``node`` of the job; None without one.
        waits: what the coordinator waits for, and for how long, if that takes long; or "".
        notice: a warning for every node (they differ in their start-up facts), or "".
        facts: the start-up facts of ``nodes[0]``, for a newcomer to compare with its own.
        strict: whether a newcomer whose facts differ is to end with an error.
        asked: why the job is asked to end while ``round`` runs (``NodeStatus.asks``), or "": the
            workers of all nodes are asked to save and to end, and no round follows.
        exit_code: of every agent, when over.
        strangers: names of agents that do not share the checkpoint directory, and so end.
        coordinator: the name of the agent that wrote this.
    """

    job: str
    round: int = -1
    phase: Phase = "forming"
    reason: str = ""
    cause: Cause = ""
    nodes: tuple[Node, ...] = ()
    spares: tuple[str, ...] = ()
    joining: tuple[str, ...] = ()
    master_addr: str = ""
    master_port: int = 0
    checkpoint: Mapping[str, Any] | None = None
    restarts: int = 0
    without_progress: int = 0
    crashes: int = 0
    failure: Mapping[str, Any] | None = None
    waits: str = ""
    notice: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    asked: str = ""
    exit_code: int | None = None
    strangers: tuple[str, ...] = ()
    coordinator: str = ""

    @property
    def world_size(self) -> int:
        """Workers of the round on all nodes."""
        return sum(node.slots for node in self.nodes)

    def node_rank(self, name: str) -> int | None:
        """Return the rank of the node ``name`` in this round, None if it is not in it."""
        return next((rank for rank, node in enumerate(self.nodes) if node.name == name), None)


@dataclass(frozen=True)
class WorkerFailure:
    """The first worker of a node that failed, short enough to be sent to every other node.

    ``rank`` is the worker's rank in the job, ``exitcode`` negative for a signal, ``text`` the
    cause as people read it (elaunch.agent.failure.report.render_cause), at most 4,000 characters;
    ``summary`` is what happened in one line where the exit code does not show it: a hang.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exitcode: int
    text: str
    age: float = 0.0
    node: str = ""
    summary: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return dict(vars(self))
