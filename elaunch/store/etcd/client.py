"""The store in etcd: ``connect``, and ``run_ids`` of the jobs that are there.

One store object is one agent: a connection to one member at a time (``calls``), one stream for all
that it waits for (``watch``), one stream that keeps its lease alive. Plan and members are in
``records``, our own entry, its lease and leadership in ``lease``, the keys in ``cluster``.

==========================  ========================================================================
of etcd's members           what an agent notices
==========================  ========================================================================
a minority is lost          a delay of at most a second or two; the leader's loss included
a majority is lost, or an   StoreUnreachable with ``nobody_decides``: the ports are closed, or the
election goes on            members report themselves that they have no leader
none answers                StoreUnreachable: for all we know the others go on without us
they were wiped, or         StoreReplaced, once the next answer shows it: our entry is gone, and
restored from a snapshot    this object is of no more use
==========================  ========================================================================
"""

from __future__ import annotations

import threading
import time

from elaunch.errors import StoreDenied, StoreReplaced, StoreUnreachable
from elaunch.store.etcd import imports
from elaunch.store.etcd.calls import Calls, Transactions
from elaunch.store.etcd.cluster import EtcdCluster, RevisionHistory, every_job, keys_of, run_id_of
from elaunch.store.etcd.lease import OwnLease
from elaunch.store.etcd.records import EtcdMembers, EtcdPlan
from elaunch.store.etcd.watch import Watcher
from elaunch.store.protocol import Store

_PAUSE = 0.5
_CLOSE_SECONDS = 1.0
CLEARED_SECONDS = 60
"""How long the last post stays after ``clear``, for agents that have not read it yet."""


def connect(
    cluster: EtcdCluster, run_id: str, *, deadline: float, history: RevisionHistory | None = None
) -> Store:
    """Return the store of the job ``run_id``.

    Args:
        cluster: where etcd is.
        run_id: the job's.
        deadline: seconds within which it must answer.
        history: how far this etcd had come when this agent was connected to it before.

    Raises:
        StoreReplaced: it has lost its memory since; raised once.
        StoreUnreachable: it does not; names every endpoint and why it was of no use.
        StoreDenied: it does not let us in, or we do not trust it.
        StoreError: the client cannot be loaded.
    """
    calls = Calls(cluster, imports.load(), history)
    try:
        _reach(calls, deadline)
    except BaseException:
        calls.close()
        raise
    return EtcdStore(calls, run_id)


def run_ids(cluster: EtcdCluster) -> list[str]:
    """Return the run ids of all jobs that have something in this etcd; raises as ``connect``."""
    calls = Calls(cluster, imports.load())
    try:
        kvs, _ = Transactions(calls).read_all(every_job(cluster.prefix), keys_only=True)
        return sorted({run_id_of(cluster.prefix, kv.key) for kv in kvs})
    finally:
        calls.close()


def _reach(calls: Calls, deadline: float) -> None:
    """Read something, again and again until ``deadline`` seconds are over."""
    until = time.monotonic() + deadline
    untrusted = False
    never = threading.Event()
    while True:
        try:
            Transactions(calls).read(every_job(calls.cluster.prefix))
            return
        except StoreReplaced:
            raise
        except StoreUnreachable as error:
            untrusted = False
            if time.monotonic() + _PAUSE > until:
                text = f"within {deadline:g} s {error}"
                raise StoreUnreachable(text, error.nobody_decides) from error
        except StoreDenied:
            # A member that dies while we shake hands looks like one that does not like ours.
            if untrusted or not calls.untrusted:
                raise
            untrusted = True
        never.wait(_PAUSE)


class EtcdStore:
    """The Store (elaunch.store.protocol) of one agent, or of a reader, in etcd.

    Most of its methods are those of its parts.
    """

    def __init__(self, calls: Calls, run_id: str) -> None:
        self._calls = calls
        self._news = threading.Condition()
        keys, txns = keys_of(calls.cluster.prefix, run_id), Transactions(calls)
        self._txns, self._keys = txns, keys
        self._watcher = Watcher(calls, self._news)
        calls.moved = self._watcher.move
        self._plan = EtcdPlan(txns, keys, self._watcher, self._news)
        self._own = OwnLease(txns, keys, self._watcher, self._news)
        self._members = EtcdMembers(txns, keys, self._watcher, self._news, leads=self._own.leads)
        self.latest, self.follow = self._plan.latest, self._plan.follow
        self.update, self.renew = self._own.update, self._own.renew
        self.unsteady_leader, self.evict = self._own.unsteady_leader, self._own.evict
        self.members, self.changes = self._members.entries, self._members.changes

    @property
    def name(self) -> str:
        """Where the store is, for messages."""
        return str(self._calls.cluster)

    @property
    def member(self) -> str:
        """The address of the member that answers us now."""
        return self._calls.current.address

    def publish(self, version: int, value: bytes, nodes: bytes = b"") -> bool:
        """Write ``value`` as ``version``; see Store."""
        leadership = self._own.leadership
        return leadership is not None and self._plan.publish(version, value, nodes, leadership)

    def enrol(self, name: str, value: bytes, ttl: float) -> None:
        """Write our own entry; see Store. ``ttl`` is rounded up to whole seconds."""
        self._members.forget()
        self._own.enrol(name, value, ttl)

    def await_leadership(self, name: str, timeout: float) -> bool:
        """Wait until we lead; see Store."""
        leads = self._own.await_leadership(name, timeout)
        if leads:
            self._members.forget()
        return leads

    def withdraw(self) -> None:
        """Remove our own entry; see Store."""
        self._own.withdraw()
        self._members.forget()

    def shared(self, offer: bytes = b"") -> bytes:
        """Return the value that all share, or write it; see Store."""
        txns, key = self._txns, self._keys.shared
        kv, _ = txns.read(key)
        value = b"" if kv is None else kv.value
        if not offer or (kv is not None and not kv.lease):
            return value
        unchanged = txns.modified(key, 0 if kv is None else kv.mod_revision)
        answer = txns.send([unchanged], [txns.put(key, value or offer)], [txns.get(key)])
        if answer.done:
            return value or offer
        now = answer.found[0]  # another agent's, or ours where the answer was lost
        if not now:
            raise StoreUnreachable(f"{self.name} has lost what this job's agents share")
        return bytes(now[0].value)

    def clear(self) -> None:
        """Have the plan removed in a minute, and what all share with it. See Store.

        All else goes with the agents' leases.
        """
        keys = self._keys
        self._txns.expire((keys.plan, keys.nodes, keys.shared), CLEARED_SECONDS)

    def close(self) -> None:
        """Close the connections and wake waiting calls; see Store."""
        self._calls.close()
        self._own.close()
        with self._news:
            self._news.notify_all()
        self._watcher.close(_CLOSE_SECONDS)
