"""Which store a plan is of that a meeting has read when it opened that store."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from elaunch.errors import StoreClosed, StoreUnreachable
from elaunch.rendezvous.coordinator import Coordinator
from elaunch.rendezvous.coordinatorstate import CoordinatorState
from elaunch.rendezvous.decide.view import Rules, SearchResult
from elaunch.rendezvous.meeting import Meeting, World
from elaunch.store.protocol import Post
from tests.store.memory import MemoryHub
from tests.threadless import no_threads


def test_the_plan_of_a_new_store_is_not_taken_for_one_of_the_old() -> None:
    """The follower may still have the old one when the new one is opened."""
    hubs = [MemoryHub(), MemoryHub()]
    for number, hub in enumerate(hubs):
        hub.post = Post(1, b"%d" % number)
    stores = [hub.store() for hub in hubs]
    opened = iter(stores)
    world = World(lambda news: None, lambda search: SearchResult(), lambda until, hold: None)
    meeting = Meeting(lambda seconds: next(opened), Rules(1, 2), lambda: None, world)
    meeting._reopen(6.0)
    assert meeting._next_post(stores[0]) == hubs[0].post
    meeting._reopen(6.0)
    hubs[1].post = Post(2, b"newer")
    with pytest.raises(StoreClosed):
        meeting._next_post(stores[0])
    assert meeting._next_post(stores[1]) == Post(1, b"1")


def test_no_thread_for_a_coordinator() -> None:
    """Its meeting tries again, as with a store that cannot be reached."""
    store = MemoryHub().store()
    state = CoordinatorState("a", Rules(1, 1), None, "", lambda: ("job", 0.0))
    ignore: Callable[[object], None] = lambda _: None  # noqa: E731
    search: Callable[[object], SearchResult] = lambda _: SearchResult()  # noqa: E731
    coordinator = Coordinator(store, state, search, time.monotonic, ignore, ignore)
    with no_threads(), pytest.raises(StoreUnreachable, match="can't start new thread"):
        coordinator.run(0.0)
