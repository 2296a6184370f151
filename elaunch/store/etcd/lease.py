"""Our own entry in etcd: its lease, and with it our place in the line for leadership.

Each agent that wants to lead has a key in line, under its lease; the one with the oldest key leads.
Each waits for the one key before its own to go, so that the end of a leader wakes one agent, not
all. Once first in line, an agent stays it for as long as its key is there: a write under the
condition that the key is the same is the write of the one that leads.

A member that was frozen applies what it was sent when it wakes, long after another has done that or
something newer. So each write of the entry has the condition that the entry is what it replaces,
and what was sent to enrol under a lease that nobody uses any more is stopped by revoking the lease.

A lease is renewed over a stream that stays open: about 80 bytes both ways, where a call of its own
for each renewal would be twice that. etcd wants no token for it. So an agent whose password was
changed keeps its entry.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elaunch.errors import LeaseLost, StoreFull, StoreUnreachable
from elaunch.store.etcd.calls import Calls, Transactions, Txn
from elaunch.store.etcd.cluster import Keys
from elaunch.store.etcd.connection import EtcdStream, Member, Metadata
from elaunch.store.etcd.errors import Refusal
from elaunch.store.etcd.records import LEFT
from elaunch.store.etcd.watch import Watch, Watcher

log = logging.getLogger("elaunch")

_MOVES = 3
"""Changes of the leader, in so many lifetimes of a lease, that are no accident."""
_EXTENSION = 1.0
"""Seconds beyond its full time that each lease has under a new leader: etcd's election timeout."""
_TRIES = 8
"""Writes of ours that may be applied late, one after the other, while one update is made."""


@dataclass(frozen=True)
class _OwnEntry:
    """An entry of ours: its name and key, since which revision, its lease and that one's length."""

    name: str
    key: bytes
    created: int
    lease: int
    ttl: float


class Renewal:
    """Keeps a lease alive over a stream to any member that answers; one call at a time."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._stream: EtcdStream | None = None
        self._term = 0
        self._moves: deque[float] = deque(maxlen=_MOVES)
        self._lifetime = 0.0
        self._warned = False

    def renew(self, lease: int, seconds: float, budget: float) -> tuple[int, int]:
        """Renew the lease; return for how many seconds it holds, and the member's revision.

        It is gone where that is 0 seconds.

        Args:
            lease: its id.
            seconds: what one member has for its answer.
            budget: seconds after which no other member is tried.

        Raises:
            as Calls.ask.
        """
        request = self._calls.loaded.rpc.LeaseKeepAliveRequest(ID=lease)

        def one(member: Member, seconds: float, metadata: Metadata) -> tuple[int, int]:
            return self._at(member, request, seconds, metadata)

        with self._lock:
            return self._calls.attempt(one, seconds, budget, anonymous=True)

    def moved(self, times: int, lifetimes: int) -> bool:
        """Return whether the leader has moved so many ``times`` in the last ``lifetimes``."""
        since = time.monotonic() - lifetimes * self._lifetime
        return len(self._moves) >= times and self._moves[-times] > since

    def close(self) -> None:
        """End the stream; a renewal that waits ends with it."""
        stream = self._stream
        if stream is not None:
            stream.end()

    def _at(
        self, member: Member, request: Any, seconds: float, metadata: Metadata
    ) -> tuple[int, int]:
        stream = self._stream
        if stream is None or stream.member is not member or not stream.idle:
            stream = self._open(member, metadata)  # an answer without a request: it broke
        stream.send(request)
        answer = None
        try:
            answer = stream.receive(seconds)
        except queue.Empty:
            raise Refusal("silent", f"no answer within {seconds:.2g} s") from None
        finally:
            if answer is None:
                self._drop()
        if answer is None:
            self._calls.check_open()
            raise Refusal("failing", "the stream was ended")
        self._note_term(int(answer.header.raft_term), float(answer.TTL) + _EXTENSION)
        return int(answer.TTL), int(answer.header.revision)

    def _note_term(self, term: int, lifetime: float) -> None:
        """Warn of a leader that moves within each lifetime of a lease: then none expires."""
        if term <= self._term:  # less: a member that is behind
            return
        if self._term:
            self._moves.append(time.monotonic())
        self._term, self._lifetime = term, lifetime
        warned, self._warned = self._warned, self.moved(_MOVES, _MOVES)
        if self._warned and not warned:
            log.warning(
                "%s has changed its leader %d times in %g s: each leader renews the entries of all "
                "nodes, so a node that is lost is missed late; check its disks and network",
                self._calls.cluster,
                _MOVES,
                _MOVES * lifetime,
            )

    def _open(self, member: Member, metadata: Metadata) -> EtcdStream:
        self._drop()
        self._stream = EtcdStream(member, "Lease", "LeaseKeepAlive", metadata)
        return self._stream

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.end()
            self._stream = None


class OwnLease:
    """Writes our own entry, keeps it, and stands in line for leadership.

    Args:
        txns: the connection.
        keys: of the job.
        watcher: where the one before us in line is watched.
        news: the condition that ``watcher`` notifies.
    """

    def __init__(
        self, txns: Transactions, keys: Keys, watcher: Watcher, news: threading.Condition
    ) -> None:
        self._txns = txns
        self._keys = keys
        self._watcher = watcher
        self._news = news
        self._renewal = Renewal(txns.calls)
        self._own: _OwnEntry | None = None
        self._modified = 0  # revision of the entry as it was last written or found
        self._unconfirmed = 0  # lease of an entry of which it is not known whether it was written
        self._in_line: tuple[bytes, int] | None = None  # our key there and its create revision
        self._leads = False
        self._before: Watch | None = None
        self._before_gone = False

    @property
    def leadership(self) -> tuple[bytes, int] | None:
        """The key that we lead with and its create revision; None: we do not lead."""
        return self._in_line if self._leads else None

    def leads(self, name: str) -> bool:
        """Return whether we lead as ``name``."""
        own = self._own
        return self._leads and own is not None and own.name == name

    def enrol(self, name: str, value: bytes, ttl: float) -> None:
        """Write the entry under a new lease; raises LeaseLost if the name is taken."""
        if self._own is not None:
            raise ValueError(f"this agent is enrolled already, as {self._own.name}")
        txns, key = self._txns, self._keys.agent(name)
        lease, granted = txns.grant(math.ceil(ttl))
        self._unconfirmed = lease
        answer = txns.send([txns.created(key, 0)], [txns.put(key, value, lease)], [txns.get(key)])
        self._unconfirmed = 0
        created = answer.revision
        if not answer.done:
            found = answer.found[0]
            if not found or found[0].lease != lease:
                raise LeaseLost(f"the name {name} is or was a member's already")
            created = found[0].create_revision  # the first answer was lost
        self._modified = created
        self._own = _OwnEntry(name, key, created, lease, float(granted))

    def update(self, value: bytes) -> None:
        """Replace the entry's value; raises LeaseLost."""
        own, txns = self._enrolled(), self._txns
        for _ in range(_TRIES):
            unchanged = txns.modified(own.key, self._modified)
            write, look = txns.put(own.key, value, own.lease), txns.get(own.key)
            try:
                answer = txns.send([unchanged], [write], [look])
            except LeaseLost as error:
                raise self._lost(own) from error
            if answer.done:
                self._modified = answer.revision
                return
            found = answer.found[0][0] if answer.found[0] else None
            if found is None or found.create_revision != own.created or found.value == LEFT:
                raise self._lost(own)
            self._modified = found.mod_revision
            if found.value == value:
                return  # it was done, and the answer was lost
        raise StoreUnreachable(
            f"the entry {own.name} in {txns.calls.cluster} does not come to rest"
        )

    def renew(self) -> None:
        """Renew the lease; raises LeaseLost."""
        own, calls = self._enrolled(), self._txns.calls
        seconds = min(calls.cluster.call_timeout, max(0.3, own.ttl / 6))
        for _ in range(2):
            known = calls.history.revision
            left, revision = self._renewal.renew(own.lease, seconds, 0.4 * own.ttl)
            if left > 0 and revision >= known:
                calls.history.reached(revision)
                return
            kv, _ = self._txns.read(own.key)  # a member that is behind may not know the lease yet
            if kv is None or kv.create_revision != own.created or kv.value == LEFT:
                break
            if left > 0:
                return
        raise self._lost(own)

    def withdraw(self) -> None:
        """Remove our entry, and our key from the line."""
        own, txns = self._own, self._txns
        if own is None:
            self._revoke()
            return
        still = txns.created(own.key, own.created)
        then = [txns.put(own.key, LEFT, own.lease), txns.delete(self._keys.candidate(own.name))]
        try:
            txns.send([still], then, [])
        except LeaseLost:  # expired at this moment: it is gone, which is what was wanted
            pass
        except StoreFull:  # a removal needs no room; the others take it for lost
            with suppress(LeaseLost):
                txns.revoke(own.lease)
        self._forget(own)

    def unsteady_leader(self) -> str:
        """Return who is first in line where an agent may have been evicted; see Store.

        Each agent sees etcd's leader move at its own renewals: who evicts has seen several moves,
        and each other agent one of them at least.
        """
        if not self._renewal.moved(1, _MOVES + 1):
            return ""
        keys = self._keys
        found = self._txns.send([], [self._txns.get_first(keys.candidates)], []).found[0]
        return keys.name_of(found[0].key, keys.candidates) if found else ""

    def evict(self, name: str) -> bool:
        """Revoke the lease of ``name``; see Store."""
        line, txns = self._in_line, self._txns
        if line is None or not self._renewal.moved(_MOVES, _MOVES):
            return False
        read = [txns.get(self._keys.agent(name))]
        (found,) = txns.send([txns.created(*line)], read, []).found or ((),)
        for kv in found:
            with suppress(LeaseLost):  # it is gone already
                txns.revoke(kv.lease)
        return bool(found)

    def await_leadership(self, name: str, timeout: float) -> bool:
        """Wait until we are first in line; raises LeaseLost."""
        own, until = self._enrolled(), time.monotonic() + timeout
        if name != own.name:
            raise ValueError(
                f"{name} wants the leadership, and this agent is enrolled as {own.name}"
            )
        if self._in_line is None:
            self._get_in_line(own)
        elif self._leads:
            self._look_ahead(own)  # our key may have been removed
        while not self._leads:
            if self._before is None or self._before_gone:
                self._look_ahead(own)
            elif not self._await_turn(own, until):
                return False
        return True

    def close(self) -> None:
        """End the stream of renewals."""
        self._renewal.close()

    def _revoke(self) -> None:
        """Give up the lease of an entry that may be written yet; it expires if this fails."""
        if not self._unconfirmed:
            return
        with suppress(LeaseLost):  # it is gone already
            self._txns.revoke(self._unconfirmed)
        self._unconfirmed = 0

    def _enrolled(self) -> _OwnEntry:
        self._txns.calls.check_open()
        if self._own is None:
            raise LeaseLost(f"this agent is no member in {self._txns.calls.cluster}")
        return self._own

    def _lost(self, own: _OwnEntry) -> LeaseLost:
        self._forget(own)
        return LeaseLost(
            f"{self._txns.calls.cluster} has given up our entry {own.name}: it was not renewed for "
            f"{own.ttl:g} s, or was removed"
        )

    def _forget(self, own: _OwnEntry) -> None:
        with self._news:
            if self._own is not own:
                return
            self._own = self._in_line = None
            self._leads = False
            before, self._before = self._before, None
            self._news.notify_all()
        if before is not None:
            self._watcher.remove(before)

    def _get_in_line(self, own: _OwnEntry) -> None:
        txns, key = self._txns, self._keys.candidate(own.name)
        answer = txns.send(
            [txns.created(own.key, own.created), txns.created(key, 0)],
            [txns.get_before(self._keys.candidates), txns.put(key, b"", own.lease)],
            [txns.get(own.key), txns.get(key)],
        )
        if answer.done:
            self._in_line = key, answer.revision
            self._stand_behind(answer)
            return
        entry, found = answer.found
        if not entry or entry[0].create_revision != own.created or not found:
            raise self._lost(own)
        self._in_line = key, found[0].create_revision  # the first answer was lost

    def _await_turn(self, own: _OwnEntry, until: float) -> bool:
        """Wait until the agent before us in line may be gone; False: not by ``until``."""

        def gone() -> bool | None:
            if not self._before_gone and self._own is not own:
                raise LeaseLost(f"{own.name} has lost its entry while it waited for the leadership")
            return self._before_gone or None

        began = time.monotonic()
        return bool(self._watcher.wait(gone, began, until - began))

    def _look_ahead(self, own: _OwnEntry) -> None:
        """Find the key before ours now: none, and we lead, or one to watch."""
        line, txns = self._in_line, self._txns
        if line is None:
            raise self._lost(own)
        still = txns.created(*line)
        answer = txns.send([still], [txns.get_before(self._keys.candidates, line[1])], [])
        before, self._before, self._leads = self._before, None, False
        if before is not None:
            self._watcher.remove(before)
        if answer.done:
            self._stand_behind(answer)
        else:
            self._get_in_line(own)  # the entry may be there without our key

    def _stand_behind(self, answer: Txn) -> None:
        """Lead, or watch the key before ours, by the transaction that has read it."""
        if not answer.found[0]:
            self._leads = True
            return
        key = answer.found[0][0].key
        self._before_gone = False
        watch = Watch(key, b"", answer.revision + 1, self._take, self._reread)
        self._before = watch
        self._watcher.add(watch)

    def _take(self, events: Sequence[Any]) -> None:
        if any(event.type == event.DELETE for event in events):
            self._before_gone = True

    def _reread(self) -> int:
        self._before_gone = True  # perhaps: the waiting call looks
        return self._txns.read(self._keys.plan)[1]
