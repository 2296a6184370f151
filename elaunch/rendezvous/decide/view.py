"""The view that a decision depends on, and the steps that it can be.

A View is one reading of the job by its coordinator: the plan and the members, with the moments at
which the coordinator learnt of changes by its own monotonic clock. No other clock plays a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from elaunch.errors import CheckpointError
from elaunch.rendezvous.plan import NodeStatus, Plan, PlanCheckpoint

OnJoin = Literal["graceful", "now", "never"]

FENCE = 5 / 6
"""Part of ``heartbeat_timeout`` after which an agent's workers are killed, if not renewed."""
HOSTED = 3
"""The fence moves by ``heartbeat_timeout`` / HOSTED where nothing listens at a TCPStore's port."""


class Rules(Struct, frozen=True):
    """The settings on which agents must agree; times in seconds.

    ``settle`` is waited for more nodes at the first formation, after the last that arrived;
    ``debounce`` for more newcomers while a round runs. ``heartbeat_timeout`` is how long an agent
    is silent before it counts as lost, ``store_timeout`` how long it goes on without a store,
    ``preempt_grace`` how long workers may take to save that were asked to for a newcomer,
    ``end_timeout`` what a node may need to end its workers, all graces included, ``remind`` how
    often the coordinator publishes what it waits for.
    ``standalone``: this agent is the whole job, and no other can join it.
    ``hosted_by_me``: the store is a part of this agent's process and ends with it. ``killed_in`` is
    the round in which the agent was killed that hosted it before, on this machine, -1 if that was
    in none; None: no such agent is known.
    """

    min_nodes: int
    max_nodes: int
    settle: float = 2.0
    debounce: float = 0.5
    join_timeout: float = 600.0
    heartbeat_timeout: float = 3.0
    store_timeout: float = 30.0
    preempt_grace: float = 30.0
    end_timeout: float = 0.0
    remind: float = 30.0
    max_restarts: int = 0
    lifetime_budget: bool = False
    max_same_failures: int = 0
    on_join: OnJoin = "graceful"
    static: bool = False
    strict_symmetry: bool = False
    has_checkpoint_dir: bool = False
    checkpoint_local: bool = False
    hosted_by_me: bool = False
    killed_in: int | None = None
    standalone: bool = False

    @property
    def patience(self) -> float:
        """Seconds that a node may take for its part of a round's start or end."""
        return max(self.join_timeout, self.end_timeout + 2 * self.heartbeat_timeout)


class Present(Struct, frozen=True):
    """One agent that is a member.

    ``since`` is when it arrived, ``number`` counts arrivals, ``changed`` is when its state or round
    last changed, ``failed_at`` when its failure happened (when it was received, less its age).
    """

    record: NodeStatus
    since: float
    number: int
    changed: float
    failed_at: float | None = None


class Absent(Struct, frozen=True):
    """A node of the plan's round that is no member any more; ``last`` is its last record.

    The cause is unknown to a coordinator that has taken over since.
    """

    cause: Literal["left", "expired", "unknown"]
    at: float
    last: NodeStatus | None = None


class SearchResult(Struct, frozen=True):
    """The result of the search for a checkpoint: a checkpoint, none, or a problem.

    ``probes`` are the marks of newcomers that were looked for
    (elaunch.rendezvous.decide.checkpoints), ``unseen`` those of them that are not
    there. ``ready`` are the nodes on which the checkpoint is, where each has a directory of its
    own; None: on all. ``again``: a node was not reached, so nothing is known. ``exit_code`` is what
    the job ends with because of a problem.
    """

    checkpoint: PlanCheckpoint | None = None
    problem: str = ""
    probes: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()
    ready: frozenset[str] | None = None
    again: bool = False
    exit_code: int = CheckpointError.exit_code


class LastKnown(Struct, frozen=True):
    """How far the job was, by what agents saw of it in a store that is no more.

    ``heartbeat`` is the longest ``heartbeat_timeout`` of those that report one.
    """

    round: int = -1
    restarts: int = 0
    without_progress: int = 0
    step: int | None = None
    heartbeat: float = 0.0


class View(Struct, frozen=True):
    """All that a decision depends on.

    Attributes:
        me: the coordinator's own name.
        plan: the newest in the store, or the empty one with which a job begins.
        present: the members, but for those that belong to a job that is over.
        absent: nodes of the plan's round that are not.
        leads_since: when this coordinator became the leader.
        phase_since: when it first saw the plan's phase.
        store_opened: when this agent began to open the store; agents of an earlier host of it may
            still have workers for as long as a fence takes from then on.
        known: how far the job was, if an agent knows that a store that is no more had begun it.
        published_at: when this coordinator last published, or became the leader.
        last_newcomer_at: when an agent that is no node of the plan's round last came or went.
        search_result: of the last search, if nothing has run since.
        searching: whether a search goes on.
        round_began: when the last node of the plan's round began it, as far as this coordinator
            knows.
        jitter: which part of a backoff to wait, 0.5 to 1.
        evicted: whether absent nodes may have been evicted, and be alive.
        evict_tried_at: when that was last tried.
        unannounced: the plan is not in the store, and must be: the job that was there is over.
    """

    me: str
    plan: Plan
    present: Mapping[str, Present]
    absent: Mapping[str, Absent]
    leads_since: float = 0.0
    phase_since: float = 0.0
    store_opened: float = 0.0
    known: LastKnown | None = None
    published_at: float = 0.0
    last_newcomer_at: float = 0.0
    search_result: SearchResult | None = None
    searching: bool = False
    round_began: float = 0.0
    jitter: float = 1.0
    evicted: bool = False
    evict_tried_at: float = -math.inf
    unannounced: bool = False


# ── what a decision can be ───────────────────────────────────────────────────────────────────────


class Publish(Struct, frozen=True):
    """Publish this plan; a decision leaves the ``version`` to the coordinator."""

    plan: Plan
    version: int = 0


class Search(Struct, frozen=True):
    """Look for the newest complete checkpoint, and for the probes of newcomers.

    ``present`` is the record of every member, by name; ``nodes`` are the names of those that the
    round will have, as far as that is known. ``jobs`` are the incarnation ids of this job's plans:
    a store that is lost and made anew has another.
    """

    present: Mapping[str, NodeStatus] = {}
    probes: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()
    jobs: frozenset[str] = frozenset()


class Wait(Struct, frozen=True):
    """Do nothing before the members change, or before ``until`` on the coordinator's clock."""

    until: float | None = None


class Evict(Struct, frozen=True):
    """Remove the entries of these agents, if the store may fail to notice that they are gone."""

    names: tuple[str, ...]


Step = Publish | Search | Wait | Evict
Decision = tuple[Step, str]
