"""A run, look by look: when a hang is suspected, and what the collectives make of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Literal

import pytest

from elaunch.agent.hangs.collectives import CollectiveCall, GroupPlace, RankPlace
from elaunch.agent.hangs.hang import (
    LATE_TICKS,
    SHORTEST_S,
    SILENT_ASKS,
    UNLEARNED_S,
    YIELD_TICKS,
    HangVerdict,
    HangWatch,
    Look,
    Mark,
    Source,
)

FOUND = HangVerdict((1,), "rank 1 has made no progress for 61 s", "collectives", patience=60.0)
BOTH = HangVerdict((0, 1), "no rank has made progress", "collectives", False, patience=60.0)
OUTSIDE = RankPlace({"0": GroupPlace((0, 1))}, done=12)


def explained(
    places: Mapping[int, RankPlace], found: HangVerdict = FOUND, watch: HangWatch | None = None
) -> HangVerdict | None:
    """Return what is made of a verdict, of this node's ranks 0 and 1."""
    watch = watch or HangWatch(60.0, several=False)
    size = 2 if max(places, default=0) < 2 else 4
    return watch.explain(found, places, (0, 1), size, now=time.time(), at=0.0)


def inside(seconds: float, members: tuple[int, ...] = (0, 1)) -> RankPlace:
    """Return a rank that has waited for so long."""
    call = CollectiveCall(7, "all_reduce", at=time.time() - seconds, waits=True)
    return RankPlace({"0": GroupPlace(members, calls=(call,))}, done=13)


def receiving(seconds: float = 61.0) -> RankPlace:
    """Return a rank whose stack shows that it receives, for so long."""
    call = CollectiveCall(0, "recv", at=time.time() - seconds, waits=True)
    return RankPlace({"0": GroupPlace((0, 1))}, (call,), done=12)


def test_no_rank_is_judged_by_its_collectives_while_nobody_waits() -> None:
    """Each does its own work, then, or the others have ended; a short wait is none."""
    for other in (OUTSIDE, RankPlace(ended=True), inside(30.0)):
        assert explained({0: other, 1: OUTSIDE}) is None
    found = explained({0: inside(61.0), 1: OUTSIDE})
    assert found is not None and found.ranks == (1,)
    assert found.culprit.startswith("rank 1 has not entered all_reduce #7; rank 0 has been waiting")
    script = HangVerdict((1,), "rank 1 has made no progress", "script")
    assert explained({0: OUTSIDE, 1: OUTSIDE}, script) == script


def test_ranks_of_other_nodes_that_wait_count() -> None:
    """The one rank of a node may be the one that all others wait for."""
    everyone = (0, 1, 2, 3)
    own = {1: RankPlace({"0": GroupPlace(everyone)}, done=12)}
    assert explained(own, watch=HangWatch(60.0, several=True)) is None
    elsewhere = {rank: inside(61.0, everyone) for rank in (0, 2, 3)}
    found = explained(own | elsewhere, watch=HangWatch(60.0, several=True))
    assert found is not None and found.ranks == (1,)


@pytest.mark.parametrize("silent", [{}, {3: RankPlace(problem="no answer")}])
def test_a_rank_that_never_answers_does_not_hide_a_hang(silent: Mapping[int, RankPlace]) -> None:
    """It is given a few chances; one that answers and is in no collective is its own node's."""
    watch, everyone = HangWatch(60.0, several=True), (0, 1, 2, 3)
    own = {rank: inside(61.0, everyone) for rank in (0, 1)}
    outside = RankPlace({"0": GroupPlace(everyone)}, done=12)
    for _ in range(2 * SILENT_ASKS):
        assert explained({**own, 2: outside, **silent}, watch=watch) is None
    waiting = {**own, 2: inside(61.0, everyone), **silent}
    for _ in range(SILENT_ASKS):
        assert explained(waiting, watch=watch) is None
    seen = [explained(waiting, watch=watch) for _ in range(YIELD_TICKS + 1)]
    assert seen[:-1] == [None] * YIELD_TICKS
    found = seen[-1]
    assert found is not None and "waiting in all_reduce #7" in found.reason
    assert 3 not in found.ranks


def test_ranks_that_send_and_receive_wait_as_well() -> None:
    """One that does is not accused, and not judged while another may still come."""
    assert explained({0: receiving(5.0), 1: OUTSIDE}, BOTH) is None
    found = explained({0: receiving(), 1: OUTSIDE}, BOTH)
    assert found is not None and (found.ranks, found.named) == ((1,), True)
    assert found.culprit.startswith(
        "rank 1 waits for no other rank; rank 0 has been waiting in recv"
    )
    late = HangVerdict((0,), "rank 0 has made no progress", "collectives", patience=60.0)
    assert explained({0: receiving(), 1: OUTSIDE}, late) is None
    found = explained({0: receiving(), 1: receiving()}, late)
    assert found is not None and not found.named
    # The script shows progress of rank 1, which never comes.
    script = HangVerdict((0,), "rank 0 has made no progress", "script", patience=60.0)
    found = explained({0: inside(61.0), 1: OUTSIDE}, script)
    assert found is not None and found.ranks == (1,)


def test_a_rank_whose_interpreter_ends_is_not_accused_before_it_is_known_why() -> None:
    """It may have lost a connection, and hang as it ends."""
    found = explained({0: inside(61.0), 1: RankPlace(leaving=True)})
    assert found is not None and (found.named, found.leaving) == (False, (1,))
    assert found.reason.startswith("rank 1, whose interpreter ends, has not entered all_reduce #7;")


@pytest.mark.parametrize(("asked", "named"), [(60.0, (3,)), ("auto", None)])
def test_a_rank_of_another_node_that_has_no_process_group_is_waited_for(
    asked: float | Literal["auto"], named: tuple[int, ...] | None
) -> None:
    """Its own node sees nothing of it; with ``auto`` that one sees whether it computes."""
    everyone = {"0": GroupPlace((0, 1, 2, 3))}
    call = CollectiveCall(0, "init_process_group", at=time.time() - 61, waits=True)
    comes = RankPlace(everyone, (call,))
    places = {**dict.fromkeys((0, 1, 2), comes), 3: RankPlace()}
    found = explained(places, BOTH, HangWatch(asked, several=True))
    assert (None if found is None else found.ranks) == named


def still(at: float, source: Source = "script", waits: bool = False) -> Look:
    """Return two workers that stand still."""
    return Look(at, source, dict.fromkeys((0, 1), Mark(0, True, waits=waits)))


def test_the_time_until_all_are_asked_again() -> None:
    """Nothing is suspected in it."""
    watch = HangWatch(60.0, several=False)
    suspected = [watch.see(still(at), None) for at in range(63)]
    assert suspected[60] is None and suspected[-1] is not None
    places = {0: inside(61.0), 1: OUTSIDE}
    late = HangVerdict((0,), "rank 0 has made no progress", "collectives", patience=60.0)
    assert watch.explain(late, places, (0, 1), 2, now=time.time(), at=62.0) is None
    assert watch.see(still(63.0), None) is None
    assert watch.see(still(73.0), None) is not None


def test_of_several_nodes_the_one_that_can_name_a_rank_speaks_first() -> None:
    """Where nobody is named, the others have a few looks' time; that begins anew once all go on."""
    watch, told = HangWatch(60.0, several=True), HangVerdict((0, 1), "", "script", named=False)
    assert [explained({}, told, watch) for _ in range(YIELD_TICKS)] == [None] * YIELD_TICKS
    watch.see(still(0.0), None)
    assert [explained({}, told, watch) for _ in range(YIELD_TICKS)] == [None] * YIELD_TICKS
    assert explained({}, told, watch) == told


def test_until_a_limit_is_learned_who_is_waited_for_is_judged() -> None:
    """By the collectives, whatever else the script shows."""
    watch = HangWatch("auto", several=False)
    assert (watch.tick, watch.limit) == (1.0, None)
    seen = None
    for at in range(int(UNLEARNED_S) + 2):
        waits = Look(at, "collectives", {0: Mark(0, True, waits=True), 1: Mark(0, True)})
        assert seen is None
        seen = watch.see(Look(at, "script", {0: None, 1: None}, expected=False), waits)
    assert seen is not None and (seen.ranks, seen.source) == ((1,), "collectives")


def test_a_round_before_is_forgotten() -> None:
    """But for its pauses."""
    watch = HangWatch(60.0, several=False)
    for at in range(62):
        found = watch.see(still(at), None)
    assert found is not None
    watch.begin()
    assert watch.see(still(63.0), None) is None


@pytest.mark.parametrize(
    ("limit", "blind", "after"), [(0.5, False, 5), (0.5, True, 1), (600, True, 65)]
)
def test_a_script_that_shows_nothing_is_named_once_and_left_alone(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    blind: bool,
    after: int,
) -> None:
    """In the first round that has lasted long enough; soon where none of them can show anything."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    watch = HangWatch(limit, several=False)
    for _ in range(2):
        for look in range(200):
            at, nothing = look * watch.tick, dict.fromkeys((0, 1))
            assert watch.see(Look(at, "script", nothing, expected=False), None) is None
            watch.note_silence(blind)
        watch.begin()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"--hang-timeout {limit:g} watches nothing so far: in the first {after}")
    assert "ctx.heartbeat()" in line and "--progress-regex" in line
    assert ("the collectives of workers that are no forks of elaunch's" in line) is blind


def test_how_often_it_looks() -> None:
    """A fraction of the limit, within bounds; so a late look cannot pass for a hang."""
    asked: tuple[float | Literal["auto"], ...] = (0.1, 20.0, 10_000.0, "auto")
    ticks = [HangWatch(each, several=False).tick for each in asked]
    assert ticks == [SHORTEST_S, 1.0, 5.0, 1.0]
    assert all(LATE_TICKS * tick < 30 for tick in ticks)
