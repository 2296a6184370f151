"""A store in the memory of one process: what the contract of all stores is written against.

============  ====================================================================================
MemoryHub     what one job's agents share; the clock that judges who is alive is an argument
MemoryStore   one agent's view of it (elaunch.store.protocol)
============  ====================================================================================

Nothing runs in the background. Every call first removes the entries whose time is over, and a call
that blocks wakes when the next entry's time is over. With a clock that is not the machine's,
``tick`` wakes those that block when it has moved.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from elaunch.errors import LeaseLost, StoreClosed
from elaunch.store.protocol import Change, Lease, Post
from elaunch.store.tcp.host import MemberEntries

Found = TypeVar("Found")


@dataclass
class _MemoryLease:
    ttl: float
    renewed: float


class MemoryHub:
    """What the agents of one job share.

    Args:
        clock: seconds that only grow; entries expire by it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.post: Post | None = None
        self.shared = b""
        self.members = MemberEntries()
        self.leases: dict[str, _MemoryLease] = {}
        self.leader: str | None = None

    def store(self) -> MemoryStore:
        """Return the store of one more agent."""
        return MemoryStore(self)

    def tick(self) -> None:
        """Have those that block look at the clock; for a clock that is not the machine's."""
        with self.changed:
            self.changed.notify_all()

    def expire(self) -> float:
        """Remove entries not renewed in time, the longest overdue first; return the time."""
        now = self.clock()
        over = [(lease.renewed + lease.ttl, name) for name, lease in self.leases.items()]
        for due, name in sorted(over):
            if due <= now:
                self.drop(name, "expired")
        return now

    def next_due(self) -> float:
        """Return when the next entry expires if it is not renewed."""
        return min((lease.renewed + lease.ttl for lease in self.leases.values()), default=math.inf)

    def drop(self, name: str, cause: Literal["left", "expired"]) -> None:
        """Remove an entry, and its leadership with it."""
        del self.leases[name]
        self.members.drop(name, cause)
        if self.leader == name:
            self.leader = None
        self.changed.notify_all()


class MemoryStore:
    """One agent's view of a hub."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._name: str | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Where the store is, for messages."""
        return "the memory of this process"

    def publish(self, version: int, value: bytes, nodes: bytes = b"") -> bool:
        """Write the next version of the plan; False without leadership or with another version."""
        hub = self._hub
        with hub.changed:
            self._look()
            newest = 0 if hub.post is None else hub.post.version
            if hub.leader is None or hub.leader != self._name or version != newest + 1:
                return False
            hub.post = Post(version, value, nodes)
            hub.changed.notify_all()
            return True

    def latest(self) -> Post | None:
        """Return the newest post, or None."""
        with self._hub.changed:
            self._look()
            return self._hub.post

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait for a post newer than ``after``; None after ``timeout`` seconds."""
        hub = self._hub

        def newer() -> Post | None:
            return hub.post if hub.post is not None and hub.post.version > after else None

        return self._await(newer, timeout)

    def enrol(self, name: str, value: bytes, ttl: float) -> None:
        """Write our entry; LeaseLost if the name is or was there already.

        An earlier entry of this store is withdrawn.
        """
        hub = self._hub
        with hub.changed:
            self.withdraw()
            now = self._look()
            if hub.members.knows(name):
                raise LeaseLost(f"the name {name} is or was a member's already")
            self._name = name
            hub.leases[name] = _MemoryLease(ttl, now)
            hub.members.put(name, value)
            hub.changed.notify_all()

    def update(self, value: bytes) -> None:
        """Replace the value of our entry; LeaseLost if it is gone."""
        hub = self._hub
        with hub.changed:
            name, lease = self._enrolled()
            lease.renewed = hub.clock()
            hub.members.put(name, value)
            hub.changed.notify_all()

    def renew(self) -> None:
        """Keep our entry for another ``ttl`` seconds; LeaseLost if it is gone."""
        with self._hub.changed:
            _, lease = self._enrolled()
            lease.renewed = self._hub.clock()

    def withdraw(self) -> None:
        """Remove our entry; nothing if there is none."""
        hub = self._hub
        with hub.changed:
            self._look()
            if self._name is not None and self._name in hub.leases:
                hub.drop(self._name, "left")
            self._name = None

    def unsteady_leader(self) -> str:
        """Return "": the host judges entries by its clock."""
        return ""

    def evict(self, name: str) -> bool:
        """Return False: entries of agents that are gone expire."""
        return False

    def members(self) -> Mapping[str, Lease]:
        """Return all entries with their ages."""
        hub = self._hub
        with hub.changed:
            now = self._look()
            ages = {name: now - lease.renewed for name, lease in hub.leases.items()}
            return {name: Lease(value, ages[name]) for name, value in hub.members.values.items()}

    def changes(self, name: str, timeout: float) -> Sequence[Change]:
        """Wait for changes of the members; the first call returns every entry."""
        hub = self._hub

        def read() -> Sequence[Change] | None:
            if hub.leader != name or self._name != name:
                raise LeaseLost(f"{name} does not lead (any more)")
            return hub.members.read(self) or None

        return self._await(read, timeout) or []

    def await_leadership(self, name: str, timeout: float) -> bool:
        """Wait until we lead; LeaseLost if our entry ``name`` is gone."""
        hub = self._hub

        def taken() -> bool | None:
            if self._enrolled()[0] != name:
                raise LeaseLost(f"{name} is not this store's entry")
            if hub.leader is None:
                hub.members.forget(self)  # of an earlier leadership
                hub.leader = name
            return hub.leader == name or None

        return self._await(taken, timeout) is not None

    def shared(self, offer: bytes = b"") -> bytes:
        """Return the value that all share; ``offer`` becomes it where there is none."""
        with self._hub.changed:
            self._look()
            self._hub.shared = self._hub.shared or offer
            return self._hub.shared

    def clear(self) -> None:
        """Do nothing: what the job wrote goes with the process."""

    def close(self) -> None:
        """Wake waiting calls; our entry stays until it expires, as if this agent had died."""
        with self._hub.changed:
            self._closed = True
            self._hub.members.forget(self)
            self._hub.changed.notify_all()

    def _look(self) -> float:
        """Raise StoreClosed or return the time, at which all members are alive."""
        if self._closed:
            raise StoreClosed("the store was closed")
        return self._hub.expire()

    def _enrolled(self) -> tuple[str, _MemoryLease]:
        self._look()
        if self._name is None or self._name not in self._hub.leases:
            raise LeaseLost(f"{self._name or 'this agent'} is no member (any more)")
        return self._name, self._hub.leases[self._name]

    def _await(self, ready: Callable[[], Found | None], timeout: float) -> Found | None:
        """Wait until ``ready`` returns something; None after ``timeout`` seconds."""
        hub = self._hub
        until = hub.clock() + timeout
        with hub.changed:
            while True:
                now = self._look()
                found = ready()
                if found is not None or now >= until:
                    return found
                hub.changed.wait(max(0.0, min(until, hub.next_due()) - now))
