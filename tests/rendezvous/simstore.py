"""The world of the simulation: time, a store as elaunch/store/protocol.py describes it, a network.

A call is a request and an answer, each with a delay of its own. Either may be lost; a request may
also arrive after its caller has given up. Nothing here knows what the records mean.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elaunch.errors import LeaseLost, StoreError, StoreFull, StoreReplaced, StoreUnreachable
from elaunch.store.protocol import Change, Post

CALL_TIMEOUT = 1.0


class Engine:
    """Simulated time: what is to happen, in order; ties are broken by the order of asking."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.steps = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Have ``action`` happen ``delay`` seconds from now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay), self._number, action))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.steps += 1
        action()
        return True


@dataclass
class Link:
    """The way between one node and the store."""

    slow: float = 0.005
    lost: float = 0.0
    out_cut: bool = False
    in_cut: bool = False
    held: float = 0.0
    """Until when the member of the store that this node talks to is frozen."""
    times_lost: int | None = None
    """How often the store had lost its memory when this node last had an answer."""


@dataclass
class _Entry:
    value: bytes
    renewed: float
    ttl: float
    number: int = 0


@dataclass(frozen=True)
class Saved:
    """A snapshot."""

    post: Post | None
    entries: dict[str, _Entry]
    leader: str | None


class SimStore:
    """Plan, members and leadership; operations happen at one moment each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.up = True
        self.replaced = False
        """Another host has this place; it does not know who was here."""
        self.leaderless = False
        self.unsteady = False
        """Its leader moves again and again: no entry expires."""
        self.full = False
        """It takes no more writes."""
        self.in_order = True
        """No write that comes late replaces a newer one: etcd, not a TCPStore's inbox."""
        self.times_lost = 0
        """How often it has lost its memory."""
        self.post: Post | None = None
        self.entries: dict[str, _Entry] = {}
        self.known: set[str] = set()
        self.log: list[Change] = []
        self.leader: str | None = None
        self.may_lead: Callable[[str], bool] = lambda name: True
        self.on_publish: Callable[[Post], None] = lambda post: None
        self._waits: list[Callable[[], bool]] = []

    # ── operations ──

    def expire(self) -> None:
        """Take off who was not renewed in time."""
        for name, entry in list(self.entries.items()):
            if self.unsteady:
                entry.renewed = self.engine.now
            elif self.engine.now >= entry.renewed + entry.ttl:
                self._drop(name, "expired")

    def enrol(self, name: str, value: bytes, ttl: float) -> None:
        """Write an entry."""
        self._check_room()
        if name in self.known:
            raise LeaseLost(f"{name} is or was there")
        self.known.add(name)
        self.entries[name] = _Entry(value, self.engine.now, ttl)
        self.log.append(Change(name, value, "put"))
        self.engine.after(ttl + 1e-6, self.touch)

    def update(self, name: str, value: bytes, number: int) -> None:
        """Replace an entry, but not one that its agent has written after this one."""
        self._check_room()
        entry = self.entry(name)
        if number < entry.number and self.in_order:
            return
        entry.value, entry.number = value, number
        self.log.append(Change(name, value, "put"))

    def renew(self, name: str) -> None:
        """Keep an entry alive."""
        entry = self.entry(name)
        entry.renewed = self.engine.now
        self.engine.after(entry.ttl + 1e-6, self.touch)

    def withdraw(self, name: str | None) -> None:
        """Take an entry off, if it is there."""
        if name in self.entries:
            self._drop(name, "left")

    def publish(self, name: str | None, version: int, value: bytes, nodes: bytes) -> bool:
        """Write the next version, if ``name`` leads."""
        self._check_room()
        newest = 0 if self.post is None else self.post.version
        if self.leader is None or self.leader != name or version != newest + 1:
            return False
        self.post = Post(version, value, nodes)
        self.on_publish(self.post)
        return True

    def evict(self, me: str, name: str) -> None:
        """Take off another's entry, or who leads."""
        if me in self.entries and name in self.entries and self.leader in (me, name):
            self._drop(name, "expired")

    def entry(self, name: str | None) -> _Entry:
        """Return an entry that is there."""
        if name is None or name not in self.entries:
            raise LeaseLost(f"{name} is no member")
        return self.entries[name]

    def take_lead(self, name: str) -> bool:
        """Take the leadership if it is free."""
        self.entry(name)
        if self.leader is None and self.may_lead(name):
            self.leader = name
        return self.leader == name

    def _check_room(self) -> None:
        if self.full:
            raise StoreFull("it takes no more writes")

    def _drop(self, name: str, cause: Any) -> None:
        del self.entries[name]
        self.log.append(Change(name, None, cause))
        if self.leader == name:
            self.leader = None

    # ── those that wait ──

    def touch(self) -> None:
        """Look who can be answered now."""
        if not self.up or self.leaderless:
            return
        self.expire()
        self._waits = [wait for wait in self._waits if not wait()]

    def wait(self, ready: Callable[[], Any], timeout: float, answer: Callable[[Any], None]) -> None:
        """Answer when ``ready`` returns something, or with None after ``timeout`` seconds."""
        until = self.engine.now + timeout

        def look() -> bool:
            try:
                found = ready()
            except StoreError as exc:
                found = exc
            if found is None and self.engine.now < until:
                return False
            answer(found)
            return True

        if not look():
            self._waits.append(look)
            self.engine.after(timeout, self.touch)

    def lose(self, saved: Saved | None = None) -> None:
        """Begin anew with nothing, or with what was saved; nobody who waits hears of it."""
        self.times_lost += 1
        saved = saved or Saved(None, {}, None)
        self.post, self.entries, self.leader = saved.post, dict(saved.entries), saved.leader
        self.known = set(self.entries)
        self.log = [Change(name, entry.value, "put") for name, entry in self.entries.items()]
        self._waits = []

    def save(self) -> Saved:
        """Return what is here now."""
        entries = {name: replace(entry) for name, entry in self.entries.items()}
        return Saved(self.post, entries, self.leader)

    def settle(self) -> None:
        """Have a leader that stays."""
        self.expire()
        self.unsteady = False
        for entry in self.entries.values():
            self.engine.after(entry.ttl + 1e-6, self.touch)

    def restore(self) -> None:
        """Have a leader again; the leases are as long again as they were."""
        self.leaderless = False
        for entry in self.entries.values():
            entry.renewed = self.engine.now
            self.engine.after(entry.ttl + 1e-6, self.touch)


class Client:
    """One agent's connection to the store."""

    def __init__(self, engine: Engine, store: SimStore, link: Link) -> None:
        self.engine, self.store, self.link = engine, store, link
        self.name: str | None = None
        self.writes = 0
        self.offset = 0
        self.lost = False

    def call(self, operation: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """Make a call; ``answer`` gets its value or a StoreError, exactly once."""
        self.wait(lambda: _boxed(operation), 0.0, lambda box: answer(_unboxed(box)))

    def wait(self, ready: Callable[[], Any], timeout: float, answer: Callable[[Any], None]) -> None:
        """Make a call that the store answers when ``ready`` returns something."""
        engine, link, store = self.engine, self.link, self.store
        answered = False

        def once(value: Any) -> None:
            nonlocal answered
            if not answered:
                answered = True
                answer(value)

        def deliver(value: Any) -> None:
            self.lost = self._is_lost()
            link.times_lost = store.times_lost
            once(StoreReplaced("it has lost its memory") if self.lost else value)

        def reply(value: Any) -> None:
            if not link.in_cut and engine.random.random() >= link.lost:
                engine.after(self._delay(), lambda: deliver(value))

        def arrive() -> None:
            if not store.up or store.leaderless:
                gone = StoreUnreachable("nobody is there", nobody_decides=True)
                once(StoreReplaced("it was started anew") if store.replaced else gone)
                return
            if self._is_lost():
                reply(None)
                return
            store.expire()
            store.wait(ready, timeout, reply)
            store.touch()

        held = link.held > engine.now
        patience = timeout + CALL_TIMEOUT * (2 if held else 1)
        engine.after(patience, lambda: once(StoreUnreachable("no answer")))
        if link.out_cut:
            return
        if held:
            # Another member does it after a while; this one does it, too, when it wakes.
            engine.after(CALL_TIMEOUT, lambda: self._move(arrive))
            if timeout == 0.0:
                engine.after(link.held - engine.now + self._delay(), arrive)
            return
        if engine.random.random() < link.lost:
            if engine.random.random() < 0.5:  # it comes, but late
                engine.after(engine.random.uniform(0.5, 3.0), lambda: store.up and arrive())
            return
        engine.after(self._delay(), arrive)

    def _is_lost(self) -> bool:
        """Return whether the store knows less than when this node last had an answer."""
        return self.lost or self.link.times_lost not in (None, self.store.times_lost)

    def _move(self, arrive: Callable[[], None]) -> None:
        """Do what a frozen member did not do at another one, and stay there."""
        self.link.held = 0.0
        self.engine.after(self._delay(), arrive)

    def _delay(self) -> float:
        return self.engine.random.uniform(0.1, 1.0) * self.link.slow


def _boxed(operation: Callable[[], Any]) -> tuple[Any]:
    try:
        return (operation(),)
    except StoreError as exc:
        return (exc,)


def _unboxed(box: Any) -> Any:
    return box[0] if isinstance(box, tuple) else box
