"""The channel as one rank has it: opened once, called by one thread at a time, broken for good.

In one call of all ranks entries go up to the chief and up the tree, what is needed comes down:

===========  ==========================  =====================
call         given by                    received by
===========  ==========================  =====================
allgather    all                         all
gather       all                         rank 0
broadcast    rank 0                      all
barrier      nobody                      nobody
in_turn      all, whether they failed    all
deliver      who has something           those that take it
===========  ==========================  =====================

The ``_local`` forms are the same within the node, its chief in rank 0's place. What is delivered
goes up to the root, and down only where a rank below takes it. A rank that could
not pickle its object gives the reason instead, and every rank gets that: the call fails on all of
them, and the next one works again. A rank without memory for what comes breaks the channel: all
ranks raise its error.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - the first look-up of a host imports it; a fork has it
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, NoReturn

from elaunch.env import CHANNEL_KEY
from elaunch.errors import (
    CollectiveError,
    CollectiveTimeout,
    ContextError,
    PeerLost,
    PlacementError,
)
from elaunch.training.channel import objects
from elaunch.training.channel.link import Call, Contribution, Link, encode
from elaunch.training.channel.listener import Listener
from elaunch.training.channel.meeting import (
    ANSWER_S,
    Layout,
    RankRecord,
    look_up,
    machine_identity,
    meet,
)
from elaunch.training.channel.mesh import Activity, Answer, Broken, Dialer, Expired, Mesh, ask
from elaunch.training.launch import Placement
from elaunch.training.stores.roundstore import RoundStore
from elaunch.training.unpickling import PickleRefused
from elaunch.wire import forks
from elaunch.wire.progress import ProgressPage

ASK_S: Final = 2.0
"""Seconds in which other ranks have to report what they do."""
FIRST_REPORT_S: Final = 0.5
"""Seconds in which the rank where all entries meet is to report first which are missing."""
CAUSE_FIRST_S: Final = 1.0
"""Seconds that a rank waits before it fails for the loss of another."""
_ERRORS: Final[dict[str, type[CollectiveError]]] = {
    "timeout": CollectiveTimeout,
    "lost": PeerLost,
    "other": CollectiveError,
}


@dataclass(frozen=True)
class Absentees:
    """The ranks that did not come to a call, in words and by rank."""

    text: str
    missing: tuple[int, ...]


class RankChannel:
    """One rank's end of the channel; all ranks call :meth:`open` together, and every call.

    ``machine`` is what distinguishes this machine; it is looked up where it is not given.
    """

    def __init__(
        self, placement: Placement, store: RoundStore, page: ProgressPage, machine: str = ""
    ) -> None:
        self._placement = placement
        self._store = store
        self._page = page
        self._machine = machine
        self._listener = Listener(placement.rank, placement.size)
        self._mesh: Mesh | None = None
        self._dialer: Dialer | None = None
        self._activity = Activity()
        self._shared = False
        self._known: dict[int, RankRecord] = {}
        self._turn = threading.Lock()
        self._unusable: tuple[type[Exception], str, tuple[int, ...]] | None = None

    @property
    def layout(self) -> Layout:
        """Which rank is where; known once it is open."""
        if self._mesh is None:
            raise ContextError("the channel between the ranks is not open")
        return self._mesh.layout

    def open(self, until: float) -> None:
        """Meet the others and connect to the neighbours.

        Raises CollectiveTimeout at ``until`` (monotonic clock), PeerLost, and PlacementError where
        the ranks contradict each other.
        """
        forks.leave_behind(self)
        try:
            machine = self._machine or machine_identity()
            met = meet(self._placement, self._store, self._listener, machine, until)
            layout = met.layout
            self._known = {member.rank: member for member in layout.known}
            self._dialer = Dialer(layout.me, met.key)
            self._shared = met.shared
            by_unix = met.shared and self._placement.secret is None
            self._listener.start(
                met.key, lambda: self._activity.report(self._page.last()), unix_only=by_unix
            )
            mesh = Mesh(layout, self._dialer, self._listener)
            self._mesh = mesh
            mesh.open(until)
        except BaseException:
            self.close()
            raise

    def call(
        self, scope: str, name: str, obj: Any, timeout: float, purpose: str = ""
    ) -> list[Any] | None:
        """Do one call with all ranks of ``scope``; return the objects in order, None if none come.

        Calls for different purposes are different calls. Raises CollectiveError, ContextError.
        """
        plan = PLANS[name.removesuffix("_local")]
        name = f"{name} of {purpose}" if purpose else name
        if not self._turn.acquire(blocking=False):
            self._refuse_unusable(name)
            raise ContextError(
                f"{name}: another thread of this rank is in {self._activity.now}; calls of all "
                "ranks need one order, so one thread has to make them"
            )
        before = self._page.spend("wait")
        try:
            self._refuse_unusable(name)
            call = self._activity.enter(scope, name)
            self._page.note(str(call))
            return self._run(call, plan, obj, timeout)
        finally:
            self._page.spent_on(before)
            self._activity.now = None
            self._turn.release()
            if self._mesh is not None and self._mesh.stopped:
                self._free_in_turn()

    def describe(self, ranks: Sequence[int], until: float) -> list[str]:
        """Return what each rank does and did last, in words; blocks until ``until`` at most."""
        answers = {a.member.rank: str(a) for a in self._ask(self._members(ranks), until)}
        return [answers.get(rank, f"rank {rank} does not answer") for rank in ranks]

    def node_addrs(self) -> tuple[str, ...]:
        """Return the nodes' addresses by node; raises as RoundStore.connect."""
        if self.layout.nodes == 1:
            return ((self.layout.chief or self._me).addr,)
        until = time.monotonic() + ANSWER_S
        with contextlib.closing(self._store.connect(until)) as connection:
            return tuple(map(str, json.loads(connection.get("addrs", until))))

    def close(self) -> None:
        """Send bye to the neighbours, and free everything; may be called twice, and from anywhere.

        A call that another thread is in ends with ContextError, and frees everything then.
        """
        if self._mesh is not None:
            self._mesh.stopped = True
            self._listener.wake()
        self._free_in_turn()

    def _free_in_turn(self) -> None:
        """Free everything, unless another thread is in a call or frees: then that one does."""
        if self._turn.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._turn.release()

    def _free(self) -> None:
        if self._unusable is None:
            self._unusable = ContextError, "the context is closed", ()
            if self._mesh is not None:
                self._mesh.hang_up(encode("bye", {}))
        self._listener.close()
        if self._mesh is not None:
            self._mesh.close()

    def forked(self) -> None:
        """Let go of everything in a process that was forked from this rank."""
        rank = self._placement.rank
        text = f"this process was forked from rank {rank}, which alone may make calls of all ranks"
        self._unusable = ContextError, text, ()
        self._turn = threading.Lock()
        self._listener.forked()
        if self._mesh is not None:
            self._mesh.close()

    def _refuse_unusable(self, name: str) -> None:
        if self._unusable is None:
            return
        kind, text, missing = self._unusable
        if issubclass(kind, CollectiveError):
            raise kind(f"{name}: the ranks are not connected any more since {text}", missing)
        raise kind(f"{name}: {text}")

    def _run(self, call: Call, plan: CallPlan, obj: Any, timeout: float) -> list[Any] | None:
        assert self._mesh is not None
        until = time.monotonic() + timeout
        exchange = Exchange(
            self._mesh, plan, call, until, name_of=self._name_of, shared=self._shared
        )
        try:
            found = exchange.run(obj)
        except Broken as error:
            end = error.end
            if self._mesh.stopped:
                self._break(call, "other", f"{call}: {end.text}", ())
                raise ContextError(f"{call}: {end.text}") from None
            since = "" if end.call == call or end.how != "abort" else f"{call}: "
            text = end.text if end.how == "abort" else f"{call}: {end.text}"
            self._fail(call, end.error, since + text, end.missing)
        except Expired:
            self._expired(call, exchange, timeout)
        except Differs as error:
            self._fail(call, "other", f"{call}: {error}", ())
        except MemoryError as error:
            self._fail(call, "other", f"{call}: {self._me} has no memory {error}".rstrip(), ())
        except CollectiveError:
            raise  # all ranks are through with the call; the next one works
        except BaseException as error:
            self._break(call, "other", f"{call}: {self._me} was interrupted by {error!r}", ())
            raise
        return [found[rank] for rank in exchange.ranks if rank in found] or None

    @property
    def _me(self) -> RankRecord:
        return self.layout.me

    def _members(self, wanted: Sequence[int]) -> list[RankRecord]:
        """Return the records of ranks, as far as they are known or the store has them."""
        unknown = [rank for rank in wanted if rank not in self._known]
        if unknown:
            until = time.monotonic() + ANSWER_S
            with (
                contextlib.suppress(CollectiveError, ContextError, PlacementError),
                contextlib.closing(self._store.connect(until)) as connection,
            ):
                self._known |= {m.rank: m for m in look_up(connection, unknown, until)}
        return [self._known[rank] for rank in wanted if rank in self._known]

    def _name_of(self, rank: int) -> str:
        return ", ".join(map(str, self._members([rank]))) or f"rank {rank}"

    def _expired(self, call: Call, exchange: Exchange, timeout: float) -> NoReturn:
        """Raise for a deadline; ask all ranks which are missing, if none has found out already."""
        assert self._mesh is not None
        if exchange.problem is not None:
            self._fail(call, "other", f"{call}: {exchange.problem}", ())
        if self._me.rank != exchange.ranks[0] and (end := self._mesh.settle(FIRST_REPORT_S)):
            self._fail(call, end.error, end.text, end.missing)
        others = self._members([rank for rank in exchange.ranks if rank != self._me.rank])
        missing = [a for a in self._ask(others, time.monotonic() + ASK_S) if a.lacks(call)]
        text = f"{call}: not all ranks came within {timeout:g} s: {'; '.join(map(str, missing))}"
        if not missing:
            text = f"{call}: all ranks have come, but it was not done within {timeout:g} s"
        verdict = Absentees(text, tuple(answer.member.rank for answer in missing))
        verdict = self._first_verdict(call, verdict)
        self._fail(call, "timeout", verdict.text, verdict.missing)

    def _first_verdict(self, call: Call, own: Absentees) -> Absentees:
        """Return what the first rank whose deadline passed has found.

        It may have ended since, and would be taken for one of those that did not come.
        """
        node = self.layout.position if call.scope == "local" else "all"
        key = f"expired/{node}/{call.number}"
        until = time.monotonic() + ASK_S
        verdict = json.dumps(asdict(own)).encode()
        try:
            with contextlib.closing(self._store.connect(until)) as connection:
                found = json.loads(connection.put_first(key, verdict, until))
            return Absentees(str(found["text"]), tuple(found["missing"]))
        except (CollectiveError, ContextError, ValueError, TypeError, KeyError):
            return own

    def _ask(self, members: Sequence[RankRecord], until: float) -> list[Answer]:
        if self._dialer is None:
            raise ContextError("the channel between the ranks is not open")
        others = [member for member in members if member != self._me]
        answers = {a.member: a for a in ask(self._dialer, others, until)}
        report = self._activity.report(self._page.last())
        answers[self._me] = Answer(self._me, str(report["text"]), there=True, calls=report["calls"])
        return [answers[member] for member in members]

    def _fail(self, call: Call, error: str, text: str, missing: tuple[int, ...]) -> NoReturn:
        self._break(call, error, text, missing)
        if error == "lost":
            # The launcher sees the end of the lost rank and ends this one, too. The rank that
            # fails first is taken for the cause: let that be the lost one.
            time.sleep(CAUSE_FIRST_S)
        raise _ERRORS.get(error, CollectiveError)(text, missing) from None

    def _break(self, call: Call, error: str, text: str, missing: tuple[int, ...]) -> None:
        """Send the neighbours the reason, and refuse every later call with the same."""
        assert self._mesh is not None
        self._unusable = _ERRORS.get(error, CollectiveError), text, missing
        reason = {"call": call, "error": error, "text": text, "missing": missing}
        self._mesh.hang_up(encode("abort", reason))


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
        CallPlan("deliver", False, False, "takers"),
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
        return self._objects(self._wanted(known, own, self._me == self._root), obj)

    def _own(self, obj: Any) -> list[Contribution]:
        if self._plan.gets == "takers":
            obj, takes = obj
            if obj is None:
                return [Contribution(self._me, "takes", 0, ())] if takes else []
        elif not (self._plan.all_give or (self._plan.root_gives and self._me == self._root)):
            return []
        try:
            packed = objects.attempt("its object cannot be pickled", lambda: objects.pack(obj))
        except CollectiveError as error:
            self.problem = error
            text = f"{self._layout.me}: {error}".encode()
            return [Contribution(self._me, "error", len(text), (text,))]
        return [Contribution(self._me, "object", packed.size, packed.parts)]

    def _wanted(
        self, known: list[Contribution], theirs: list[Contribution], is_root: bool
    ) -> list[Contribution]:
        """Return which entries go to ranks whose own are ``theirs``: errors alone if there are any.

        ``is_root``: they are the rank where all entries meet.
        """
        gets = self._plan.gets == "all" or (self._plan.gets == "root" and is_root)
        if self._plan.gets == "takers":
            gets = any(entry.form == "takes" for entry in theirs)
        found = [e for e in known if gets and e.form == "object"]
        return [e for e in known if e.form == "error"] or found

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
        for link, entries in taken.items():
            theirs = {entry.rank for entry in entries}
            down = self._wanted(known, entries, is_root=False)
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
