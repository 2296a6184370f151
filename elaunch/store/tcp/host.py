"""The members in a hosted TCPStore: the agent that hosts it keeps them, and judges which are alive.

TCPStore has no leases and no list of its clients. Keys begin with ``/<run id>/``. Only those of
heartbeats do not: they are short, since heartbeats are most of the traffic.

=============  =========================================  ========================================
key            written by                                 what
=============  =========================================  ========================================
``in``         each agent: ``queue_push``                 notices: "new <name> <ttl>", "put <name>
                                                          <ttl>" or "left <name>", a newline, the
                                                          entry's value
``c/<name>``   the agent ``name``: ``add`` 1              its heartbeats; far below zero: gone
``s/<name>``   the host                                   "+" and the entry's value, for readers
``ages``       the host, every two seconds and when an    JSON: name → seconds since its last
               comes or goes                              heartbeat
``head``       the host                                   the newest version of the plan
``b/<v>``      the host; the last 64 are kept             version ``v`` of the plan
``n/<v>``      the same                                   since which version its nodes are there
``l/<v>``      the host; the last two are kept            the nodes of version ``v`` and of the next
``shared``     the host, before it writes its identity;   what all agents share, if they do
               else the first to offer it
=============  =========================================  ========================================

One thread waits for notices, takes all that are there in two exchanges, and reads every counter
in one exchange five times per ``ttl``. An entry is gone when its counter has not moved for
``ttl`` seconds by this thread's clock; that clock counts at most two reading intervals at a time,
so that the host, after it was frozen itself, does not take everybody for dead. The counter is
then moved far below zero by compare-and-set: a heartbeat that was under way keeps its sender
alive, and one that comes later shows its sender that it is gone.

The store keeps every connection for ever, and each is a descriptor of the agent. An agent sends
something at least every twenty seconds, whatever it waits for; a client that sends nothing for
SILENT seconds is gone, or never was an agent, and its connection is ended. Of more than MOST
connections the most silent ones go, too. An agent that was frozen for so long connects again.

Any process that reaches the port can write there. Malformed notices are dropped; records are
authenticated by those who read them (elaunch.rendezvous).
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elaunch.errors import LeaseLost, StoreClosed, StoreUnreachable
from elaunch.store.protocol import Change, Lease
from elaunch.store.tcp import wire
from elaunch.store.tcp.connection import TcpConnection
from elaunch.store.tcp.wire import Connection

SHARED = "shared"
GONE = -(2**62)
"""The counter of an entry that is gone: no number of heartbeats brings it back above zero."""
TTL = (0.05, 3600.0)
"""Seconds that an agent may ask for."""
READINGS = 5
"""Readings of the counters in the shortest ``ttl``, and so how late an agent is missed at most."""
PERIOD = (0.02, 1.0)
"""The shortest and the longest time between two of them, in seconds."""
AGES_EVERY = 2.0
AGES_AT_MOST_EVERY = 0.05
POPS = 512
PUTS = 256
"""Entries that one request writes for readers; one that is longer is parsed again and again."""
IDLE_EVERY = 5.0
"""Seconds between two looks for connections that no client uses."""
SILENT = 30.0
"""Seconds without a byte after which a connection is ended."""
MOST = 40_000
"""Connections that a host keeps: two for each of MOST_ENTRIES agents."""
_LAST_DATA_RECEIVED = 52
"""Where tcp_info has the milliseconds since the last byte, or since the connection was made."""
SPARSELY = 0.1
"""Seconds of a pause where another process has written what wakes the host and is no notice."""
MOST_ENTRIES = 20_000
"""Entries of members; notices of more are dropped."""
NOTICE = 1024 * 1024
"""Bytes of the longest notice that is accepted."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def is_name(name: str) -> bool:
    """Return whether ``name`` can be a member's."""
    return _NAME.fullmatch(name) is not None


def counter_of(name: str) -> str:
    """Return the key of an agent's heartbeats."""
    return f"c/{name}"


def put_notice(name: str, ttl: float, value: bytes, *, new: bool = False) -> bytes:
    """Return the notice of a changed entry, or of a ``new`` one, which replaces none."""
    return f"{'new' if new else 'put'} {name} {ttl!r}\n".encode() + value


def left_notice(name: str) -> bytes:
    """Return the notice of an agent that leaves."""
    return f"left {name}\n".encode()


@dataclass(frozen=True)
class AgentNotice:
    """One notice of an agent; ``ttl`` is None if it leaves, ``new`` is set when it comes."""

    name: str
    ttl: float | None
    value: bytes
    new: bool = False


def read_notice(raw: bytes) -> AgentNotice | None:
    """Return the notice in ``raw``, None if there is none."""
    head, newline, _ = raw[:128].partition(b"\n")
    if not newline or len(raw) > NOTICE:
        return None
    words = head.decode("ascii", "replace").split(" ")
    if not 2 <= len(words) <= 3 or not is_name(words[1]):
        return None
    if words[0] == "left" and len(words) == 2:
        return AgentNotice(words[1], None, b"")
    try:
        ttl = float(words[-1])
    except ValueError:
        return None
    known = words[0] in ("new", "put") and len(words) == 3 and TTL[0] <= ttl <= TTL[1]
    value = raw[len(head) + 1 :]
    return AgentNotice(words[1], ttl, value, words[0] == "new") if known else None


@dataclass
class _Heartbeat:
    """One entry's heartbeats: the counter as it was last read, and when it last moved."""

    ttl: float
    moved: float
    count: bytes = b""


class MemberEntries:
    """Entries by name and the changes that readers have not seen; its owner holds a lock."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._gone: set[str] = set()
        self._unseen: dict[object, list[Change]] = {}

    def knows(self, name: str) -> bool:
        """Return whether ``name`` is or was a member."""
        return name in self.values or name in self._gone

    def put(self, name: str, value: bytes) -> None:
        """Write an entry."""
        self.values[name] = value
        self._note(Change(name, value, "put"))

    def drop(self, name: str, cause: Literal["left", "expired"]) -> None:
        """Take an entry off for good."""
        del self.values[name]
        self._gone.add(name)
        self._note(Change(name, None, cause))

    def read(self, reader: object) -> list[Change]:
        """Return what ``reader`` has not seen: at its first call, every entry that is there."""
        everything = [Change(name, value, "put") for name, value in self.values.items()]
        unseen = self._unseen.get(reader, everything)
        self._unseen[reader] = []
        return unseen

    def forget(self, reader: object) -> None:
        """Keep no more changes for ``reader``; its next call is a first one."""
        self._unseen.pop(reader, None)

    def _note(self, change: Change) -> None:
        for unseen in self._unseen.values():
            unseen.append(change)


class MembersThread:
    """Keeps the members of a hosted store in a thread of its own."""

    def __init__(
        self, line: TcpConnection, prefix: str, closed: threading.Event, port: int
    ) -> None:
        self.changed = threading.Condition()
        self._line, self._prefix, self._closed = line, prefix, closed
        self._entries = MemberEntries()
        self._leader = ""
        self._alive: dict[str, _Heartbeat] = {}
        self._now = 0.0  # the clock that does not count what the host slept through
        self._looked = time.monotonic()
        self._judge_at = 0.0
        self._ages_at = 0.0
        self._ages_due: float | None = None
        # Keys and values that readers must see and the store has not taken yet.
        self._unsent: list[tuple[str, bytes]] = []
        self._port = port
        self._idle_at = self._looked + IDLE_EVERY
        threading.Thread(target=self._run, name="elaunch-members", daemon=True).start()

    def wake(self) -> None:
        """Wake calls that wait for changes; ``closed`` is set already."""
        with self.changed:
            self.changed.notify_all()

    def knows(self, name: str) -> bool:
        """Return whether ``name`` is or was a member; the caller holds ``changed``."""
        return self._entries.knows(name)

    def has(self, name: str | None) -> bool:
        """Return whether ``name`` is a member; the caller holds ``changed``."""
        return name in self._alive

    def begin(self, name: str) -> None:
        """Have the first :meth:`changes` of ``name`` return all; the caller holds ``changed``."""
        self._entries.forget(self._leader)
        self._leader = name
        self.changed.notify_all()

    def leases(self) -> Mapping[str, Lease]:
        """Return all entries."""
        with self.changed:
            ages = {name: self._now - beat.moved for name, beat in self._alive.items()}
            return {name: Lease(value, ages[name]) for name, value in self._entries.values.items()}

    def changes(self, name: str, timeout: float) -> Sequence[Change]:
        """Wait for changes; the first call of each leadership returns every entry."""
        until = time.monotonic() + timeout
        with self.changed:
            while True:
                if self._closed.is_set():
                    raise StoreClosed("the store was closed")
                if self._leader != name or name not in self._alive:
                    raise LeaseLost(f"{name} does not lead (any more)")
                found = self._entries.read(name)
                left = until - time.monotonic()
                if found or left <= 0:
                    return found
                self.changed.wait(left)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._end_silent()
                self._turn()
            except (StoreUnreachable, OSError):  # the host was frozen, or has no descriptor left
                self._closed.wait(0.1)
            except StoreClosed:
                return

    def _end_silent(self) -> None:
        if time.monotonic() >= self._idle_at:
            self._idle_at = time.monotonic() + IDLE_EVERY
            hang_up_on_silent(self._port)

    def _turn(self) -> None:
        """Wait for notices until the counters must be read; take both in, write for readers."""
        due = self._judge_at if self._ages_due is None else min(self._judge_at, self._ages_due)
        raw: list[bytes] = []
        inbox = self._prefix + "in"
        until = time.monotonic() + max(0.001, due - self._now)
        try:
            woken = self._line.exchange(lambda line, by: _drain(line, inbox, until, by, raw))
            if woken and not raw:  # no queue has that name but a key, set by another process
                self._line.exchange(lambda line, by: _remove(line, inbox, by))
                self._closed.wait(SPARSELY)
        finally:
            self._tick()
            self._take([notice for one in raw if (notice := read_notice(one))])
        if self._now >= self._judge_at:
            self._judge()
        if self._ages_due is not None and self._now >= self._ages_due:
            self._unsent.append(self._ages())
        if self._unsent:
            parts = range(0, len(self._unsent), PUTS)
            puts = [wire.multi_put(self._unsent[first : first + PUTS]) for first in parts]
            self._line.exchange(lambda line, by: line.send(puts, by))
            self._unsent.clear()

    def _tick(self) -> None:
        now = time.monotonic()
        self._now += min(now - self._looked, 2 * self._period())
        self._looked = now

    def _take(self, notices: Sequence[AgentNotice]) -> None:
        """Write notices into the table, and what readers must see of it into ``_unsent``."""
        with self.changed:
            for notice in notices:
                self._unsent += self._take_one(notice)
            self.changed.notify_all()

    def _take_one(self, notice: AgentNotice) -> list[tuple[str, bytes]]:
        name = notice.name
        entry, counter = f"{self._prefix}s/{name}", counter_of(name)
        here = name in self._alive
        if notice.ttl is None:
            if not here:
                return []
            self._drop(name, left=True)
            return [(entry, b""), (counter, str(GONE).encode())]
        if self._entries.knows(name) and (notice.new or not here):
            return []  # the name is taken, or its agent is gone: it learns that from its counter
        if not here and len(self._alive) >= MOST_ENTRIES:
            return []
        if not here:
            self._alive[name] = _Heartbeat(notice.ttl, self._now)
            self._judge_at = min(self._judge_at, self._now + self._period())
            self._plan_ages()
        self._entries.put(name, notice.value)
        return [(entry, b"+" + notice.value)]

    def _period(self) -> float:
        shortest = min((beat.ttl for beat in self._alive.values()), default=TTL[1])
        return min(max(shortest / READINGS, PERIOD[0]), PERIOD[1])

    def _judge(self) -> None:
        """Read every counter and remove the members whose counter has not moved."""
        names = list(self._alive)
        keys = list(map(counter_of, names))
        counts = self._line.exchange(lambda line, by: line.values(keys, by)) if keys else []
        self._tick()
        silent = []
        for name, count in zip(names, counts, strict=True):
            beat = self._alive[name]
            if count != beat.count:
                beat.count, beat.moved = count, self._now
            elif self._now - beat.moved >= beat.ttl:
                silent.append(name)
        gone = [name for name in silent if self._mark_gone(name)]
        with self.changed:
            for name in gone:
                self._drop(name, left=False)
            self.changed.notify_all()
        dues = (beat.moved + beat.ttl for beat in self._alive.values())
        self._judge_at = min(self._now + self._period(), *dues, float("inf"))
        if self._alive and self._now >= self._ages_at + AGES_EVERY:
            self._ages_due = self._now
        self._unsent += [(f"{self._prefix}s/{name}", b"") for name in gone]

    def _mark_gone(self, name: str) -> bool:
        """Move the counter below zero unless it has moved meanwhile; whether it has not."""
        tombstone, count = str(GONE).encode(), self._alive[name].count
        request = wire.compare_set(counter_of(name), count, tombstone)
        return self._line.exchange(lambda line, by: line.ask(request, by)) == tombstone

    def _drop(self, name: str, left: bool) -> None:
        del self._alive[name]
        self._entries.drop(name, "left" if left else "expired")
        self._plan_ages()

    def _plan_ages(self) -> None:
        if self._ages_due is None:
            self._ages_due = max(self._now, self._ages_at + AGES_AT_MOST_EVERY)

    def _ages(self) -> tuple[str, bytes]:
        self._ages_at, self._ages_due = self._now, None
        ages = {name: round(self._now - beat.moved, 2) for name, beat in self._alive.items()}
        return self._prefix + "ages", json.dumps(ages, separators=(",", ":")).encode()


def _drain(line: Connection, inbox: str, until: float, by: float, popped: list[bytes]) -> bool:
    """Wait until ``until`` for something in the inbox and take all that is there.

    Returns whether the host reported that something is there.
    """
    line.send([wire.wait(inbox)], by)
    if not line.awaited(until, grace=by - time.monotonic()):
        return False
    pops = 1
    while pops > 0:
        by = time.monotonic() + 5.0
        line.send([wire.pop(inbox)] * pops, by)
        left = 0
        for _ in range(pops):
            left, value = line.popped(by)
            if left >= 0:
                popped.append(value)
        pops = min(left, POPS)
    return True


def _remove(line: Connection, key: str, by: float) -> int:
    line.send([wire.delete(key)], by)
    return line.integer(by)


# ── connections that no client uses ──────────────────────────────────────────────────────────────


def hang_up_on_silent(port: int, silent: float = SILENT, most: int = MOST) -> int:
    """End the connections to ``port`` of this process that are silent; return how many."""
    quiet: list[tuple[float, int]] = []
    for name in os.listdir("/proc/self/fd"):
        seconds = _silence(int(name), port)
        if seconds is not None:
            quiet.append((seconds, int(name)))
    quiet.sort(reverse=True)
    over = max(0, len(quiet) - most)
    late = [fd for index, (seconds, fd) in enumerate(quiet) if index < over or seconds >= silent]
    return sum(_hang_up(fd, port) for fd in late)


def _silence(descriptor: int, port: int) -> float | None:
    """Return for how long nothing came over an accepted connection; None for anything else."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if not _is_accepted(sock, port):
                return None
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except OSError:  # closed meanwhile
        return None
    return float(struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)[0]) / 1000


def _is_accepted(sock: socket.socket, port: int) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return bool(sock.getsockname()[1] == port and sock.getpeername())


def _hang_up(descriptor: int, port: int) -> bool:
    """Shut the connection down: its owner sees the end of it, and closes the descriptor."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if not _is_accepted(sock, port):  # another one has the number by now
                return False
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
