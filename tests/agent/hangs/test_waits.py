"""Waits that only stacks show, and since when each wait is known, whatever the clock does."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from elaunch.agent.hangs import recorders, stackdump
from elaunch.agent.hangs.collectives import CollectiveCall, GroupPlace, RankPlace, waited
from elaunch.agent.hangs.recorders import UnrecordedWait, Waits
from elaunch.agent.hangs.stackdump import Dump

RECEIVES = Dump((f'File "{stackdump._TORCHS}", line 1 in recv',), ())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that stands still."""
    made = SimpleNamespace(time=lambda: 1003.0, monotonic=lambda: 50.0)
    monkeypatch.setattr(recorders, "time", made)
    return made


def test_a_stack_without_a_frame() -> None:
    """It shows no receive."""
    places = {0: RankPlace(done=1)}
    assert Waits().seen(places, {0: Dump((), ())}, {0: 1}) == places


def test_a_clock_that_is_set_back(clock: SimpleNamespace) -> None:
    """What was seen to wait has waited for so long, whatever the clock shows."""
    inside = CollectiveCall(7, "all_reduce", at=1000.0, waits=True)
    places = {0: RankPlace({"0": GroupPlace((0, 1), calls=(inside,))}), 1: RankPlace()}
    known = Waits()
    known.note(places)
    assert known.dated(places) == places
    clock.time, clock.monotonic = lambda: 500.0, lambda: 60.0
    known.note(places)
    found = known.dated(places)
    assert (waited(found, 500.0), found[1]) == (10.0, places[1])


def test_a_clock_that_is_set_back_in_a_receive(clock: SimpleNamespace) -> None:
    """Which only the stack shows."""
    places, known = {0: RankPlace(done=1)}, Waits()
    assert waited(known.seen(places, {0: RECEIVES}, {0: 1}), 1003.0) == 0.0
    clock.time, clock.monotonic = lambda: 500.0, lambda: 60.0
    assert waited(known.seen(places, {0: RECEIVES}, {0: 1}), 500.0) == 10.0
    assert known.known(places, (0,))[0].awaited and not known.known(places, (1,))[0].awaited
    assert not known.seen(places, {}, {0: 1})[0].awaited
    assert not known.known(places, (0,))[0].awaited


def test_who_is_held_is_asked_nothing() -> None:
    """Nor one that has not answered."""
    ended, silent = RankPlace(ended=True), RankPlace(problem="no answer")
    places, pids = {0: ended, 1: silent, 2: RankPlace()}, dict.fromkeys(range(3), os.getpid())
    assert recorders.unrecorded(places, dict.fromkeys(range(3), RECEIVES), pids).keys() == {2}


def test_a_receive_after_the_other_is_no_long_one() -> None:
    """A rank that is woken in between has received something."""
    first = UnrecordedWait("recv", 7, 100, 4.0)
    for woken, at in ((100, 4.0), (102, 4.0), (103, 9.0)):
        assert UnrecordedWait("recv", 7, woken, 9.0).after(first).at == at
    assert UnrecordedWait("send", 7, 100, 9.0).after(first).at == 9.0
    assert UnrecordedWait("recv", 8, 100, 9.0).after(first).at == 9.0
    assert UnrecordedWait("recv", 7, 100, 9.0).after(None).at == 9.0
    made = UnrecordedWait("new_group", 7, 100, 4.0)
    assert UnrecordedWait("new_group", 7, 150, 9.0).after(made).at == 4.0
