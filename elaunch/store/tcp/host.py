"""The contents of a hosted store, in the memory of the agent that hosts it.

=============  =====================================================================================
plan           the newest version, and since which version its nodes are the same
members        each one's value, and its lease
leadership     of this agent, as long as its entry is there
shared         one value: the host's own, or the first that was offered
=============  =====================================================================================

Two sides use it under one lock, ``changed``: the server's thread for the agents that are connected
(elaunch.store.tcp.server), and the host's own agent by calls.

An entry is gone when it was not renewed for its ``ttl`` by the clock of :meth:`HostedJob.tick`.
That clock counts at most STEP of the shortest ``ttl`` at a time, so that the host, after it was
frozen itself, does not take everybody for dead: what had come by then is read first.

Without a secret any process that reaches the port can enrol, one entry for each connection, and
renew, replace and withdraw what others have enrolled. Only the host's own agent writes the plan.
Records are authenticated by those who read them (elaunch.rendezvous).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from elaunch.errors import LeaseLost, StoreClosed
from elaunch.store.protocol import Change, Post
from elaunch.store.tcp import messages
from elaunch.store.tcp.messages import (
    EnrolEntry,
    PutEntry,
    ReadMembers,
    ReadPlan,
    ReadShared,
    RenewEntry,
    Request,
    SentPost,
    WithdrawEntry,
)

STEP: Final = 0.4
"""Part of the shortest ``ttl`` that the clock counts at most, however long the host slept."""
STEPS: Final = (0.04, 2.0)
"""The shortest and the longest such time, in seconds."""
MOST_ENTRIES: Final = 20_000
"""Entries of members; more are refused."""
SHORT_ENTRY: Final = 2048
"""Bytes that an entry may always have: an agent's record has some hundred."""
MOST_BYTES: Final = 20 * 1024 * 1024
"""Bytes of all entries, above which none is longer than that. So all fit into one answer."""
MOST_GONE: Final = 100_000
"""Names of members that have gone which are remembered; they are not used again."""
HERE: Final = math.inf
"""The number of the host's own agent among those that write: nobody comes after it."""


class MemberEntries:
    """Entries by name and the changes that readers have not seen; its owner holds a lock."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.size = 0
        """Bytes of all values."""
        self._gone: dict[str, None] = {}
        self._unseen: dict[object, dict[tuple[str, str], Change]] = {}

    def knows(self, name: str) -> bool:
        """Return whether ``name`` is or was a member."""
        return name in self.values or name in self._gone

    def put(self, name: str, value: bytes) -> None:
        """Write an entry."""
        self.size += len(value) - len(self.values.get(name, b""))
        self.values[name] = value
        self._note(Change(name, value, "put"))

    def drop(self, name: str, cause: Literal["left", "expired"]) -> None:
        """Take an entry off for good."""
        self.size -= len(self.values.pop(name))
        self._gone[name] = None
        if len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]
        self._note(Change(name, None, cause))

    def read(self, reader: object) -> list[Change]:
        """Return what ``reader`` has not seen: at its first call, every entry that is there."""
        unseen = self._unseen.get(reader)
        self._unseen[reader] = {}
        if unseen is None:
            return [Change(name, value, "put") for name, value in self.values.items()]
        return list(unseen.values())

    def forget(self, reader: object) -> None:
        """Keep no more changes for ``reader``; its next call is a first one."""
        self._unseen.pop(reader, None)

    def _note(self, change: Change) -> None:
        for unseen in self._unseen.values():  # of what was written twice, the newest
            unseen[change.name, change.cause] = change


@dataclass(slots=True)
class HostedLease:
    """One entry's lease; ``writer`` is the newest connection that has written it."""

    owner: bytes
    ttl: float
    renewed: float
    heartbeat: bytes
    writer: float


class HostedJob:
    """The contents of a store; ``shared`` is there before anybody can offer another."""

    def __init__(self, shared: bytes = b"") -> None:
        self.changed = threading.Condition()
        self.closed = False
        self.post = SentPost(0, 0, b"", b"")
        """The newest as it is sent; the version 0 is none."""
        self.heartbeats: dict[bytes, HostedLease] = {}
        """By the frame that renews each."""
        self.wake: Callable[[], None] = lambda: None
        """Has the server's thread look at the post; must not block."""
        self._entries = MemberEntries()
        self._leases: dict[str, HostedLease] = {}
        self._writers: dict[float, str] = {}  # the entry that each connection has written
        self._leader = ""
        self._nodes = 0, b"", b""  # since which version, the newest nodes, and those packed
        self._shared = shared
        self._now = 0.0  # the clock that does not count what the host slept through
        self._looked = time.monotonic()
        self._shortest = self._expires_at = math.inf

    # ── the host's own agent ─────────────────────────────────────────────────────────────────────

    def ask(self, request: Request) -> Any:
        """Return the answer to a request of the host's own agent."""
        with self.changed:
            self._check()
            self.tick()
            return self.serve(request, HERE)

    def latest(self) -> Post | None:
        """Return the newest post, or None."""
        return self.follow(0, 0.0)

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait for a post newer than ``after``; None after ``timeout`` seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.post.version > after, timeout)
            self._check()
            post, nodes = self.post, self._nodes[1]
        found = Post(post.version, post.value, nodes if post.since else b"")
        return found if found.version > after else None

    def publish(self, version: int, value: bytes, nodes: bytes) -> bool:
        """Write the next version of the plan, if the host's own agent leads."""
        with self.changed:
            self._check()
            if self._leader not in self._leases or version != self.post.version + 1:
                return False
            if nodes and nodes != self._nodes[1]:
                self._nodes = version, nodes, messages.packed(nodes)
            since, _, packed = self._nodes if nodes else (0, b"", b"")
            self.post = SentPost(version, since, value, packed)
            self.changed.notify_all()
        self.wake()
        return True

    def lead(self, name: str) -> None:
        """Give the leadership to the host's own entry; LeaseLost if that is gone."""
        with self.changed:
            self._check()
            if name not in self._leases:
                raise LeaseLost(f"{name} is no member any more")
            if self._leader != name:
                self._entries.forget(self._leader)
                self._leader = name

    def changes(self, name: str, timeout: float) -> Sequence[Change]:
        """Wait for changes; the first call of each leadership returns every entry."""
        until = time.monotonic() + timeout
        with self.changed:
            while True:
                self._check()
                if self._leader != name or name not in self._leases:
                    raise LeaseLost(f"{name} does not lead (any more)")
                found = self._entries.read(name)
                left = until - time.monotonic()
                if found or left <= 0:
                    return found
                self.changed.wait(left)

    def close(self) -> None:
        """Wake calls that wait; they and later ones raise StoreClosed."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _check(self) -> None:
        if self.closed:
            raise StoreClosed("the store was closed")

    # ── the server; it holds ``changed`` ─────────────────────────────────────────────────────────

    def tick(self) -> float:
        """Let the clock go on, and return it."""
        now = time.monotonic()
        self._now += min(now - self._looked, self._step())
        self._looked = now
        return self._now

    def expire(self) -> float:
        """Remove what was not renewed; return the seconds until the next :meth:`tick`."""
        if self._now >= self._expires_at:
            for name, lease in list(self._leases.items()):
                if self._now - lease.renewed >= lease.ttl:
                    self._drop(name, "expired")
            left = self._leases.values()
            self._expires_at = min((one.renewed + one.ttl for one in left), default=math.inf)
            self._shortest = min((one.ttl for one in left), default=math.inf)
        return max(0.001, min(self._expires_at - self._now, self._step() / 2))

    def serve(self, request: Request, writer: float) -> object:
        """Return the answer to a request; ``writer`` is the later, the newer its connection is."""
        match request:
            case EnrolEntry():
                return self._enrol(request, writer)
            case PutEntry(name, value):
                return self._put(name, value, writer)
            case WithdrawEntry(name):
                return name in self._leases and self._drop(name, "left")
            case ReadMembers():
                values, now = self._entries.values, self._now
                return {n: (now - one.renewed, values[n]) for n, one in self._leases.items()}
            case ReadShared(offer):
                self._shared = self._shared or offer
                return self._shared
            case ReadPlan(after):
                return self.post if self.post.version > after else SentPost(0, 0, b"", b"")
            case RenewEntry(name):
                return self._renew(name)
        raise ValueError(f"{type(request).__name__} is not asked of what a store holds")

    def _enrol(self, new: EnrolEntry, writer: float) -> bool:
        lease = self._leases.get(new.name)
        if lease is not None:  # an answer that was lost, or another agent's name
            return lease.owner == new.owner and self._put(new.name, new.value, writer)
        if self._entries.knows(new.name) or len(self._leases) >= MOST_ENTRIES:
            return False
        if not self._may_write(new.name, new.value, writer):
            return False
        heartbeat = messages.frame(messages.RenewEntry(new.name))
        lease = HostedLease(new.owner, new.ttl, self._now, heartbeat, writer)
        self._leases[new.name] = self.heartbeats[heartbeat] = lease
        self._expires_at = min(self._expires_at, self._now + new.ttl)
        self._shortest = min(self._shortest, new.ttl)
        self._entries.put(new.name, new.value)
        self.changed.notify_all()
        return True

    def _put(self, name: str, value: bytes, writer: float) -> bool:
        lease = self._leases.get(name)
        if lease is None or writer < lease.writer:  # what an earlier connection has left behind
            return False
        if not self._may_write(name, value, writer):
            return False
        lease.writer, lease.renewed = writer, self._now
        self._entries.put(name, value)
        self.changed.notify_all()
        return True

    def _may_write(self, name: str, value: bytes, writer: float) -> bool:
        """Return whether a connection may write an entry, which is its only one then."""
        before = len(self._entries.values.get(name, b""))
        if len(value) > max(before, SHORT_ENTRY) and self._entries.size > MOST_BYTES:
            return False
        if writer != HERE and self._writers.get(writer, name) != name:
            return False
        if (lease := self._leases.get(name)) is not None:
            self._writers.pop(lease.writer, None)
        self._writers[writer] = name
        return True

    def _renew(self, name: str) -> bool:
        lease = self._leases.get(name)
        if lease is not None:
            lease.renewed = self._now
        return lease is not None

    def _drop(self, name: str, cause: Literal["left", "expired"]) -> bool:
        lease = self._leases.pop(name)
        del self.heartbeats[lease.heartbeat]
        self._writers.pop(lease.writer, None)
        self._entries.drop(name, cause)
        self.changed.notify_all()
        return True

    def _step(self) -> float:
        return min(max(self._shortest * STEP, STEPS[0]), STEPS[1])
