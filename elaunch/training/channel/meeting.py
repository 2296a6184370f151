"""How the ranks of a job find each other: by records in the round's store.

================  ==========  ======================================================================
key               written by  what
================  ==========  ======================================================================
``rank/<r>``      rank r      its record: host, pid, machine, where it listens
``key``           rank 0      the job's key where the launcher gives none; anybody who can read the
                              store can read it then, so it keeps jobs apart, but nobody out:
                              ranks on one machine then use Unix sockets alone, of which the kernel
                              knows the owners, and others are not sent what runs code
``ranks``         every rank  a counter; the rank that completes it reads all records, and places
                              the ranks
``place/<r>``     that rank   rank r's place: the records of its neighbours, or why there is none;
                              or whom it has to say its address towards, where that is loopback
``outer/<r>``     rank r      that address
``placed/<r>``    the last    the place of a rank that was asked for its address
``addrs``         the last    the nodes' addresses, for whoever asks
``expired/…``     any rank    the ranks that a call lacks, by the first whose deadline passed
================  ==========  ======================================================================

The last is written later, by channel.py. So what a rank reads does not depend on how many there
are. The places are those of a tree of chiefs, each with the ranks of its node. A rank that is told
that all are on this machine makes sure of that for its neighbours, which do the same with theirs.
"""

from __future__ import annotations

import contextlib
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
from elaunch.hosts import is_loopback, source
from elaunch.text import ranks
from elaunch.training.channel.listener import Listener
from elaunch.training.launch import Placement
from elaunch.training.stores.roundstore import RoundStore, StoreConnection
from elaunch.wire.stream import session_key

ANSWER_S: Final = 10.0
"""Seconds for the store's answer which ranks have come, once the deadline has passed."""
TOWARDS: Final = b"towards "
"""A value that begins so asks a rank for its address, and goes on with others' addresses."""
MOST_ADDRS: Final = 8


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

    def listed(self) -> str:
        """Return the record as it stands in the layouts of others: its values alone."""
        return json.dumps(list(vars(self).values()), separators=(",", ":"))

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
    """How this rank is connected, of ``size`` ranks on ``nodes`` nodes.

    Nodes are in the order of the tree, rank 0's first; this one is at ``position`` and has
    ``ranks``, its chief's first. ``here``: all ranks are on this machine. ``chief`` is None on a
    chief; ``local`` are the other ranks of a chief's node; ``parent`` and ``below`` are its
    neighbours in the tree of chiefs.
    """

    me: RankRecord
    size: int
    nodes: int
    position: int
    here: bool
    ranks: tuple[int, ...]
    chief: RankRecord | None
    local: tuple[RankRecord, ...]
    parent: RankRecord | None
    below: tuple[RankRecord, ...]

    @property
    def known(self) -> tuple[RankRecord, ...]:
        """This rank and its neighbours."""
        found = (self.me, self.chief, *self.local, self.parent, *self.below)
        return tuple(member for member in found if member is not None)


def in_nodes(members: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Return the ranks by node, chiefs first; PlacementError where they contradict each other."""
    by_node: dict[int, list[RankRecord]] = {}
    for member in members:
        by_node.setdefault(member.node, []).append(member)
    for node in by_node.values():
        # With --virtual-local-rank all are 0; the order of the ranks is theirs then.
        node.sort(key=lambda m: (m.local, m.rank))
        _check(node)
    nodes = sorted(by_node.values(), key=lambda node: node[0].rank)
    if nodes[0][0].rank != 0:
        raise PlacementError("rank 0 is not the first of its node: its local_rank has to be 0")
    return nodes


def layouts(nodes: Sequence[Sequence[RankRecord]]) -> dict[int, bytes]:
    """Return the layout of each rank as it is stored; ``nodes`` as of :func:`in_nodes`."""
    chiefs = [node[0].listed() for node in nodes]
    here = len({node[0].machine for node in nodes}) == 1
    size = sum(map(len, nodes))
    found = {}
    for position, node in enumerate(nodes):
        ranks_here = json.dumps([member.rank for member in node])
        same = (
            f'{{"size":{size},"nodes":{len(nodes)},"place":{position},'
            f'"here":{json.dumps(here)},"ranks":{ranks_here}'
        )
        local = ",".join(member.listed() for member in node[1:])
        parent = chiefs[(position - 1) // 2] if position else "null"
        below = ",".join(chiefs[2 * position + 1 : 2 * position + 3])
        for member in node[1:]:
            text = f'{same},"chief":{chiefs[position]},"local":[],"parent":null,"below":[]}}'
            found[member.rank] = text.encode()
        text = f'{same},"chief":null,"local":[{local}],"parent":{parent},"below":[{below}]}}'
        found[node[0].rank] = text.encode()
    return found


def read_layout(raw: bytes, me: RankRecord) -> Layout | str:
    """Return the layout of ``me``, or why there is none; PlacementError for what is none."""
    try:
        fields = json.loads(raw)
        problem = fields.get("problem")
        if problem is not None:
            return str(problem)
        for name in ("chief", "parent"):
            fields[name] = None if fields[name] is None else RankRecord(*fields[name])
        for name in ("local", "below"):
            fields[name] = tuple(RankRecord(*one) for one in fields[name])
        position, ranks_here = fields.pop("place"), tuple(fields["ranks"])
        layout = Layout(me, position=position, **{**fields, "ranks": ranks_here})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise PlacementError(f"the place of {me} cannot be read: {raw[:80]!r}") from None
    elsewhere = [m for m in layout.known if layout.here and m.machine != me.machine]
    if elsewhere:
        raise PlacementError(f"{elsewhere[0]} is not on this machine, as the place of {me} has it")
    return layout


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
    """This rank's layout, and the key of this context.

    ``shared``: only processes of this job have the key, or can connect; pickles are trusted.
    """

    layout: Layout
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
    with contextlib.closing(store.connect(until)) as connection:
        addr = placement.addr or connection.local_addr
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
        return _exchange(connection, placement, store, me, until)


def _exchange(
    connection: StoreConnection,
    placement: Placement,
    store: RoundStore,
    me: RankRecord,
    until: float,
) -> Met:
    if announce(connection, placement, me, until):
        raw = publish_layouts(connection, placement.size, me, until)
    else:
        raw = await_layout(connection, placement, store, me, until)
    layout = read_layout(raw, me)
    if isinstance(layout, str):
        raise PlacementError(layout)
    if placement.secret is not None:
        return Met(layout, session_key(placement.secret, store.prefix), True)
    # Without a secret only the kernel knows who is at the other end, of Unix sockets. A rank that
    # sees it otherwise, since records were forged, has another key, and is not let in.
    ways = "Unix sockets alone" if layout.here else "any way"
    key = session_key(connection.get("key", until), f"{store.prefix} by {ways}")
    return Met(layout, key, layout.here)


def announce(
    connection: StoreConnection, placement: Placement, me: RankRecord, until: float
) -> bool:
    """Write this rank's record; return whether it is the last, which makes all layouts."""
    if me.rank == 0 and placement.secret is None:
        connection.put("key", secrets.token_bytes(32), until)
    connection.put(f"rank/{me.rank}", me.packed(), until)
    return connection.add("ranks", 1, until) == placement.size


def await_layout(
    connection: StoreConnection,
    placement: Placement,
    store: RoundStore,
    me: RankRecord,
    until: float,
) -> bytes:
    """Return this rank's layout, as the last rank has written it."""
    for key in (f"place/{me.rank}", f"placed/{me.rank}"):
        if not connection.wait(key, until):
            names = [f"rank/{rank}" for rank in range(placement.size)]
            raise _missing(me, connection.multi_get(names, time.monotonic() + ANSWER_S), store)
        raw = connection.get(key, until)
        if not raw.startswith(TOWARDS):
            break
        addr = _address_towards(raw[len(TOWARDS) :].decode().split(","))
        connection.put(f"outer/{me.rank}", addr.encode() or b"-", until)
    return raw


def publish_layouts(connection: StoreConnection, size: int, me: RankRecord, until: float) -> bytes:
    """Write every other rank's layout; return that of this one, which has come last."""
    asked: list[int] = []
    try:
        members = look_up(connection, range(size), until)
        nodes = in_nodes(_reachable(connection, me, members, asked, until))
        found = layouts(nodes)
    except PlacementError as error:
        problem = json.dumps({"problem": str(error)}).encode()
        nodes, found = [], dict.fromkeys(range(size), problem)
    chiefs = sorted((node[0] for node in nodes), key=lambda chief: chief.node)
    connection.put("addrs", json.dumps([chief.addr for chief in chiefs]).encode(), until)
    keys = {rank: f"placed/{rank}" if rank in asked else f"place/{rank}" for rank in found}
    connection.multi_put([(keys[rank], found[rank]) for rank in found if rank != me.rank], until)
    return found[me.rank]


def look_up(connection: StoreConnection, wanted: Sequence[int], until: float) -> list[RankRecord]:
    """Return the records of ranks that have come; PlacementError for what is none."""
    records = connection.multi_get([f"rank/{rank}" for rank in wanted], until)
    return [read_member(raw, rank) for rank, raw in zip(wanted, records, strict=True)]


def _missing(me: RankRecord, records: list[bytes], store: RoundStore) -> CollectiveTimeout:
    missing = tuple(rank for rank, raw in enumerate(records) if not raw)
    if not missing:
        return CollectiveTimeout("all ranks have come, but the last one has not placed them", ())
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
    connection: StoreConnection,
    me: RankRecord,
    members: list[RankRecord],
    asked: list[int],
    until: float,
) -> list[RankRecord]:
    """Return the members with addresses that other machines can use, of ``asked`` as they say."""
    inner = [m for m in members if is_loopback(m.addr) and not m.addr_given]
    if not inner or len({m.machine for m in members}) == 1:
        return members
    lacking = {m.rank for m in inner}
    outside = {m.machine: m.addr for m in members if m.rank not in lacking}
    found = {}
    for member in inner:
        addrs = [addr for machine, addr in outside.items() if machine != member.machine][
            :MOST_ADDRS
        ]
        if member == me:
            found[me.rank] = _address_towards(addrs) or "-"
            continue
        asked.append(member.rank)
        connection.put(f"place/{member.rank}", TOWARDS + ",".join(addrs).encode(), until)
    for member in inner:
        addr = found.setdefault(member.rank, "") or _outer(connection, member, until)
        if addr == "-":
            raise PlacementError(
                f"{member} is known by the loopback address {member.addr} only, and ranks on "
                "other machines cannot reach it: give MASTER_ADDR as an address that they can"
            )
        found[member.rank] = addr
    outer = [replace(m, addr=found[m.rank]) for m in inner]
    connection.multi_put([(f"rank/{m.rank}", m.packed()) for m in outer], until)
    return [replace(m, addr=found.get(m.rank, m.addr)) for m in members]


def _outer(connection: StoreConnection, member: RankRecord, until: float) -> str:
    if not connection.wait(f"outer/{member.rank}", until):
        raise CollectiveTimeout(f"{member} does not say its address", (member.rank,))
    return connection.get(f"outer/{member.rank}", until).decode()


def _address_towards(addrs: Iterable[str]) -> str:
    """Return this machine's address on the way to one of ``addrs``; nothing is sent."""
    found = (source(other) for other in addrs)
    return next((addr for addr in found if addr and not is_loopback(addr)), "")
