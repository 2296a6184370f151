"""The watchdog's thread: it looks in time, tells a hang once, and is quiet about what is past."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import pytest

from elaunch.agent.hangs.judge import HangVerdict, Look, Mark, Source
from elaunch.agent.hangs.watchdog import LATE_TICKS, SHORTEST_S, YIELD_TICKS, Watchdog
from elaunch.agent.policy import events
from tests.agent.logrig import SECONDS, eventually


class Workers:
    """Two workers that stand still; ``moving`` ones do not. ``clock`` tells time by the looks."""

    def __init__(self, clock: Callable[[int], float] = lambda _: time.monotonic()) -> None:
        self.clock = clock
        self.moving: set[int] = set()
        self.looks = 0
        self.there = True

    def look(self) -> Look | None:
        """Return how they are now."""
        self.looks += 1
        marks: dict[int, Mark | None] = {
            rank: Mark(self.looks if rank in self.moving else 0, True) for rank in range(2)
        }
        return Look(self.clock(self.looks), "script", marks) if self.there else None


def watching(workers: Workers, limit: float) -> tuple[Watchdog, queue.SimpleQueue[events.HangSeen]]:
    """Return a started watchdog, and what it posts."""
    posted: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()
    watchdog = Watchdog(limit, workers.look, posted.put)
    watchdog.begin(4)
    watchdog.start()
    return watchdog, posted


@pytest.mark.slow
def test_a_hang_is_told_once_in_each_round() -> None:
    """With the round that it is of, and when it was found."""
    workers = Workers()
    workers.moving = {0}
    before = time.monotonic()
    watchdog, posted = watching(workers, 0.5)
    try:
        hang = posted.get(timeout=SECONDS)
        assert (hang.round, hang.ranks, hang.source) == (4, (1,), "script")
        assert before + 0.5 <= hang.at <= time.monotonic()
        seen = workers.looks
        eventually(lambda: workers.looks > seen + 10)
        assert posted.empty()
        watchdog.begin(5)
        assert posted.get(timeout=SECONDS).round == 5
    finally:
        watchdog.close()


@pytest.mark.slow
def test_who_moves_is_left_alone() -> None:
    """For many times the limit."""
    workers = Workers()
    workers.moving = {0, 1}
    watchdog, posted = watching(workers, 0.3)
    try:
        eventually(lambda: workers.looks > 20)
        assert posted.empty()
    finally:
        watchdog.close()


@pytest.mark.slow
def test_between_the_rounds_there_is_nobody_to_judge() -> None:
    """No worker, no hang."""
    workers = Workers()
    workers.there = False
    watchdog, posted = watching(workers, 0.2)
    try:
        eventually(lambda: workers.looks > 20)
        assert posted.empty()
    finally:
        watchdog.close()


@pytest.mark.slow
def test_a_round_that_ends_during_a_look_is_not_judged() -> None:
    """What was seen is of the round before."""
    inside, go_on = threading.Event(), threading.Event()
    workers = Workers()

    def look() -> Look | None:
        if workers.looks == 3:
            inside.set()
            assert go_on.wait(SECONDS)
        return workers.look()

    posted: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()
    watchdog = Watchdog(0.3, look, posted.put)
    watchdog.begin(0)
    watchdog.start()
    try:
        assert inside.wait(SECONDS)
        watchdog.begin(1)
        go_on.set()
        assert posted.get(timeout=SECONDS).round == 1
    finally:
        watchdog.close()


@pytest.mark.slow
def test_of_several_nodes_the_one_that_can_name_a_rank_speaks_first() -> None:
    """Where nobody is named, the others have a few looks' time."""
    looks = {}
    for several in (False, True):
        workers = Workers(clock=lambda looked: looked * 0.1)
        posted: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()
        watchdog = Watchdog(0.5, workers.look, posted.put, several)
        watchdog.begin(0)
        watchdog.start()
        assert posted.get(timeout=SECONDS).ranks == (0, 1)
        watchdog.close()
        looks[several] = workers.looks
    assert looks[True] == looks[False] + YIELD_TICKS


@pytest.mark.slow
def test_a_script_that_shows_nothing_is_named_once_and_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first round that has lasted long enough; with what to do."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    looks = iter(range(100_000))
    posted: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()

    def look() -> Look:
        return Look(next(looks) * 0.1, "script", {0: None, 1: None}, expected=False)

    watchdog = Watchdog(0.5, look, posted.put)
    watchdog.begin(0)
    watchdog.start()
    try:
        eventually(lambda: bool(caplog.records))
        watchdog.begin(1)
        seen = next(looks)
        eventually(lambda: next(looks) > seen + 100)
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith("--hang-timeout 0.5 watches nothing so far: in the first 5 s")
        assert "ctx.heartbeat()" in line and "--progress-regex" in line
        assert posted.empty()
    finally:
        watchdog.close()


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "said_after"), [(0.5, 1), (600.0, 60)])
def test_workers_that_can_show_nothing_are_named_soon(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    said_after: int,
) -> None:
    """After the limit, and a minute at most: no collective of theirs will ever be seen."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    looks, step = iter(range(100_000)), 0.1 if limit < 1 else 1.0
    posted: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()

    def look() -> Look:
        return Look(next(looks) * step, "script", {0: None, 1: None}, expected=False)

    watchdog = Watchdog(limit, look, posted.put, blind=lambda: True)
    watchdog.tick = SHORTEST_S
    watchdog.begin(0)
    watchdog.start()
    try:
        eventually(lambda: bool(caplog.records))
        (line,) = (record.getMessage() for record in caplog.records)
        assert f"in the first {said_after} s of the round no worker" in line
        assert "the collectives of workers that are no forks of elaunch's are not seen" in line
    finally:
        watchdog.close()


def test_how_often_it_looks() -> None:
    """A fraction of the limit, within bounds; so a late look cannot pass for a hang."""
    nobody: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()
    ticks = [Watchdog(s, lambda: None, nobody.put).tick for s in (0.1, 20.0, 10_000.0, "auto")]
    assert ticks == [SHORTEST_S, 1.0, 5.0, 1.0]
    assert all(LATE_TICKS * tick < 30 for tick in ticks)


def test_what_the_limit_is_at_present() -> None:
    """A number, or nothing yet."""
    nobody: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()
    fixed, auto = (Watchdog(asked, lambda: None, nobody.put) for asked in (60.0, "auto"))
    assert fixed.limit() == (60.0, False)
    assert auto.limit() == (None, True)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "waits"), [("script", False), ("collectives", True)])
def test_a_hang_that_cannot_be_explained_is_posted(source: Source, waits: bool) -> None:
    """Nothing ends the watchdog's thread."""

    def look() -> Look:
        return Look(time.monotonic(), source, {0: Mark(0, True, waits=waits)})

    def explain(_: HangVerdict) -> HangVerdict | None:
        raise RuntimeError("can't start new thread")

    posted: queue.SimpleQueue[events.HangSeen] = queue.SimpleQueue()
    watchdog = Watchdog(0.3, look, posted.put, explain=explain)
    watchdog.start()
    try:
        for round_number in (0, 1):
            watchdog.begin(round_number)
            assert posted.get(timeout=SECONDS).round == round_number
    finally:
        watchdog.close()
