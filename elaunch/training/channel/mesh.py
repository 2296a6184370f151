"""All connections of one rank to its neighbours: dialed, polled, and waited for in one place.

The listener of another rank is dialed to connect, or to ask what the rank does. It answers in a
thread of its own, whatever its script is in.
"""

from __future__ import annotations

import json
import math
import select
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from elaunch.atonce import at_once
from elaunch.errors import CollectiveTimeout, PeerLost
from elaunch.training.channel.link import Call, Encoded, End, Link
from elaunch.training.channel.listener import LENGTH, Listener
from elaunch.training.channel.meeting import Layout, RankRecord
from elaunch.wire import stream
from elaunch.wire.stream import ASK, LINK, Caller, Endpoint, Unreached, receive

AT_ONCE: Final = 32
LONGEST: Final = 65536


class Dialer:
    """Dials other ranks, with this rank's record and the key of the context."""

    def __init__(self, me: RankRecord, key: bytes) -> None:
        self.me = me
        self._key = key

    def dial(self, member: RankRecord, purpose: bytes, until: float) -> socket.socket:
        """Return a connection to ``member`` after the handshake; raises Unreached.

        Blocks until ``until`` (monotonic clock) at the longest.
        """
        where = Endpoint(host=member.addr, port=member.port)
        if member.machine == self.me.machine:
            where = Endpoint(unix=member.unix)
        caller = Caller(purpose, self.me.rank)
        try:
            return stream.dial(where, lambda: self._key, member.rank, caller, until)
        except Unreached as error:
            texts = {
                "refused": f"{member} has ended, or has closed its context",
                "foreign": f"{member} has ended: {error}",
                "silent": f"{member} does not answer at {where}: {error}",
                "busy": f"{member} does not take us at {where}: {error}",
            }
            raise Unreached(error.how, texts[error.how]) from None


@dataclass(frozen=True)
class Answer:
    """A rank's answer: what it does, as text, and how many calls of each scope it has entered.

    ``there`` is False for one that is ``gone`` or does not answer: ``calls`` is empty then.
    """

    member: RankRecord
    text: str
    there: bool = False
    gone: bool = False
    calls: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.member}{self.text}"

    def lacks(self, call: Call) -> bool:
        """Return whether the rank has not come to ``call``."""
        return not self.there or self.calls.get(call.scope, 0) < call.number


@dataclass
class Activity:
    """The activity of this rank, for ranks that ask; written by the thread that is in a call."""

    calls: dict[str, int] = field(default_factory=lambda: {"all": 0, "local": 0})
    now: Call | None = None
    since: float = 0.0

    def enter(self, scope: str, name: str) -> Call:
        """Note that a call begins, and return it."""
        self.calls[scope] += 1
        self.since = time.monotonic()
        self.now = Call(scope, self.calls[scope], name)
        return self.now

    def report(self, last: str) -> dict[str, Any]:
        """Return the answer to the question; ``last``: what the progress page has."""
        now = self.now
        if now is None:
            return {"calls": self.calls, "text": f": its last call was {last}"}
        seconds = time.monotonic() - self.since
        return {"calls": self.calls, "text": f": in {now} for {seconds:.1f} s"}


def ask(dialer: Dialer, members: Sequence[RankRecord], until: float) -> list[Answer]:
    """Return what each of ``members`` reports, in their order; blocks until ``until`` at most."""
    calls = [partial(_ask_one, dialer, member, until) for member in members]
    return at_once(calls, AT_ONCE, "elaunch-ask")


def _ask_one(dialer: Dialer, member: RankRecord, until: float) -> Answer:
    try:
        with dialer.dial(member, ASK, until) as sock:
            (length,) = LENGTH.unpack(receive(sock, LENGTH.size, until))
            answer = json.loads(receive(sock, min(length, LONGEST), until))
            return Answer(member, str(answer["text"]), there=True, calls=dict(answer["calls"]))
    except Unreached as error:
        if error.how in ("refused", "foreign"):
            return Answer(member, " has ended, or has closed its context", gone=True)
        return Answer(member, " does not answer")
    except (OSError, ValueError, KeyError, TypeError):
        return Answer(member, " does not answer")


SETTLE_S: Final = 0.25
"""Seconds in which another neighbour may report why one is gone."""
HANG_UP_S: Final = 1.0
"""Seconds for what is under way to neighbours when this rank hangs up."""
PROBE_S: Final = 1.0
"""Seconds between looks whether a rank whose connection is awaited still lives."""


class Expired(Exception):
    """The deadline of a call has passed."""


class Broken(Exception):
    """A call cannot be completed; ``end`` says why."""

    def __init__(self, end: End) -> None:
        super().__init__(end.text)
        self.end = end


Party = Link | Listener
"""A thing that the mesh polls: it has a descriptor, events to wait for, and does what they ask."""


class Mesh:
    """The connections of one rank; only the thread that is in a call uses it."""

    def __init__(self, layout: Layout, dialer: Dialer, listener: Listener) -> None:
        self.layout = layout
        self.stopped = False
        """Set by another thread, or a signal's handler, to end the call that this one is in."""
        self.links: dict[int, Link] = {}
        self._dialer = dialer
        self._listener = listener
        self._poller = select.poll()
        self._parties: dict[int, Party] = {}
        self._masks: dict[int, int] = {}

    def open(self, until: float) -> None:
        """Connect to the neighbours; raises PeerLost, and CollectiveTimeout at ``until``."""
        layout = self.layout
        self._watch(self._listener)
        above = layout.chief or layout.parent
        try:
            if above is not None:
                self._add(self._dialer.dial(above, LINK, until), above)
            for member in (*layout.local, *layout.below):
                self._add(self._accepted(member, until), member)
        except Expired:
            late = [m for m in (*layout.local, *layout.below) if m.rank not in self.links]
            names = ", ".join(map(str, late))
            raise CollectiveTimeout(
                f"no connection came from {names}", tuple(m.rank for m in late)
            ) from None
        except (Broken, Unreached) as error:
            missing = error.end.missing if isinstance(error, Broken) else (above.rank,)  # type: ignore[union-attr]
            raise PeerLost(str(error), missing) from None

    def send(self, links: Iterable[Link], frame: Encoded) -> None:
        """Queue a frame; :meth:`exchange` sees it off."""
        for link in links:
            link.send(frame)
            self._watch(link)

    def exchange(
        self,
        call: Call,
        awaited: Collection[Link],
        until: float,
        concerned: Collection[Link] = (),
    ) -> None:
        """Return when all is sent and every link of ``awaited`` has a frame; or Broken, Expired.

        ``concerned``: neighbours that cannot have left before that, so it is a failure if one has.
        So it is with those that are needed, and when one reports that this very call has failed.
        """
        waiting = {link for link in awaited if not link.inbox}
        while True:
            needed = waiting | {link for link in self.links.values() if link.sending}
            self._check_aborts(call)
            if not needed:
                return
            self._check({*needed, *concerned})
            for party in self._poll(until):
                if isinstance(party, Link) and party.inbox:
                    waiting.discard(party)

    def settle(self, seconds: float) -> End | None:
        """Wait until a neighbour reports why its call has failed; None if none does in time."""
        until = time.monotonic() + seconds
        while True:
            ends = [link.end for link in self.links.values() if link.end is not None]
            aborts = [end for end in ends if end.how == "abort"]
            if aborts:
                return aborts[0]
            try:
                self._poll(until)
            except Expired:
                return None

    def hang_up(self, last: Encoded) -> None:
        """Send ``last`` to every neighbour that takes it within a moment, and nothing more ever."""
        links = self.links.values()
        for link in links:
            link.send_last(last)
            self._watch(link)
        until = time.monotonic() + HANG_UP_S
        while any(link.sending for link in links) and time.monotonic() < until:
            self._serve(until)
        for link in links:
            link.hang_up()
            self._watch(link)

    def close(self) -> None:
        """Free every descriptor; may be called twice."""
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._parties.clear()
        self._masks.clear()

    def _add(self, sock: socket.socket, member: RankRecord) -> None:
        link = self.links[member.rank] = Link(sock, member)
        self._watch(link)

    def _accepted(self, member: RankRecord, until: float) -> socket.socket:
        """Return the connection that ``member`` makes; it is looked after while it is awaited."""
        probe = time.monotonic() + PROBE_S
        while (sock := self._listener.take(member.rank)) is None:
            try:
                self._poll(min(probe, until))
            except Expired:
                now = time.monotonic()
                if now >= until:
                    raise
                probe = now + PROBE_S
                self._probe(member, min(until, probe))
        return sock

    def _probe(self, member: RankRecord, until: float) -> None:
        (answer,) = ask(self._dialer, [member], until)
        if answer.gone:
            raise Broken(self._first_cause(End("lost", str(answer), (member.rank,))))

    def _check(self, neighbours: Iterable[Link]) -> None:
        for neighbour in neighbours:
            if neighbour.end is not None:
                raise Broken(self._first_cause(neighbour.end))

    def _check_aborts(self, call: Call) -> None:
        for link in self.links.values():
            if link.end is not None and link.end.how == "abort" and link.end.call == call:
                raise Broken(link.end)

    def _first_cause(self, end: End) -> End:
        """Return ``end``, or what a neighbour reports within a moment: it may know more."""
        if end.how != "lost":
            return end
        return self.settle(SETTLE_S) or end

    def _poll(self, until: float) -> list[Party]:
        touched = self._serve(until)
        if self.stopped:
            raise Broken(End("bye", f"{self.layout.me} closed its context meanwhile", ()))
        if not touched and time.monotonic() >= until:
            raise Expired
        return touched

    def _serve(self, until: float) -> list[Party]:
        """Do what the next events allow; return those that had one, none if it is too late."""
        wait_ms = math.ceil(1000 * min(max(until - time.monotonic(), 0.0), 3600.0))
        touched = []
        for fd, events in self._poller.poll(wait_ms):
            party = self._parties[fd]
            party.ready(events)
            self._watch(party)
            touched.append(party)
        return touched

    def _watch(self, party: Party) -> None:
        """Poll for what the party wants now."""
        fd, mask = party.fileno(), party.mask()
        known = self._masks.get(fd, 0)
        if mask == known:
            return
        if mask == 0:
            self._poller.unregister(fd)
            del self._masks[fd], self._parties[fd]
            return
        self._poller.register(fd, mask)
        self._masks[fd], self._parties[fd] = mask, party
