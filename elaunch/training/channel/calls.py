"""One call of all ranks: entries up to the chief and up the tree, what is needed down again.

===========  ==========================  =====================  ====================================
call         who gives                   who gets               large objects between nodes
===========  ==========================  =====================  ====================================
allgather    all                         all                    around the ring, from every node
gather       all                         rank 0                 straight to rank 0's node
broadcast    rank 0                      all                    around the ring, from rank 0's node
barrier      nobody                      nobody
in_turn      all, whether they failed    all
===========  ==========================  =====================  ====================================

The ``_local`` forms are the same within the node, its chief in rank 0's place. A rank that could
not pickle its object gives the reason instead, and every rank gets that: the call fails on all of
them, and the next one works again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from elaunch.env import CHANNEL_KEY
from elaunch.errors import CollectiveError
from elaunch.training.channel import blobs, objects
from elaunch.training.channel.frames import Call, Contribution, encode_entries
from elaunch.training.channel.link import Link, close_all
from elaunch.training.channel.members import RankRecord
from elaunch.training.channel.mesh import Mesh
from elaunch.training.channel.streams import Region, RegionStream, Rooms
from elaunch.training.unpickling import Names, PickleRefused
from elaunch.wire.handshake import GATHER, RING

INLINE: Final = 64 * 1024
"""Bytes of an object that still go inside of its entry."""
INLINE_BETWEEN_NODES: Final = 16 * 1024


@dataclass(frozen=True)
class CallPlan:
    """Which ranks give and which get in one kind of call."""

    name: str
    all_give: bool
    root_gives: bool
    gets: str


PLANS: Final = {
    plan.name: plan
    for plan in (
        CallPlan("allgather", True, True, "all"),
        CallPlan("gather", True, True, "root"),
        CallPlan("broadcast", False, True, "all"),
        CallPlan("barrier", False, False, "nobody"),
        CallPlan("in_turn", True, True, "all"),
    )
}


class Differs(Exception):
    """Two ranks call different things; the text names both."""


class Exchange:
    """One call as this rank does it; owns the descriptors that pass through it.

    ``shared``: only processes of this job can have sent what comes.
    """

    def __init__(
        self, mesh: Mesh, plan: CallPlan, call: Call, until: float, *, shared: bool = True
    ) -> None:
        self.problem: CollectiveError | None = None
        """Why this rank's object could not be sent."""
        self._mesh = mesh
        self._layout = mesh.layout
        self._plan = plan
        self._call = call
        self._until = until
        self._shared = shared
        self._everywhere = call.scope == "all" and len(self._layout.nodes) > 1
        self._fds: set[int] = set()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, in the order of the result."""
        if self._call.scope == "all":
            return tuple(range(len(self._layout.members)))
        return tuple(member.rank for member in self._layout.node)

    @property
    def _root(self) -> int:
        return 0 if self._call.scope == "all" else self._layout.node[0].rank

    def run(self, obj: Any) -> dict[int, Any]:
        """Return the objects that this rank gets, by rank; its own is ``obj`` itself.

        Raises Broken, Expired and Differs where the channel is broken after it; CollectiveError
        for objects that cannot be pickled or unpickled.
        """
        try:
            own = self._own(obj)
            entries = self._lead(own) if self._layout.chief is None else self._follow(own)
            return self._objects(entries, obj)
        finally:
            close_all(self._fds)

    def _own(self, obj: Any) -> list[Contribution]:
        rank = self._layout.me.rank
        if not (self._plan.all_give or (self._plan.root_gives and rank == self._root)):
            return []
        try:
            entry = objects.attempt("its object cannot be pickled", lambda: self._entry(obj))
        except CollectiveError as error:
            self.problem = error
            text = f"{self._layout.me}: {error}".encode()
            return [Contribution(rank, "error", len(text), text)]
        return [entry]

    def _entry(self, obj: Any) -> Contribution:
        packed = objects.pack(obj)
        rank = self._layout.me.rank
        if packed.size <= (INLINE_BETWEEN_NODES if self._everywhere else INLINE):
            return Contribution(rank, "inline", packed.size, packed.joined())
        fd = blobs.written(packed)
        self._fds.add(fd)
        return Contribution(rank, "blob", packed.size, fd=fd)

    def _follow(self, own: list[Contribution]) -> list[Contribution]:
        """Give the own entry to the chief, and return what comes down."""
        assert self._layout.chief is not None
        link = self._mesh.links[self._layout.chief.rank]
        self._mesh.send([link], encode_entries("up", self._call, own, with_fds=True))
        self._mesh.exchange(self._call, [link], self._until, [link])
        return self._take(link)

    def _lead(self, own: list[Contribution]) -> list[Contribution]:
        """Do a chief's part, and return the entries that its own rank gets."""
        layout, mesh, call = self._layout, self._mesh, self._call
        local = [mesh.links[member.rank] for member in layout.local]
        below = [mesh.links[m.rank] for m in layout.below] if self._everywhere else []
        mesh.exchange(call, [*local, *below], self._until, self._neighbours())
        entries = own + [entry for link in (*local, *below) for entry in self._take(link)]
        mine = {entry.rank: entry for entry in entries if entry.fd >= 0}
        if self._everywhere and layout.parent is not None:
            entries = [mine.get(e.rank, e) for e in self._from_above(layout.parent.rank, entries)]
        down = [e for e in entries if self._plan.gets == "all" or e.form == "error"]
        mesh.send(below, encode_entries("down", call, down))
        if self._everywhere and not any(e.form == "error" for e in down):
            self._between_nodes(entries, mine)
        mesh.send(local, encode_entries("down", call, down, with_fds=True))
        mesh.exchange(call, [], self._until)
        return entries if self._plan.gets == "root" else down

    def _from_above(self, parent: int, entries: list[Contribution]) -> list[Contribution]:
        link = self._mesh.links[parent]
        self._mesh.send([link], encode_entries("up", self._call, entries))
        self._mesh.exchange(self._call, [link], self._until, self._neighbours())
        return self._take(link)

    def _neighbours(self) -> list[Link]:
        """Return the links whose end, before what comes down is here, means that the call fails."""
        if self._everywhere:
            return list(self._mesh.links.values())
        return [self._mesh.links[member.rank] for member in self._layout.local]

    def _take(self, link: Link) -> list[Contribution]:
        frame = link.inbox.popleft()
        self._fds.update(frame.fds)
        if frame.call != self._call:
            raise Differs(
                f"the ranks call different things: {self._layout.me} calls {self._call}, "
                f"{link.peer} calls {frame.call}"
            )
        return list(frame.entries())

    def _between_nodes(self, entries: list[Contribution], mine: dict[int, Contribution]) -> None:
        """Move the large objects; those of other nodes have a place in a memory file then."""
        large = [e for e in entries if e.form == "blob"]
        straight = self._plan.gets == "root"
        if straight and self._layout.place:
            large = list(mine.values())
        rooms = Rooms(e for e in large if e.rank not in mine)
        try:
            with rooms as regions:
                regions |= {rank: Region(entry) for rank, entry in mine.items()}
                by_node = self._by_node(large, regions)
                streams = self._straight(by_node) if straight else self._around(by_node)
                self._mesh.flow(self._call, streams, self._until)
        finally:
            self._fds.update(rooms.fds)

    def _by_node(self, large: list[Contribution], regions: dict[int, Region]) -> list[list[Region]]:
        place = self._layout.node_of()
        by_node: list[list[Region]] = [[] for _ in self._layout.nodes]
        for entry in sorted(large, key=lambda e: e.rank):
            by_node[place[entry.rank]].append(regions[entry.rank])
        return by_node

    def _around(self, by_node: list[list[Region]]) -> list[RegionStream]:
        """Pass on to the next node what is ours and what comes from the one before."""
        nodes, place = self._layout.nodes, self._layout.place
        count = len(nodes)
        outbound = [r for step in range(count - 1) for r in by_node[(place - step) % count]]
        inbound = [r for step in range(1, count) for r in by_node[(place - step) % count]]
        streams: list[RegionStream] = []
        if outbound:
            streams.append(self._outflow(RING, nodes[(place + 1) % count][0], outbound))
        if inbound:
            streams.append(self._inflow(RING, nodes[(place - 1) % count][0], inbound))
        return streams

    def _straight(self, by_node: list[list[Region]]) -> list[RegionStream]:
        """Send to the node of rank 0, or receive there from each."""
        nodes, place = self._layout.nodes, self._layout.place
        if place:
            own = by_node[place]
            return [self._outflow(GATHER, nodes[0][0], own)] if own else []
        return [
            self._inflow(GATHER, nodes[other][0], regions)
            for other, regions in enumerate(by_node)
            if other and regions
        ]

    def _outflow(self, purpose: bytes, member: RankRecord, regions: list[Region]) -> RegionStream:
        stream = self._mesh.outflow(purpose, member, self._until)
        stream.regions = regions
        return stream

    def _inflow(self, purpose: bytes, member: RankRecord, regions: list[Region]) -> RegionStream:
        stream = self._mesh.inflow(purpose, member, self._until, self._call)
        stream.regions = regions
        return stream

    def _objects(self, entries: list[Contribution], obj: Any) -> dict[int, Any]:
        errors = [bytes(e.data).decode() for e in entries if e.form == "error"]
        if errors:
            raise CollectiveError(f"{self._call}: {'; '.join(errors)}") from self.problem
        found = {}
        allowed = None if self._shared else objects.allowed_of(obj)
        for entry in entries:
            if entry.rank == self._layout.me.rank:
                found[entry.rank] = obj
                continue
            whose = self._layout.members[entry.rank]
            what = f"{self._call}: the object of {whose} cannot be unpickled here"
            try:
                found[entry.rank] = objects.attempt(what, partial(_object, entry, allowed))
            except CollectiveError as error:
                if not isinstance(error.__cause__, PickleRefused):
                    raise
                raise CollectiveError(f"{error}; {_UNSHARED}") from error.__cause__
        return found


_UNSHARED: Final = (
    "the ranks are on several nodes and share no key, so anybody who reaches the round's store "
    "could have sent it. Give --rdzv-secret-file to every agent of `elaunch run`, or "
    f"{CHANNEL_KEY}, the same 64 random hex digits, to every rank under another launcher; or name "
    "the class to torch.serialization.add_safe_globals on all ranks"
)


def _object(entry: Contribution, allowed: Names | None) -> Any:
    if entry.form == "blob":
        return objects.unpack(blobs.mapped(entry.fd, entry.offset, entry.size), allowed)
    return objects.unpack(memoryview(bytearray(entry.data)), allowed)
