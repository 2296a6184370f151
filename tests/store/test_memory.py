"""The store in one process, with a clock that is handed in; the rest is in test_contract.py."""

from __future__ import annotations

import threading

import pytest

from elaunch.errors import LeaseLost
from elaunch.store.protocol import Change
from tests.store.memory import MemoryHub


class Clock:
    """A clock that moves when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_time_passes_by_the_clock_that_is_handed_in() -> None:
    """An entry is there until the very end of its ttl, and not a moment longer."""
    clock = Clock()
    hub = MemoryHub(clock)
    first, second = hub.store(), hub.store()
    first.enrol("a", b"A", 3.0)
    second.enrol("b", b"B", 2.0)
    assert first.await_leadership("a", 0.0)
    assert len(first.changes("a", 0.0)) == 2
    clock.now += 1.999
    first.renew()
    assert second.members()["b"].age == pytest.approx(1.999)
    clock.now += 0.001
    assert first.changes("a", 0.0) == [Change("b", None, "expired")]
    with pytest.raises(LeaseLost):
        second.renew()


def test_who_expires_together_goes_by_who_was_due_first() -> None:
    """Also when the clock has jumped over all of them."""
    clock = Clock()
    hub = MemoryHub(clock)
    for name, ttl in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        hub.store().enrol(name, b"", ttl)
    reader = hub.store()
    reader.enrol("reader", b"", 99.0)
    assert reader.await_leadership("reader", 0.0)
    reader.changes("reader", 0.0)
    clock.now += 10
    assert [change.name for change in reader.changes("reader", 0.0)] == ["early", "middle", "late"]


def test_a_wait_looks_at_a_clock_that_has_moved() -> None:
    """``tick`` ends a wait whose time is over by the clock that is handed in."""
    clock = Clock()
    hub = MemoryHub(clock)
    results: list[object] = []
    waiting = threading.Thread(target=lambda: results.append(hub.store().follow(0, 50.0)))
    waiting.start()
    clock.now += 51
    while waiting.is_alive():  # the thread may not have begun to wait at the first tick
        hub.tick()
        waiting.join(0.01)
    assert results == [None]


def test_a_name_that_is_gone_never_comes_back() -> None:
    """Neither for who had it nor for another."""
    hub = MemoryHub()
    first = hub.store()
    first.enrol("a", b"", 3.0)
    first.withdraw()
    for store in (first, hub.store()):
        with pytest.raises(LeaseLost, match="name a"):
            store.enrol("a", b"", 3.0)


def test_enrolling_again_withdraws_the_earlier_entry() -> None:
    """A store has one entry."""
    hub = MemoryHub()
    store = hub.store()
    store.enrol("a", b"", 3.0)
    assert store.await_leadership("a", 0.0)
    store.enrol("b", b"", 3.0)
    assert list(store.members()) == ["b"]
    assert not store.publish(1, b"")
