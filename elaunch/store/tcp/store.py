"""One agent's view of the store in a TCPStore; the keys are in elaunch.store.tcp.host.

An agent has two connections: one on which it waits for the plan, one for what is answered at once;
the agent that hosts has a third for the inbox. A round costs an agent four exchanges, of eight
requests: twice a plan with the wait for the next, and its record.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from elaunch.errors import LeaseLost, StoreClosed
from elaunch.store.protocol import Change, Lease, Post
from elaunch.store.tcp import wire
from elaunch.store.tcp.connection import StoreTarget, TcpConnection
from elaunch.store.tcp.host import (
    MOST_ENTRIES,
    NOTICE,
    SHARED,
    TTL,
    MembersThread,
    counter_of,
    is_name,
    left_notice,
    put_notice,
)
from elaunch.store.tcp.server import TcpServer
from elaunch.store.tcp.wire import Connection

_Found = tuple[int, bytes, int]
"""A post without its nodes: its version, its value, and since which version the nodes are there."""
SLICE = 20.0
"""Seconds of one wait for the plan; then the host is asked whether it still answers."""
KEPT = 64
"""Versions of the plan that are kept for agents that wait for one of them."""


LONGEST_AGE = 1e9
SPARSELY = 0.2
"""Seconds between two looks at a key that promises news where there is none."""
FURTHEST = 1_000_000
"""A version that is further ahead than that was not written by the host, and is passed over."""


class TcpStore:
    """One agent's store.

    Args:
        target: where it is.
        timeout: seconds for each call.
        connection: to it, open.
        server: what serves the store, torch's or a TcpServer, if it is hosted here; it ends with
            this object.
        moved: as for TcpConnection.
    """

    def __init__(
        self,
        target: StoreTarget,
        timeout: float,
        connection: Connection,
        *,
        server: object = None,
        moved: Callable[[], bool] | None = None,
    ) -> None:
        self._closed = threading.Event()
        self._target, self._timeout = target, timeout
        self._calls = TcpConnection(target, timeout, self._closed, connection, moved)
        self._waits = TcpConnection(target, timeout, self._closed, moved=moved)
        self._inbox = TcpConnection(target, timeout, self._closed)
        self._prefix = f"{target.run_id}/"
        self._following = threading.Lock()
        self._lease: tuple[str, float] | None = None
        self._leads_as: str | None = None
        self._head = self._known = 0
        self._nodes = (0, b"")  # the newest that were read or written, and since which version
        self._older = 0  # the version of the nodes before
        self._posted: Post | None = None
        self._server = server
        hosted = server is not None
        self._members = (
            MembersThread(self._inbox, self._prefix, self._closed, target.address[1][1])
            if hosted
            else None
        )

    @property
    def name(self) -> str:
        """Where the store is, for messages."""
        return self._target.name

    def publish(self, version: int, value: bytes, nodes: bytes = b"") -> bool:
        """Write the next version of the plan; False without leadership or with another version."""
        head = self._prefix + "head"
        since, old = 0, self._nodes[0]
        if nodes:
            since = old if nodes == self._nodes[1] else version
        over = [f"n/{version - KEPT}", f"b/{version - KEPT}"]
        over += [f"l/{self._older}"] if since != old else []
        # Always, since another process may have written there.
        listed = [wire.put(f"{self._prefix}l/{since}", nodes)] if nodes else []
        post = [
            *listed,
            wire.put(f"{self._prefix}n/{version}", b"%d" % since),
            wire.put(f"{self._prefix}b/{version}", value),
            wire.put(head, b"%d" % version),
            *(wire.delete(self._prefix + key) for key in over),
        ]

        def talk(line: Connection, until: float) -> bool:
            if not self._leads():
                return False
            found = _version(*line.values([head], until))
            if self._head < found < self._head + FURTHEST:
                self._head = found  # another process's: its readers are to read ours after it
            if version != self._head + 1:
                return False
            line.send(post, until)
            for _ in over:
                line.integer(until)
            if since != old:
                self._older, self._nodes = old, (since, nodes)
            self._head, self._posted = version, Post(version, value, nodes)
            return True

        return self._calls.exchange(talk)

    def latest(self) -> Post | None:
        """Return the newest post, or None; the host's own where another process has removed it."""
        found = self._with_nodes(
            self._calls.exchange(lambda line, by: self._newer(line, by, 0, read=1))
        )
        own = self._posted
        return own if own and (found is None or found.version < own.version) else found

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait for a post newer than ``after``; None after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        self._known = max(self._known, after)
        if not self._following.acquire(blocking=False):
            found = self._calls.exchange(
                lambda line, by: self._newer(line, by, after, read=after + 1)
            )
            if found is not None or not self._following.acquire(timeout=timeout):
                return self._with_nodes(found)
        found, come = None, False
        try:
            while found is None:
                if come:  # another process has written there: not at full speed
                    self._closed.wait(min(SPARSELY, max(0.0, end - time.monotonic())))
                come, found = self._waits.exchange(
                    lambda line, by: self._next(line, by, after, end)
                )
                if found is None and time.monotonic() >= end:
                    return None
        finally:
            self._following.release()
        return self._with_nodes(found)

    def enrol(self, name: str, value: bytes, ttl: float) -> None:
        """Write our entry; LeaseLost if the name is or was there already.

        An earlier entry of this store is withdrawn.
        """
        if not is_name(name) or not TTL[0] <= ttl <= TTL[1]:
            raise ValueError(f"{name!r} with a ttl of {ttl:g} s cannot be enrolled")
        notice = _fitting(put_notice(name, ttl, value, new=True))
        self.withdraw()
        tries: list[Connection] = []

        def talk(line: Connection, until: float) -> int:
            tries.append(line)
            return self._add(line, until, name, [notice])

        self._lease = (name, ttl)
        if self._calls.exchange(talk) != 1:
            if len(tries) == 1:  # else the entry may be ours, and the next one withdraws it
                self._lease = None
            raise LeaseLost(f"the name {name} is or was a member's already")

    def update(self, value: bytes) -> None:
        """Replace the value of our entry; LeaseLost if it is gone."""
        name, ttl = self._enrolled()
        self._notify([_fitting(put_notice(name, ttl, value))])

    def renew(self) -> None:
        """Keep our entry for another ``ttl`` seconds; LeaseLost if it is gone."""
        self._notify([])

    def withdraw(self) -> None:
        """Remove our entry; nothing if there is none."""
        if self._closed.is_set():
            raise StoreClosed(f"the connection to the {self.name} was closed")
        if self._lease is None:
            return
        try:
            self._notify([left_notice(self._lease[0])])
        except LeaseLost:
            return
        finally:
            self._lease = self._leads_as = None

    def members(self) -> Mapping[str, Lease]:
        """Return all entries with their ages."""
        if self._members is not None and not self._closed.is_set():
            return self._members.leases()
        return self._calls.exchange(self._read_members)

    def changes(self, name: str, timeout: float) -> Sequence[Change]:
        """Wait for changes of the members; the first call returns all. Only the host can."""
        if self._members is None:
            raise LeaseLost(f"only the agent that hosts the {self.name} can lead")
        return self._members.changes(name, timeout)

    def await_leadership(self, name: str, timeout: float) -> bool:
        """Wait until we lead; an agent that does not host waits ``timeout`` in vain."""
        self._enrolled()
        end = time.monotonic() + timeout
        while self._members is not None and not self._closed.is_set():
            left = end - time.monotonic()
            with self._members.changed:
                if self._members.has(name):
                    self._begin(name)
                    return True
                if self._members.knows(name):
                    raise LeaseLost(f"{name} is no member any more")
                if left <= 0:
                    return False
                self._members.changed.wait(left)
        if self._closed.wait(max(0.0, timeout)):
            raise StoreClosed(f"the connection to the {self.name} was closed")
        return False

    def shared(self, offer: bytes = b"") -> bytes:
        """Return the value that all share; ``offer`` becomes it where there is none."""
        key = self._prefix + SHARED
        request = wire.compare_set(key, b"", offer) if offer else wire.get(key)
        return self._calls.exchange(lambda line, by: line.ask(request, by))

    def clear(self) -> None:
        """Do nothing: what the job wrote goes with the process that hosts it."""

    def close(self) -> None:
        """Close the connections, end the thread, and the store itself if it is hosted here."""
        self._closed.set()
        if self._members is not None:
            self._members.wake()
        for line in (self._calls, self._waits, self._inbox):
            line.cut()
        if isinstance(self._server, TcpServer):
            self._server.close()
        self._server = None

    def _begin(self, name: str) -> None:
        if self._leads_as != name and self._members is not None:
            self._members.begin(name)
        self._leads_as = name

    def _leads(self) -> bool:
        if self._members is None:
            return False
        with self._members.changed:
            return self._members.has(self._leads_as)

    def _enrolled(self) -> tuple[str, float]:
        if self._lease is None:
            raise LeaseLost("this agent is no member")
        return self._lease

    def _notify(self, notices: list[bytes]) -> None:
        """Send notices and a heartbeat; LeaseLost if the host has removed our entry."""
        name, _ = self._enrolled()
        if self._calls.exchange(lambda line, by: self._add(line, by, name, notices)) <= 0:
            raise LeaseLost(f"{name} is no member any more")

    def _add(self, line: Connection, until: float, name: str, notices: list[bytes]) -> int:
        requests = [wire.push(self._prefix + "in", notice) for notice in notices]
        line.send([*requests, wire.add(counter_of(name), 1)], until)
        return line.integer(until)

    def _next(
        self, line: Connection, until: float, after: int, end: float
    ) -> tuple[bool, _Found | None]:
        """Wait for a post newer than ``after``; whether one was announced, and what was read.

        With each read goes the wait for the version behind it. So none is missed, however long the
        agent takes until it asks for that.
        """
        if line.waits_for != self._key(after + 1):
            found = self._newer(line, until, after, read=after, waits=True)
            if found is not None:
                return True, found
        if not line.awaited(min(end, time.monotonic() + SLICE), self._timeout):
            return False, None
        until = time.monotonic() + self._timeout
        return True, self._newer(line, until, after, read=after + 1, waits=True)

    def _newer(
        self, line: Connection, until: float, after: int, *, read: int, waits: bool = False
    ) -> _Found | None:
        """Return the newest post, None if that is ``after``; ``read`` is where to look first."""
        while True:
            keys = [
                f"{self._prefix}{key}" for key in ("head", f"b/{read}", f"n/{read}", f"l/{read}")
            ]
            if line.waits_for:
                line.awaited(0.0, self._timeout)
            if waits:
                values = line.values_and_wait(keys, self._key(read + 1), until)
            else:
                values = line.values(keys, until)
            head, known = _version(values[0]), max(self._known, self._head)
            if head <= after or (known and head > known + FURTHEST):
                return None
            if head == read:
                since = _version(values[2])
                if values[3] and since == head:
                    self._nodes = since, values[3]
                return head, values[1], since
            read = head

    def _key(self, version: int) -> str:
        return f"{self._prefix}b/{version}"

    def _with_nodes(self, found: _Found | None) -> Post | None:
        """Return a post with its nodes, which are read if they are others than before."""
        if found is None:
            return None
        version, value, since = found
        if not since or since == self._nodes[0]:
            return Post(version, value, self._nodes[1] if since else b"")
        key = f"{self._prefix}l/{since}"
        (nodes,) = self._calls.exchange(lambda line, by: line.values([key], by))
        if nodes:
            self._nodes = since, nodes
            return Post(version, value, nodes)
        newer = self._calls.exchange(
            lambda line, by: self._newer(line, by, version, read=version + 1)
        )
        return Post(version, value) if newer is None else self._with_nodes(newer)

    def _read_members(self, line: Connection, until: float) -> dict[str, Lease]:
        ages = _ages(*line.values([self._prefix + "ages"], until))
        if not ages:
            return {}
        values = line.values([f"{self._prefix}s/{name}" for name in ages], until)
        entries = zip(ages.items(), values, strict=True)
        return {name: Lease(value[1:], age) for (name, age), value in entries if value}


def _fitting(notice: bytes) -> bytes:
    if len(notice) > NOTICE:
        raise ValueError(
            f"an entry of {len(notice)} bytes is more than an entry may have ({NOTICE})"
        )
    return notice


def _version(raw: bytes) -> int:
    return int(raw) if raw.isdigit() and len(raw) < 16 else 0


def _ages(raw: bytes) -> dict[str, float]:
    """Read the ages of the entries; any process that reaches the port may have written them."""
    try:
        ages = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(ages, dict):
        return {}
    good = [(name, age) for name, age in ages.items() if is_name(name) and is_age(age)]
    return {name: float(age) for name, age in good[:MOST_ENTRIES]}


def is_age(value: object) -> bool:
    """Return whether a value from JSON is a number of seconds, and neither NaN nor endless."""
    return type(value) in (int, float) and 0 <= value <= LONGEST_AGE  # type: ignore[operator]
