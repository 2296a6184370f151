"""How the ranks of a job find each other: by records in the round's store.

================  ==========  ======================================================================
key               written by  what
================  ==========  ======================================================================
``rank/<r>``      rank r      its record: host, pid, machine, where it listens
``key``           rank 0      the job's key where the launcher gives none; anybody who can read the
                              store can read it then, so it keeps jobs apart, but nobody out:
                              ranks on one machine then use Unix sockets alone, of which the kernel
                              knows the owners, and others are not sent what runs code
``ranks``         every rank  a counter; the rank that completes it sets ``all``
``all``           the last    all records are there
``outer/<r>``     rank r      its node's address for other machines, where its record says loopback
``expired/…``     any rank    the ranks that a call lacks, by the first whose deadline passed
================  ==========  ======================================================================

The last is written later, by channel.py. What all have read gives each rank its place: the nodes,
and the tree of their chiefs.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from elaunch import proc
from elaunch.errors import CollectiveTimeout, PlacementError
from elaunch.hosts import is_loopback, plain
from elaunch.text import ranks
from elaunch.training.channel.listener import Listener
from elaunch.training.place.placement import Placement
from elaunch.training.stores.roundstore import RoundStore, StoreConnection
from elaunch.wire.stream import session_key

ANSWER_S: Final = 10.0
"""Seconds for the store's answer which ranks have come, once the deadline has passed."""


@dataclass(frozen=True)
class RankRecord:
    """One rank, as it stands in the round's store.

    ``machine`` is equal for ranks that can reach each other by abstract Unix sockets; ``unix`` is
    the name of the one that this rank listens on, ``addr`` and ``port`` are where it listens on
    TCP, port 0 where it does not; ``addr_given``: the launcher knows the address.
    """

    rank: int
    node: int
    local: int
    local_size: int
    host: str
    pid: int
    machine: str
    unix: str
    addr: str
    addr_given: bool
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def packed(self) -> bytes:
        """Return the record as it is stored."""
        return json.dumps(asdict(self)).encode()


def read_member(raw: bytes, rank: int) -> RankRecord:
    """Return a stored record; PlacementError for one that is none."""
    try:
        member = RankRecord(**json.loads(raw))
    except (ValueError, TypeError):
        raise PlacementError(f"the record of rank {rank} cannot be read: {raw[:80]!r}") from None
    if member.rank != rank:
        raise PlacementError(f"rank {member.rank} has written the record of rank {rank}")
    return member


def machine_identity() -> str:
    """Return what is equal for processes that share abstract Unix sockets, and for no others."""
    try:
        boot = proc.boot_id()
        space = os.stat("/proc/self/ns/net")
    except OSError:
        return f"host {socket.gethostname()}"
    return f"{boot} {space.st_dev}:{space.st_ino}"


@dataclass(frozen=True)
class Layout:
    """How this rank is connected; nodes are in the order of the tree, rank 0's first.

    ``chief`` is None on a chief; ``local`` are the other ranks of a chief's node; ``parent`` and
    ``below`` are its neighbours in the tree of chiefs.
    """

    me: RankRecord
    members: tuple[RankRecord, ...]
    nodes: tuple[tuple[RankRecord, ...], ...]
    place: int
    chief: RankRecord | None
    local: tuple[RankRecord, ...]
    parent: RankRecord | None
    below: tuple[RankRecord, ...]

    @property
    def node(self) -> tuple[RankRecord, ...]:
        """The ranks of this node, the chief first."""
        return self.nodes[self.place]


def lay_out(members: Sequence[RankRecord], rank: int) -> Layout:
    """Return how ``rank`` is connected; PlacementError where the ranks contradict each other."""
    by_node: dict[int, list[RankRecord]] = {}
    for member in members:
        by_node.setdefault(member.node, []).append(member)
    for node in by_node.values():
        # With --virtual-local-rank all are 0; the order of the ranks is theirs then.
        node.sort(key=lambda m: (m.local, m.rank))
        _check(node)
    nodes = sorted((tuple(node) for node in by_node.values()), key=lambda node: node[0].rank)
    if nodes[0][0].rank != 0:
        raise PlacementError("rank 0 is not the first of its node: its local_rank has to be 0")
    me = members[rank]
    place = next(place for place, node in enumerate(nodes) if me in node)
    chiefs = [node[0] for node in nodes]
    if me != chiefs[place]:
        return Layout(me, tuple(members), tuple(nodes), place, chiefs[place], (), None, ())
    return Layout(
        me,
        tuple(members),
        tuple(nodes),
        place,
        chief=None,
        local=nodes[place][1:],
        parent=chiefs[(place - 1) // 2] if place else None,
        below=tuple(chiefs[2 * place + 1 : 2 * place + 3]),
    )


def _check(node: list[RankRecord]) -> None:
    first = node[0]
    for member in node:
        if member.local_size != len(node):
            raise PlacementError(
                f"{member} says that {member.local_size} ranks are on its node, cross_rank "
                f"{member.node}, but {len(node)} of the job are"
            )
        if member.machine != first.machine:
            raise PlacementError(
                f"{first} and {member} both say that they are on node {member.node} (cross_rank), "
                "but they are on different machines, or in different network namespaces"
            )


@dataclass(frozen=True)
class Met:
    """All ranks of the job, by rank, and the key of this context.

    ``shared``: only processes of this job have the key, or can connect; pickles are trusted.
    """

    members: tuple[RankRecord, ...]
    key: bytes
    shared: bool


def meet(
    placement: Placement, store: RoundStore, listener: Listener, machine: str, until: float
) -> Met:
    """Bind the listener, publish where it is, and return when all ranks have come.

    ``machine``: what tells this machine from others. All ranks call it together. Raises
    CollectiveTimeout at ``until`` (monotonic clock) that names those that have not come, and
    PlacementError where no other machine can reach this one.
    """
    line = store.line(until)
    try:
        addr = placement.addr or line.local_addr
        listener.bind(_listening_host(placement, addr))
        me = RankRecord(
            rank=placement.rank,
            node=placement.cross_rank,
            local=placement.local_rank,
            local_size=placement.local_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=machine,
            unix=listener.unix,
            addr=addr,
            addr_given=bool(placement.addr),
            port=listener.port,
        )
        return _exchange(line, placement, store, me, until)
    finally:
        line.close()


def _exchange(
    line: StoreConnection, placement: Placement, store: RoundStore, me: RankRecord, until: float
) -> Met:
    size = placement.size
    if me.rank == 0 and placement.secret is None:
        line.put("key", secrets.token_bytes(32), until)
    line.put(f"rank/{me.rank}", me.packed(), until)
    if line.add("ranks", 1, until) == size:
        line.put("all", b"1", until)
    names = [f"rank/{rank}" for rank in range(size)]
    if not line.wait("all", until):
        records = line.multi_get(names, time.monotonic() + ANSWER_S)
        raise _missing(me, records, store)
    records = line.multi_get(names, until)
    members = [read_member(raw, rank) for rank, raw in enumerate(records)]
    members = _reachable(line, me, members, until)
    if placement.secret is not None:
        return Met(tuple(members), session_key(placement.secret, store.prefix), True)
    # Without a secret only the kernel knows who is at the other end, of Unix sockets. A rank that
    # sees it otherwise, since records were forged, has another key, and is not let in.
    here = all(member.machine == me.machine for member in members)
    ways = "Unix sockets alone" if here else "any way"
    key = session_key(line.get("key", until), f"{store.prefix} by {ways}")
    return Met(tuple(members), key, here)


def _missing(me: RankRecord, records: list[bytes], store: RoundStore) -> CollectiveTimeout:
    missing = tuple(rank for rank, raw in enumerate(records) if not raw)
    there = [str(read_member(raw, rank)) for rank, raw in enumerate(records) if raw]
    text = f"{ranks(missing)} of {len(records)} did not open a context in time"
    if store.context_number > 1:
        text += f" (number {store.context_number} of rank {me.rank} in this round)"
    return CollectiveTimeout(f"{text}; here: {', '.join(there)}", missing)


def _listening_host(placement: Placement, addr: str) -> str | None:
    """Return the address to listen on for other nodes: None without any, "" for all of ours."""
    if placement.cross_size == 1:
        return None
    if placement.addr or not is_loopback(addr):
        return addr
    # Ranks that meet at a loopback address are on this machine. A host name may mean one only here.
    host = placement.store[0] if placement.store else ""
    return addr if is_loopback(host) else ""


def _reachable(
    line: StoreConnection, me: RankRecord, members: list[RankRecord], until: float
) -> list[RankRecord]:
    """Return the members with addresses that other machines can use."""
    inner = [m for m in members if is_loopback(m.addr) and not m.addr_given]
    if not inner or len({m.machine for m in members}) == 1:
        return members
    if me in inner:
        others = [m for m in members if m.machine != me.machine and m not in inner]
        line.put(f"outer/{me.rank}", _address_towards(others).encode() or b"-", until)
    found = {m.rank: _outer(line, m, until) for m in inner}
    return [replace(m, addr=found.get(m.rank, m.addr)) for m in members]


def _outer(line: StoreConnection, member: RankRecord, until: float) -> str:
    if not line.wait(f"outer/{member.rank}", until):
        raise CollectiveTimeout(f"{member} does not say its address", (member.rank,))
    addr = line.get(f"outer/{member.rank}", until).decode()
    if addr == "-":
        raise PlacementError(
            f"{member} is known by the loopback address {member.addr} only, and ranks on other "
            "machines cannot reach it: give MASTER_ADDR as an address that they can"
        )
    return addr


def _address_towards(others: Iterable[RankRecord]) -> str:
    """Return this machine's address on the way to one of ``others``; nothing is sent."""
    for member in others:
        family = socket.AF_INET6 if ":" in member.addr else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((member.addr, 9))
                addr = plain(str(sock.getsockname()[0]))
        except OSError:
            continue
        if not is_loopback(addr):
            return addr
    return ""
