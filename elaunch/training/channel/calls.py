"""One call of all ranks: entries up to the chief and up the tree, what is needed down again.

===========  ==========================  =====================
call         given by                    received by
===========  ==========================  =====================
allgather    all                         all
gather       all                         rank 0
broadcast    rank 0                      all
barrier      nobody                      nobody
in_turn      all, whether they failed    all
===========  ==========================  =====================

The ``_local`` forms are the same within the node, its chief in rank 0's place. A rank that could
not pickle its object gives the reason instead, and every rank gets that: the call fails on all of
them, and the next one works again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from elaunch.env import CHANNEL_KEY
from elaunch.errors import CollectiveError
from elaunch.training.channel import objects
from elaunch.training.channel.link import Call, Contribution, Link, encode
from elaunch.training.channel.mesh import Mesh
from elaunch.training.unpickling import PickleRefused


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
    """One call as this rank does it.

    ``name_of`` names a rank for an error; ``shared``: only processes of this job can have sent what
    comes.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: CallPlan,
        call: Call,
        until: float,
        *,
        name_of: Callable[[int], str],
        shared: bool = True,
    ) -> None:
        self.problem: CollectiveError | None = None
        """Why this rank's object could not be sent."""
        self._mesh = mesh
        self._layout = mesh.layout
        self._me = mesh.layout.me.rank
        self._plan = plan
        self._call = call
        self._until = until
        self._shared = shared
        self._name_of = name_of
        self._everywhere = call.scope == "all" and self._layout.nodes > 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, in the order of the result."""
        if self._call.scope == "all":
            return tuple(range(self._layout.size))
        return self._layout.ranks

    @property
    def _root(self) -> int:
        return 0 if self._call.scope == "all" else self._layout.ranks[0]

    def run(self, obj: Any) -> dict[int, Any]:
        """Return the objects that this rank gets, by rank; its own is ``obj`` itself.

        Raises Broken, Expired and Differs where the channel is broken after it; CollectiveError
        for objects that cannot be pickled or unpickled.
        """
        own = self._own(obj)
        known = self._lead(own) if self._layout.chief is None else self._follow(own)
        return self._objects(self._wanted(known, self._me == self._root), obj)

    def _own(self, obj: Any) -> list[Contribution]:
        if not (self._plan.all_give or (self._plan.root_gives and self._me == self._root)):
            return []
        try:
            packed = objects.attempt("its object cannot be pickled", lambda: objects.pack(obj))
        except CollectiveError as error:
            self.problem = error
            text = f"{self._layout.me}: {error}".encode()
            return [Contribution(self._me, "error", len(text), (text,))]
        return [Contribution(self._me, "object", packed.size, packed.parts)]

    def _wanted(self, known: list[Contribution], is_root: bool) -> list[Contribution]:
        """Return what a rank needs of the entries: those with errors alone where there are any."""
        gets = self._plan.gets == "all" or (self._plan.gets == "root" and is_root)
        return [e for e in known if e.form == "error"] or (known if gets else [])

    def _follow(self, own: list[Contribution]) -> list[Contribution]:
        """Give the own entry to the chief; return it and what comes down."""
        assert self._layout.chief is not None
        return own + self._from_above(self._layout.chief.rank, own, ())

    def _lead(self, own: list[Contribution]) -> list[Contribution]:
        """Do a chief's part, and return the entries that it knows."""
        layout, mesh = self._layout, self._mesh
        members = layout.local + (layout.below if self._everywhere else ())
        links = [mesh.links[member.rank] for member in members]
        mesh.exchange(self._call, links, self._until, self._neighbours())
        taken = {link: self._take(link) for link in links}
        known = own + [entry for entries in taken.values() for entry in entries]
        if self._everywhere and layout.parent is not None:
            known += self._from_above(layout.parent.rank, known, self._neighbours())
        down = self._wanted(known, is_root=False)
        for link, entries in taken.items():
            theirs = {entry.rank for entry in entries}
            lacking = [entry for entry in down if entry.rank not in theirs]
            mesh.send([link], encode("down", {"call": self._call}, lacking))
        mesh.exchange(self._call, [], self._until)
        return known

    def _from_above(
        self, above: int, entries: list[Contribution], concerned: Sequence[Link]
    ) -> list[Contribution]:
        """Send the entries up, and return what comes down."""
        link = self._mesh.links[above]
        self._mesh.send([link], encode("up", {"call": self._call}, entries))
        self._mesh.exchange(self._call, [link], self._until, concerned or [link])
        return self._take(link)

    def _neighbours(self) -> list[Link]:
        """Return the links whose end, before what comes down is here, means that the call fails."""
        if self._everywhere:
            return list(self._mesh.links.values())
        return [self._mesh.links[member.rank] for member in self._layout.local]

    def _take(self, link: Link) -> list[Contribution]:
        frame = link.inbox.popleft()
        if frame.call != self._call:
            raise Differs(
                f"the ranks call different things: {self._layout.me} calls {self._call}, "
                f"{link.peer} calls {frame.call}"
            )
        return list(frame.entries)

    def _refused(self, rank: int) -> str:
        return f"{self._call}: the object of {self._name_of(rank)} cannot be unpickled here"

    def _objects(self, entries: list[Contribution], obj: Any) -> dict[int, Any]:
        errors = [bytes(e.parts[0]).decode() for e in entries if e.form == "error"]
        if errors:
            raise CollectiveError(f"{self._call}: {'; '.join(errors)}") from self.problem
        found = {}
        allowed = None if self._shared else objects.allowed_of(obj)
        for entry in entries:
            if entry.rank == self._me:
                found[entry.rank] = obj
                continue
            try:
                found[entry.rank] = objects.attempt(
                    partial(self._refused, entry.rank),
                    partial(objects.unpack, memoryview(entry.parts[0]), allowed),
                )
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
