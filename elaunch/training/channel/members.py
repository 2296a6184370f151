"""The ranks of a job and how they are connected: nodes, and the tree of their chiefs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elaunch.errors import PlacementError


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
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/net")
    except OSError:
        return f"host {socket.gethostname()}"
    return f"{boot} {space.st_dev}:{space.st_ino}"


@dataclass(frozen=True)
class Layout:
    """How this rank is connected; nodes are in the order of the tree, rank 0's first.

    ``chief`` is None on a chief; ``local`` are the other ranks of a chief's node; ``parent`` and
    ``below`` are its neighbours in the tree of chiefs. ``node_of`` gives a rank's node's place.
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

    def node_of(self) -> dict[int, int]:
        """Return for each rank the place of its node."""
        return {m.rank: place for place, node in enumerate(self.nodes) for m in node}


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
