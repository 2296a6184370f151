"""A whole job as the store has it in which its agents meet, and the agents themselves.

A reader enrols nowhere, leads nothing and writes nothing.

==========  ===================================  =============================================
backend     which jobs are there                 whose store it is
==========  ===================================  =============================================
etcd        the run ids below the prefix         of all of them, side by side
c10d        the one of the TCPStore              what the process that hosts it wrote (identity)
static      the same, at the address of node 0   the same; it may name another port
==========  ===================================  =============================================

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
UNREADABLE  nothing that this version or this secret can read
==========  =========================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from elaunch.agent.peers.messages import ask_nodes
from elaunch.agent.peers.peers import Peers
from elaunch.config.rendezvous import RendezvousSettings
from elaunch.endings import PREEMPTED
from elaunch.errors import StoreDenied, StoreError, StoreUnreachable, UsageError
from elaunch.rendezvous import munge, records
from elaunch.rendezvous.decide.members import Applicant, by_hint
from elaunch.rendezvous.munge import MungeError
from elaunch.rendezvous.plan import Node, NodeStatus, Plan
from elaunch.rendezvous.records import RecordError
from elaunch.rendezvous.times import to_record, total
from elaunch.runs.record import JobTimingRecord
from elaunch.store.etcd.cluster import EtcdCluster
from elaunch.store.protocol import Store
from elaunch.text import count, host_port, listed
from elaunch.views.watch import pause

OPEN_TIMEOUT_S: Final = 5.0
"""Seconds to try to connect; an agent may wait for its store, a person does not."""
DIAL_S: Final = 5.0
FRESH_S: Final = 1.0
"""Seconds for which a reading of the store is new enough to ask a job's agents by."""
LOOKS: Final = 3
SLICE_S: Final = 0.5
"""A blocking wait is cut into slices so that Ctrl-C is quick."""

Member = tuple[NodeStatus, float | None]
"""The record of an agent, and seconds since it was last renewed, if known."""
_LIVE: Final = {"forming": "FORMING", "running": "RUNNING", "ending": "ENDING"}


class StoreNode(Struct, frozen=True):
    """One node; ``rank`` and ``ranks`` (first and last of its workers) only if it is in the round.

    ``record`` is None where the node is no member.
    """

    name: str
    host: str
    addr: str
    slots: int
    role: str
    state: str
    rank: int | None = None
    ranks: tuple[int, int] | None = None
    age_s: float | None = None
    record: NodeStatus | None = None

    @property
    def note(self) -> str:
        """Why the agent leaves and what it wants a reader to see."""
        if self.record is None:
            return ""
        return "; ".join(filter(None, (self.record.reason, self.record.note)))


class StoreJob(Struct, frozen=True, dict=True):
    """One reading of a job.

    Attributes:
        place: the store, as messages name it.
        read_at: seconds since the epoch, by the reader's clock.
        plan, version: the newest plan; None and 0 before the first.
        members: the members by name.
        refused: entries that cannot be read: name → why.
        problem: why nothing could be read at all, or "".
        stale: why this is older than the reading, or "": the store does not answer meanwhile.
    """

    run_id: str
    place: str
    read_at: float
    plan: Plan | None = None
    version: int = 0
    members: Mapping[str, Member] = {}
    refused: Mapping[str, str] = {}
    problem: str = ""
    stale: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing: no such job, or its last traces are gone."""
        return self.plan is None and not self.members and not self.refused

    @property
    def phase(self) -> str | None:
        """The plan's phase; forming before the first plan, None if nothing is readable."""
        return None if self.problem else self.plan.phase if self.plan else "forming"

    @property
    def state(self) -> str:
        """How the job stands; see the table above."""
        plan = self.plan
        if self.problem:
            return "UNREADABLE"
        if plan is None or plan.phase != "over":
            here = bool(self.members or self.refused)
            return _LIVE[plan.phase if plan else "forming"] if here or plan is None else "LOST"
        if plan.exit_code == 0:
            return "COMPLETED"
        if plan.exit_code == PREEMPTED and plan.failure is None:
            return "PREEMPTED"
        by_signal = plan.exit_code is not None and plan.exit_code > 128
        return "STOPPED" if by_signal and plan.failure is None else "FAILED"

    @property
    def live(self) -> bool:
        """Whether the job goes on."""
        return self.state in _LIVE.values()

    @property
    def reason(self) -> str:
        """Why the job is in its state."""
        said = self.plan.reason if self.plan else ""
        if self.plan and self.plan.waits:
            # What is waited for is mostly the plan's reason, and for how long.
            more = "" if self.plan.waits.startswith(said) else f"{said}; "
            said = more + self.plan.waits
        if self.problem or self.state != "LOST":
            return self.problem or said
        last = f"; the last word of the coordinator: {said}" if said else ""
        return f"no agent is there any more, and the job had not ended{last}"

    @cached_property
    def nodes(self) -> tuple[StoreNode, ...]:
        """The nodes of the round, by node rank."""
        return tuple(self._nodes(self.plan)) if self.plan else ()

    def _nodes(self, plan: Plan) -> Iterator[StoreNode]:
        first = 0
        for rank, node in enumerate(plan.nodes):
            record, age = self.members.get(node.name, (None, None))
            if node.name in self.refused:
                state = "refused"
            elif record is None:
                state = "left" if plan.phase == "over" else "gone"
            else:
                # Of an earlier round: it has read of the new one and not begun it yet.
                said = record.round == plan.round and record.state in (
                    "failed",
                    "finished",
                    "ended",
                )
                state = record.state if said or record.state == "leaving" else "alive"
            what = (node.name, node.host, node.addr, node.slots, node.role)
            ranks = (first, first + node.slots - 1) if node.slots else None
            yield StoreNode(*what, state, rank, ranks, age, record)
            first += node.slots

    @cached_property
    def spares(self) -> tuple[StoreNode, ...]:
        """The members that stand by."""
        taken = {node.name for node in self.nodes}
        names = self.plan.spares if self.plan else ()
        return tuple(
            self._apart(name, "spare") for name in names if name in self.members.keys() - taken
        )

    @cached_property
    def joining(self) -> tuple[StoreNode, ...]:
        """The members that wait for the next round: as the plan has them, then by their hints."""
        taken = {node.name for node in (*self.nodes, *self.spares)}
        announced = {name: at for at, name in enumerate(self.plan.joining if self.plan else ())}

        def key(name: str) -> tuple[object, ...]:
            record, _ = self.members[name]
            hint = by_hint(Applicant(name, record.host, record.hint))
            return announced.get(name, len(announced)), hint

        names = sorted(self.members.keys() - taken, key=key)
        return tuple(self._apart(name, "joining") for name in names)

    def _apart(self, name: str, state: str) -> StoreNode:
        """Return an agent that has no rank in this round."""
        record, age = self.members[name]
        state = record.state if record.state == "leaving" else state
        what = (record.host, record.addr, record.slots, record.role)
        return StoreNode(name, *what, state, age_s=age, record=record)

    @cached_property
    def timing(self) -> JobTimingRecord | None:
        """Where the time of the round's nodes went, as they have last published it."""
        found = [node.record.times for node in self.nodes if node.record is not None]
        times = total(one for one in found if one is not None)
        if self.plan is not None and self.plan.phase == "over":
            times = self.plan.times
        return None if times is None else to_record(times)

    @property
    def restarts(self) -> dict[str, Any] | None:
        """The restarts of the whole job, its budget if an agent says it; without a plan None."""
        if self.plan is None:
            return None
        used, without = self.plan.restarts, self.plan.without_progress
        nothing = {"used": used, "without_progress": without, "max": None, "budget": None}
        for node in (*self.nodes, *self.spares, *self.joining):
            facts = node.record.facts if node.record else {}
            if (most := facts.get("max_restarts", "")).isdecimal():
                return nothing | {"max": int(most), "budget": facts.get("restart_budget")}
        return nothing

    @property
    def gist(self) -> object:
        """The state, without ages: a change of it is one that is shown."""
        everyone = (*self.nodes, *self.spares, *self.joining)
        nodes = tuple((node.name, node.state, node.note) for node in everyone)
        return self.run_id, self.plan, nodes, tuple(self.refused.items()), self.problem, self.stale


class JobStore:
    """One job in its store, read again and again, and its agents; to be closed.

    While the store does not answer, that is not the end: the last reading stays, marked as stale,
    for ``store_timeout`` seconds, as long as the agents themselves would go on without the store.
    The agents are asked at the addresses that it has, as they ask each other: the job's incarnation
    id, of which their key is made, is in the store (elaunch.agent.peers).
    """

    def __init__(
        self,
        rendezvous: RendezvousSettings,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = run_id
        self._rendezvous = rendezvous
        self._clock = clock
        self._store: Store | None = None
        self._secret: bytes | None = None
        self._job: StoreJob | None = None
        self._peers: Peers | None = None
        self._answered_at = clock()

    def read(self) -> StoreJob:
        """Read the job now.

        Raises:
            UsageError: the store does not know the job, at the first reading.
            StoreUnreachable: nobody answers; after the first reading only ``store_timeout``
                seconds later.
            StoreError: the store does not let us in, or its plan cannot be read.
        """
        try:
            return self._look()
        except StoreUnreachable as exc:
            self.close()
            silent = self._clock() - self._answered_at
            if self._job is None or silent >= self._rendezvous.store_timeout:
                raise
            self._job = replace(self._job, stale=str(exc))
            return self._job

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or as soon as the coordinator publishes a new plan."""
        until = self._clock() + seconds
        known = self._job.version if self._job else 0
        while (left := until - self._clock()) > 0:
            step = min(left, SLICE_S)
            if self._store is None:
                pause(step)
                continue
            try:
                if self._store.follow(known, step) is not None:
                    return
            except StoreError:
                # The next reading meets the same and reports it.
                pause(step)

    def close(self) -> None:
        """Let go of the connection; a later reading opens another."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _look(self) -> StoreJob:
        rendezvous, run_id = self._rendezvous, self.name
        if self._store is None:
            store = open_for_reading(rendezvous, run_id)
            try:
                self._secret = secret_of(rendezvous, run_id, store)
            except StoreError:
                store.close()
                raise
            self._store = store
        found = look(self._store, run_id, records.key_of(self._secret, run_id))
        if rendezvous.backend == "etcd" and found.empty:
            # A TCPStore names its job itself; etcd has the keys of a job or has none.
            if self._job is None:
                raise no_such_job(run_id, found.place, run_ids(rendezvous))
            found = replace(found, problem="nothing of the job is left in the store")
        self._job, self._answered_at = found, self._clock()
        return found

    @property
    def job(self) -> StoreJob:
        """A reading that is no older than FRESH_S; raises as :meth:`read` does, at once."""
        if self._job is None or time.time() - self._job.read_at > FRESH_S:
            return self._look()
        return self._job

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the newest round, by node rank."""
        plan = self.job.plan
        return () if plan is None else tuple(plan.nodes)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank in the newest round; UsageError where there is none."""
        for node in self.job.nodes:
            if node.rank is not None and node.ranks and node.ranks[0] <= rank <= node.ranks[1]:
                return node.rank
        size = self.job.plan.world_size if self.job.plan else 0
        raise UsageError(f"--rank {rank}: job {self.name} has {count(size, 'rank')} in its round")

    @property
    def live(self) -> bool:
        """Whether the job goes on; a store that is gone, or has nothing of it, went with it."""
        try:
            return self.job.live
        except (StoreError, UsageError):
            return False

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """Return what each of its ``nodes`` (None: all) answers to a request, or ``error``.

        Raises UsageError where the job is over, StoreError where the store does not answer.
        """
        plan = self.job.plan
        if plan is None or not self.job.live:
            what = "has begun no round yet" if plan is None else "is over, and its agents are gone"
            raise UsageError(f"job {self.name} {what}: `elaunch status` with these flags shows it")
        peers = self._peers = self._peers or Peers("", self.name, self._secret)
        peers.on_plan(plan, "")
        wanted = request.get("nodes")
        asked = [node for node in range(len(plan.nodes)) if wanted is None or node in wanted]
        until = time.monotonic() + seconds
        return ask_nodes(asked, lambda node: peers.view(node, request, until, DIAL_S), seconds)


def read_jobs(rendezvous: RendezvousSettings) -> list[StoreJob]:
    """Read all jobs of a store; those whose last keys expired meanwhile are left out."""
    found = []
    for run_id in run_ids(rendezvous):
        with contextlib.closing(open_for_reading(rendezvous, run_id)) as store:
            try:
                key = records.key_of(secret_of(rendezvous, run_id, store), run_id)
                found.append(look(store, run_id, key))
            except (StoreUnreachable, StoreDenied):
                raise
            except StoreError as exc:
                found.append(StoreJob(run_id, store.name, time.time(), problem=str(exc)))
    return [job for job in found if job.problem or not job.empty]


def look(store: Store, run_id: str, key: bytes | None) -> StoreJob:
    """Read plan and members once; ``key`` is records.key_of the job's secret.

    They are as they were together, or nearly where plans follow each other. A node of a plan was a
    member before; after it, too, unless it went or a newer plan came.

    Raises:
        RecordError: the plan cannot be read, or no agent's record where there is no plan: it is
            malformed, of another version, or signed with another secret.
        StoreError: the store does not answer.
    """
    post = store.latest()
    for _ in range(LOOKS):
        leases = store.members()
        newer = store.latest()
        if newer == post:
            break
        post = newer
    plan = records.decode_plan(post, key, "the coordinator") if post else None
    members: dict[str, Member] = {}
    refused: dict[str, RecordError] = {}
    for name, lease in sorted(leases.items()):
        try:
            members[name] = records.decode_agent(lease.value, key, name), lease.age
        except RecordError as exc:
            refused[name] = exc
    if refused and not members and plan is None:
        raise next(iter(refused.values()))
    problems = {name: str(problem) for name, problem in refused.items()}
    version = post.version if post else 0
    return StoreJob(run_id, store.name, time.time(), plan, version, members, problems)


def secret_of(rendezvous: RendezvousSettings, run_id: str, store: Store) -> bytes | None:
    """Return the secret of a job: that which is given, or what its agents share by MUNGE.

    Raises:
        StoreDenied: they share a key that this process cannot read.
        StoreError: the store does not answer.
    """
    secret = rendezvous.secret
    if secret is None and munge.is_there() and (found := store.shared()):
        try:
            secret = munge.read(found, run_id)
        except MungeError as exc:
            key = f"the key that the agents of {run_id!r} share by MUNGE"
            raise StoreDenied(f"{key}, in {store.name}, cannot be read: {exc}") from None
    return secret


def run_ids(rendezvous: RendezvousSettings) -> tuple[str, ...]:
    """Return the run ids of the jobs that the store has, sorted.

    Raises:
        StoreUnreachable: nobody answers, or what answers is no store of elaunch.
        StoreDenied: etcd does not let us in.
    """
    if rendezvous.backend == "etcd":
        from elaunch.store.etcd import client as etcd

        return tuple(sorted(etcd.run_ids(_etcd_place(rendezvous))))
    return (_host_identity(rendezvous)[0],)


def open_for_reading(rendezvous: RendezvousSettings, run_id: str) -> Store:
    """Connect to the store of the job ``run_id``; the caller closes it.

    Raises:
        UsageError: the TCPStore is that of another job.
        StoreUnreachable, StoreDenied: as in :func:`run_ids`.
    """
    if rendezvous.backend == "etcd":
        from elaunch.store.etcd import client as etcd

        return etcd.connect(
            _etcd_place(rendezvous),
            run_id,
            deadline=min(OPEN_TIMEOUT_S, rendezvous.connect_timeout),
        )
    from elaunch.store.tcp import client

    its_run_id, (host, port) = _host_identity(rendezvous)
    if its_run_id != run_id:
        raise no_such_job(run_id, f"the TCPStore at {host_port(host, port)}", (its_run_id,))
    key = records.key_of(rendezvous.secret, run_id)
    store = client.connect(
        host, port, run_id, deadline=min(OPEN_TIMEOUT_S, rendezvous.connect_timeout), key=key
    )
    if key is None:  # it may be one that is read from the store
        try:
            store.prove(records.key_of(secret_of(rendezvous, run_id, store), run_id))
        except StoreError:
            store.close()
            raise
    return store


def no_such_job(run_id: str, place: str, ids: Sequence[str]) -> UsageError:
    """Return the error for a run id that the store does not have, with the nearest it has."""
    if not ids:
        return UsageError(f"there is no job {run_id!r} in {place}: it has none")
    nearest = difflib.get_close_matches(run_id, ids, n=3, cutoff=0.4)
    if nearest:
        return UsageError(f"there is no job {run_id!r} in {place}; the nearest: {listed(nearest)}")
    return UsageError(f"there is no job {run_id!r} in {place}; it has {listed(ids, 3)}")


def no_job(rendezvous: RendezvousSettings) -> UsageError:
    """Return the error for an etcd without any job below its prefix."""
    place = _etcd_place(rendezvous)
    return UsageError(
        f"there is no job in {place} below the prefix {place.prefix!r} "
        f"(--rdzv-conf etcd_prefix=PREFIX names another)"
    )


def _etcd_place(rendezvous: RendezvousSettings) -> EtcdCluster:
    return dataclasses.replace(rendezvous.etcd, endpoints=rendezvous.endpoints)


def _host_identity(rendezvous: RendezvousSettings) -> tuple[str, tuple[str, int]]:
    """Return the run id of the store at the endpoint, and where the store itself is."""
    from elaunch.store.tcp import client

    host, port = rendezvous.endpoints[0]
    said = client.identify(host, port, min(OPEN_TIMEOUT_S, rendezvous.connect_timeout))
    if said is None:
        raise StoreUnreachable(f"what answers at {host_port(host, port)} is no store of elaunch")
    return str(said["run_id"]), (host, said.get("store", port))
