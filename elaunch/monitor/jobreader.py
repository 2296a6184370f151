"""Readings of whole jobs, from the store in which their agents meet.

A reader enrols nowhere, leads nothing and writes nothing.

==========  ===================================  =============================================
backend     which jobs are there                 whose store it is
==========  ===================================  =============================================
etcd        the run ids below the prefix         of all of them, side by side
c10d        the one of the TCPStore              what the process that hosts it wrote (identity)
static      the same, at the address of node 0   the same; it may name another port
==========  ===================================  =============================================

A :class:`JobReader` keeps its connection. While it watches, a store that does not answer is not the
end: the last view stays, marked as stale, for ``store_timeout`` seconds, as long as the agents
themselves would go on without the store.

:class:`JobAgents` asks the agents at the addresses that the store has, as they ask each other: the
job's incarnation id, of which their key is made, is in the store (elaunch.agent.peers).
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from elaunch import atonce
from elaunch.agent.peers.peers import Peers
from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import StoreDenied, StoreError, StoreUnreachable, UsageError
from elaunch.monitor.document import job_document, jobs_document
from elaunch.monitor.jobpage import job_page, jobs_page
from elaunch.monitor.jobview import JobView, PresentAgent, StoredJob, unreadable, view_job
from elaunch.monitor.watch import Read, WatchReading, pause
from elaunch.rendezvous import munge, records
from elaunch.rendezvous.munge import MungeError
from elaunch.rendezvous.plan import Node, Plan
from elaunch.rendezvous.records import RecordError
from elaunch.store.etcd.cluster import EtcdCluster
from elaunch.store.protocol import Lease, Post, Store
from elaunch.text import host_port, listed

OPEN_TIMEOUT_S: Final = 5.0
DIAL_S: Final = 5.0
ASKED_AT_ONCE: Final = 32
FRESH_S: Final = 1.0
"""Seconds for which a reading of the store is new enough to ask a job's agents by."""
LOOKS: Final = 3
# A blocking wait is cut into slices so that Ctrl-C is quick.
SLICE_S = 0.5


class JobReader:
    """Reads one job again and again; to be closed."""

    def __init__(
        self,
        rendezvous: RendezvousSettings,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rendezvous = rendezvous
        self._run_id = run_id
        self._clock = clock
        self._store: Store | None = None
        self._secret: bytes | None = None
        self._view: JobView | None = None
        self._answered_at = clock()

    def read(self, last: WatchReading | None) -> WatchReading:
        """Read the job now.

        Raises:
            UsageError: the store does not know the job, at the first reading.
            StoreUnreachable: nobody answers; after the first reading only ``store_timeout``
                seconds later.
            StoreError: the store does not let us in, or its plan cannot be read.
        """
        try:
            self._view = self._look()
            self._answered_at = self._clock()
        except StoreUnreachable as exc:
            self.close()
            silent = self._clock() - self._answered_at
            if self._view is None or silent >= self._rendezvous.store_timeout:
                raise
            self._view = replace(self._view, stale=str(exc))
        view = self._view
        return WatchReading(job_page(view), job_document(view), _gist(view), view.live)

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or as soon as the coordinator publishes a new plan."""
        until = self._clock() + seconds
        known = self._view.version if self._view else 0
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

    def _look(self) -> JobView:
        if self._store is None:
            store = open_for_reading(self._rendezvous, self._run_id)
            try:
                self._secret = _signing(self._rendezvous, self._run_id, store)
            except StoreError:
                store.close()
                raise
            self._store = store
        place = self._store.name
        found = look(self._store, self._secret)
        if self._rendezvous.backend == "etcd" and found.empty:
            # A TCPStore names its job itself; etcd has the keys of a job or has none.
            if self._view is None:
                raise no_such_job(self._run_id, place, run_ids(self._rendezvous))
            problem = "nothing of the job is left in the store"
            return unreadable(self._run_id, place, problem, time.time())
        return view_job(self._run_id, place, found, time.time())


class JobAgents:
    """The agents of a job, by the store where they meet; to be closed.

    Nothing changes the job, or is noted in the store. Raises StoreError and UsageError as
    ``JobReader.read`` does.
    """

    def __init__(self, rendezvous: RendezvousSettings, run_id: str) -> None:
        self.name = run_id
        self._store = open_for_reading(rendezvous, run_id)
        try:
            self._secret = secret_of(rendezvous, run_id, self._store)
            self.view = self._look()
        except BaseException:
            self._store.close()
            raise
        self._peers = Peers("", run_id, self._secret)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the newest round, by node rank."""
        return () if self.view.plan is None else tuple(self.view.plan.nodes)

    @property
    def live(self) -> bool:
        """Whether the job goes on; a store that is gone, or has nothing of it, went with it."""
        try:
            self._renew()
        except (StoreError, UsageError):
            return False
        return self.view.live

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """Return what each of its ``nodes`` (None: all) answers to a request, or ``error``.

        Raises UsageError where the job is over, StoreError where the store does not answer.
        """
        self._renew()
        plan = self.view.plan
        if plan is None or not self.view.live:
            what = "has begun no round yet" if plan is None else "is over, and its agents are gone"
            raise UsageError(f"job {self.name} {what}: `elaunch status` with these flags shows it")
        self._peers.on_plan(plan, "")
        wanted = request.get("nodes")
        asked = [node for node in range(len(plan.nodes)) if wanted is None or node in wanted]
        found: dict[int, dict[str, Any]] = {
            node: {"error": "it has not answered in time"} for node in asked
        }
        until = time.monotonic() + seconds

        def one(node: int) -> None:
            found[node] = self._peers.view(node, request, until, DIAL_S)

        calls: list[Callable[[], None]] = [partial(one, node) for node in asked]
        atonce.within(
            seconds, lambda: atonce.at_once(calls, ASKED_AT_ONCE, "ask node"), "ask nodes"
        )
        return dict(found)

    def _renew(self) -> None:
        if time.time() - self.view.read_at > FRESH_S:
            self.view = self._look()

    def _look(self) -> JobView:
        found = look(self._store, records.key_of(self._secret, self.name))
        if found.empty:
            raise UsageError(f"nothing of the job {self.name} is left in {self._store.name}")
        return view_job(self.name, self._store.name, found, time.time())


def jobs_reader(rendezvous: RendezvousSettings, ids: Sequence[str]) -> Read:
    """Return what reads all jobs of an etcd; ``ids`` are those that are there to begin with."""

    def read(last: WatchReading | None) -> WatchReading:
        known = ids if last is None else run_ids(rendezvous)
        views = [view for run_id in sorted(known) if (view := _listed(rendezvous, run_id))]
        gist = tuple(_gist(view) for view in views)
        live = any(view.live for view in views)
        return WatchReading(jobs_page(views), jobs_document(views), gist, live)

    return read


def _listed(rendezvous: RendezvousSettings, run_id: str) -> JobView | None:
    """Return a job of a list; None where its last keys expired since the list was read."""
    store = open_for_reading(rendezvous, run_id)
    try:
        found = look(store, _signing(rendezvous, run_id, store))
        return None if found.empty else view_job(run_id, store.name, found, time.time())
    except (StoreUnreachable, StoreDenied):
        raise
    except StoreError as exc:
        return unreadable(run_id, store.name, str(exc), time.time())
    finally:
        store.close()


def _signing(rendezvous: RendezvousSettings, run_id: str, store: Store) -> bytes | None:
    """Return what signs the records of a job; raises as :func:`secret_of`."""
    return records.key_of(secret_of(rendezvous, run_id, store), run_id)


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


def _gist(view: JobView) -> object:
    nodes = tuple((node.name, node.state, node.note) for node in view.everyone)
    return view.run_id, view.plan, nodes, view.refused, view.problem, view.stale


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

        return etcd.connect(_etcd_place(rendezvous), run_id, deadline=_patience(rendezvous))
    from elaunch.store.tcp import client

    its_run_id, (host, port) = _host_identity(rendezvous)
    if its_run_id != run_id:
        raise no_such_job(run_id, f"the TCPStore at {host_port(host, port)}", (its_run_id,))
    key = records.key_of(rendezvous.secret, run_id)
    store = client.connect(host, port, run_id, deadline=_patience(rendezvous), key=key)
    if key is None:  # it may be one that is read from the store
        try:
            store.prove(_signing(rendezvous, run_id, store))
        except StoreError:
            store.close()
            raise
    return store


def look(store: Store, secret: bytes | None) -> StoredJob:
    """Read plan and members once; ``secret`` is records.key_of the job's.

    Raises:
        RecordError: the plan cannot be read, or no agent's record where there is no plan: it is
            malformed, of another version, or signed with another secret.
        StoreError: the store does not answer.
    """
    post, leases = _at_one_moment(store)
    plan = _plan(post, secret)
    members: dict[str, PresentAgent] = {}
    refused: dict[str, RecordError] = {}
    for name, lease in leases.items():
        try:
            members[name] = PresentAgent(records.decode_agent(lease.value, secret, name), lease.age)
        except RecordError as exc:
            refused[name] = exc
    if refused and not members and plan is None:
        raise next(iter(refused.values()))
    problems = {name: str(problem) for name, problem in refused.items()}
    return StoredJob(plan, post.version if post else 0, members, problems)


def _plan(post: Post | None, secret: bytes | None) -> Plan | None:
    return records.decode_plan(post, secret, "the coordinator") if post else None


def _at_one_moment(store: Store) -> tuple[Post | None, Mapping[str, Lease]]:
    """Return plan and members as they were together, or nearly where plans follow each other.

    A node of a plan was a member before; after it, too, unless it went or a newer plan came.
    """
    post = store.latest()
    for _ in range(LOOKS):
        leases = store.members()
        newer = store.latest()
        if newer == post:
            break
        post = newer
    return post, leases


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
    return EtcdCluster(endpoints=rendezvous.endpoints, **vars(rendezvous.etcd))


def _host_identity(rendezvous: RendezvousSettings) -> tuple[str, tuple[str, int]]:
    """Return the run id of the store at the endpoint, and where the store itself is."""
    from elaunch.store.tcp import client

    host, port = rendezvous.endpoints[0]
    said = client.identify(host, port, _patience(rendezvous))
    if said is None:
        raise StoreUnreachable(f"what answers at {host_port(host, port)} is no store of elaunch")
    return str(said["run_id"]), (host, said.get("store", port))


def _patience(rendezvous: RendezvousSettings) -> float:
    """Return for how many seconds to try; an agent may wait for its store, a person does not."""
    return min(OPEN_TIMEOUT_S, rendezvous.connect_timeout)
