"""The members and the plan in etcd, as one job's agents read, watch and write them.

A member has a key under the lease of its agent. An entry that is withdrawn is first overwritten by
``LEFT``, under the same lease. So a reader can distinguish it from one that expired: etcd reports
no more than that a key is gone.

The value of the plan's key begins with the version of the post; another key has the plan's nodes.
The version is in the value, not etcd's own count of writes, because ``clear`` writes the key once
more, with a lease. Where the nodes have changed, they are written in one transaction with the post:
a watch on both keys gets both at once, and a read of both is of one moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from elaunch.errors import LeaseLost, StoreUnreachable
from elaunch.store.etcd.calls import Transactions
from elaunch.store.etcd.cluster import Keys, end_of
from elaunch.store.etcd.connection import Member, Metadata
from elaunch.store.etcd.watch import Watch, Watcher
from elaunch.store.protocol import Change, Lease, Post

LEFT = b"\0left"
_AGES_AT_ONCE = 64
_LOOK_AGAIN = 5.0
"""Seconds until an agent that etcd does not let in looks again."""


class EtcdMembers:
    """Reads the entries of all agents and waits for their changes.

    Args:
        txns: the connection.
        keys: of the job.
        watcher: where the keys are watched, once a call waits.
        news: the condition that ``watcher`` notifies.
        leads: whether this agent leads under a name; ``news`` is notified when it ceases to.
    """

    def __init__(
        self,
        txns: Transactions,
        keys: Keys,
        watcher: Watcher,
        news: threading.Condition,
        *,
        leads: Callable[[str], bool],
    ) -> None:
        self._txns = txns
        self._keys = keys
        self._watcher = watcher
        self._news = news
        self._leads = leads
        self._begin = threading.Lock()
        self._watch: Watch | None = None
        self._known: dict[str, int] = {}  # name -> revision that was last returned of it
        self._changes: list[Change] = []

    def entries(self) -> Mapping[str, Lease]:
        """Return every entry with its age, as far as it is to be had; raises as Calls.ask."""
        kvs, _ = self._txns.read_all(self._keys.agents)
        entries = [kv for kv in kvs if kv.value != LEFT]
        ages = self._ages([kv.lease for kv in entries])
        return {self._keys.name_of(kv.key): Lease(kv.value, ages.get(kv.lease)) for kv in entries}

    def changes(self, name: str, timeout: float) -> Sequence[Change]:
        """Wait for changes; raises as Calls.ask, StoreClosed, and LeaseLost without leadership."""
        began = time.monotonic()
        self._txns.calls.check_open()
        self._begin_to_watch(name)

        def unseen() -> Sequence[Change] | None:
            self._check_leads(name)
            changes, self._changes = self._changes, []
            return changes or None

        return self._watcher.wait(unseen, began, timeout) or ()

    def forget(self) -> None:
        """Stop watching; the next call of ``changes`` returns every entry again."""
        with self._begin:
            if self._watch is None:
                return
            self._watcher.remove(self._watch)
            self._watch = None
            with self._news:
                self._known, self._changes = {}, []

    def _check_leads(self, name: str) -> None:
        if not self._leads(name):
            raise LeaseLost(f"{name} does not lead (any more)")

    def _begin_to_watch(self, name: str) -> None:
        """Watch for ``name``, which leads."""
        with self._begin:
            self._check_leads(name)
            if self._watch is not None:
                return
            start = self._keys.agents
            watch = Watch(start, end_of(start), 0, self._take, self._read)
            watch.revision = watch.reread() + 1
            self._watcher.add(watch)
            self._watch = watch

    def _read(self) -> int:
        """Read all entries and note what is different from what was returned."""
        kvs, revision = self._txns.read_all(self._keys.agents)
        with self._news:
            gone = set(self._known)
            for kv in kvs:
                gone.discard(self._keys.name_of(kv.key))
                self._put(kv)
            for name in sorted(gone):
                self._gone(name, "expired")
        return revision

    def _take(self, events: Sequence[Any]) -> None:
        with self._news:
            for event in events:
                if event.type == event.DELETE:
                    self._gone(self._keys.name_of(event.kv.key), "expired")
                else:
                    self._put(event.kv)

    def _put(self, kv: Any) -> None:
        name = self._keys.name_of(kv.key)
        if kv.value == LEFT:
            self._gone(name, "left")
        elif self._known.get(name, 0) < kv.mod_revision:
            self._known[name] = kv.mod_revision
            self._changes.append(Change(name, kv.value, "put"))

    def _gone(self, name: str, cause: Any) -> None:
        if self._known.pop(name, None) is not None:
            self._changes.append(Change(name, None, cause))

    def _ages(self, leases: Sequence[int]) -> dict[int, float]:
        """Return for each lease how long ago it was renewed, to half a second.

        etcd reports what is left of a lease in whole seconds. A lease without an answer in time is
        left out: the ages are for people to look at.
        """
        calls = self._txns.calls
        member, metadata = calls.here()
        until = time.monotonic() + calls.cluster.call_timeout
        request = calls.loaded.rpc.LeaseTimeToLiveRequest
        ages: dict[int, float] = {}
        for first in range(0, len(leases), _AGES_AT_ONCE):
            seconds = until - time.monotonic()
            if seconds <= 0:
                break
            asked = [
                member.begin("Lease", "LeaseTimeToLive", request(ID=lease), seconds, metadata)
                for lease in leases[first : first + _AGES_AT_ONCE]
            ]
            for future in asked:
                try:
                    answer = future.result()
                except calls.loaded.grpc.RpcError:
                    continue
                if answer.TTL >= 0:
                    ages[answer.ID] = max(0.0, answer.grantedTTL - answer.TTL - 0.5)
        return ages


class EtcdPlan:
    """Reads, waits for, and writes the posts of one job.

    Args:
        txns: the connection.
        keys: of the job.
        watcher: where the key is watched, once a call waits.
        news: the condition that ``watcher`` notifies.
    """

    def __init__(
        self, txns: Transactions, keys: Keys, watcher: Watcher, news: threading.Condition
    ) -> None:
        self._txns = txns
        self._key, self._listed = keys.plan, keys.nodes
        self._nodes = b""
        self._watcher = watcher
        self._news = news
        self._begin = threading.Lock()
        self._watch: Watch | None = None
        self._newest: Post | None = None
        self._look_at = time.monotonic() + txns.calls.cluster.look_period
        self._replaced = False  # the plan was removed: whatever is posted next is news
        self._unsure: Post | None = None  # a post whose answer was lost

    def publish(
        self, version: int, value: bytes, nodes: bytes, leadership: tuple[bytes, int]
    ) -> bool:
        """Write a post if it is the next one and we lead; raises as Calls.ask.

        Args:
            version, value, nodes: the post.
            leadership: the key that we lead with, and its create revision.
        """
        post = Post(version, value, nodes)
        kv, found, listed = self._look()
        if version != (found.version if found else 0) + 1:
            return found == post and self._unsure == post
        txns = self._txns
        self._unsure = post
        modified = kv.mod_revision if kv is not None else 0
        there = not nodes if listed is None else listed.value == nodes and not listed.lease
        answer = txns.send(
            [txns.modified(self._key, modified), txns.created(*leadership)],
            [
                *([] if there else [txns.put(self._listed, nodes)]),
                txns.put(self._key, b"%d\n%b" % (version, value)),
            ],
            [txns.get(self._key), txns.get(leadership[0])],
        )
        self._unsure = None
        if answer.done:
            return True
        # Perhaps it was done, and the answer was lost. If we still lead, nobody else has written.
        plans, leaders = answer.found
        leading = bool(leaders) and leaders[0].create_revision == leadership[1]
        return leading and bool(plans) and _post(plans[0], nodes) == post

    def latest(self) -> Post | None:
        """Return the newest post; raises as Calls.ask."""
        return self._look()[1]

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait for a post newer than ``after``; raises as Calls.ask, and StoreClosed.

        Raises StoreDenied soon after etcd has ceased to let us in: its streams go on all the same.
        """
        until = time.monotonic() + timeout
        self._txns.calls.check_open()
        self._begin_to_watch()

        def newer() -> Post | None:
            newest = self._newest
            if newest is None or not (newest.version > after or self._replaced):
                return None
            self._replaced = False
            return newest

        while True:
            now = time.monotonic()
            found = self._watcher.wait(newer, now, min(until, self._look_at) - now)
            if found is not None:
                return found
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + _LOOK_AGAIN  # if it raises
                self._check_let_in()
                self._look_at = now + self._txns.calls.cluster.look_period
            if now >= until:
                return None

    def _check_let_in(self) -> None:
        """Raise StoreDenied if etcd does not let us in; one member's word is enough."""
        calls = self._txns.calls
        request = calls.loaded.rpc.RangeRequest(key=self._key, count_only=True, serializable=True)

        def one(member: Member, seconds: float, metadata: Metadata) -> None:
            member.call("KV", "Range", request, seconds, metadata)

        with suppress(StoreUnreachable):  # the watch notices that by itself
            calls.attempt(one, calls.cluster.call_timeout, calls.cluster.call_timeout)

    def _look(self) -> tuple[Any | None, Post | None, Any | None]:
        """Return what is at the plan's key, the post, and what is at the key of its nodes."""
        return self._found(self._txns.read_all(self._key)[0])

    def _found(self, kvs: Sequence[Any]) -> tuple[Any | None, Post | None, Any | None]:
        there = {kv.key: kv for kv in kvs}
        plan, listed = there.get(self._key), there.get(self._listed)
        return plan, _post(plan, b"" if listed is None else listed.value), listed

    def _begin_to_watch(self) -> None:
        with self._begin:
            if self._watch is not None:
                return
            watch = Watch(self._key, end_of(self._key), 0, self._take, self._read)
            watch.revision = watch.reread() + 1
            self._watcher.add(watch)
            self._watch = watch

    def _read(self) -> int:
        kvs, revision = self._txns.read_all(self._key)
        _, post, listed = self._found(kvs)
        self._nodes = b"" if listed is None else listed.value
        self._show(post)
        return revision

    def _take(self, events: Sequence[Any]) -> None:
        for event in events:  # of the nodes before the post that they belong to
            gone = event.type == event.DELETE
            if event.kv.key == self._listed:
                self._nodes = b"" if gone else event.kv.value
            elif event.kv.key == self._key:
                self._show(None if gone else _post(event.kv, self._nodes))

    def _show(self, post: Post | None) -> None:
        with self._news:
            if self._newest is not None and (post is None or post.version < self._newest.version):
                self._replaced = True
            self._newest = post


LONGEST_VERSION = 18
"""Digits of a version of the plan."""


def _post(kv: Any | None, nodes: bytes) -> Post | None:
    """Return the post in a key and value of etcd, of version 0 if elaunch has not written it."""
    if kv is None:
        return None
    key, (version, _, value) = kv.key.decode(), kv.value.partition(b"\n")
    if not version.isdigit() or len(version) > LONGEST_VERSION:
        return Post(0, kv.value, key=key)
    return Post(int(version), value, nodes, key)
