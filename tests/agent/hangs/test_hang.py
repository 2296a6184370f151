"""The verdicts: a history of looks at the workers, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from elaunch.agent.hangs.hang import (
    FACTOR,
    LEARNED,
    LEAST,
    LENIENT,
    HangVerdict,
    Look,
    Mark,
    RoundHistory,
    Source,
    advance,
    judge,
    last_words,
    limit,
)

LIMIT = 60.0
TICK = 1.0


class Play:
    """A round that is looked at every second; ``marks`` is what is seen of each rank."""

    def __init__(self, ranks: int = 3, source: Source = "script") -> None:
        self.source = source
        self.now = 1000.0
        self.history = RoundHistory()
        self.held = False
        self.expected = True
        self.marks: dict[int, Mark | None] = {rank: Mark(0) for rank in range(ranks)}
        self.look()

    def look(self, passed: float = 0.0, longest: float = 3 * TICK) -> None:
        """Look once, ``passed`` seconds later."""
        self.now += passed
        look = Look(self.now, self.source, dict(self.marks), self.held, self.expected)
        self.history = advance(self.history, look, longest)

    def move(self, ranks: Sequence[int] = (0, 1, 2)) -> None:
        """Let the ranks make a step, and look a second later."""
        for rank in ranks:
            mark = self.marks[rank] or Mark(0)
            step = (mark.step or 0) + 1
            self.marks[rank] = replace(mark, value=step, step=step, begun=True)
        self.look(TICK)

    def wait(self, seconds: float, moving: Sequence[int] = ()) -> HangVerdict | None:
        """Look every second while only ``moving`` make steps; return the first verdict."""
        for _ in range(int(seconds / TICK)):
            if moving:
                self.move(moving)
            else:
                self.look(TICK)
            found = judge(self.history, LIMIT)
            if found is not None:
                return found
        return None

    def enter(self, rank: int, section: str, timeout: float | None = None) -> None:
        """Let a rank enter a section; an empty name leaves it."""
        mark = self.marks[rank] or Mark(0)
        until = None if timeout is None else self.now + timeout
        value = ("section", section, self.now)
        self.marks[rank] = replace(mark, value=value, section=section, until=until)
        self.look(TICK)


def begun(ranks: int = 3, source: Source = "script") -> Play:
    """Return a round in which all ranks have made two steps."""
    play = Play(ranks, source)
    for _ in range(2):
        play.move(range(ranks))
    return play


def test_who_makes_steps_does_not_hang() -> None:
    """However long it goes on; also with pauses just below the limit."""
    play = begun()
    for _ in range(5):
        assert play.wait(LIMIT - 1) is None
        play.move()
    assert play.wait(1000, moving=(0, 1, 2)) is None


def test_one_rank_stays_behind() -> None:
    """The others go on."""
    play = begun()
    found = play.wait(LIMIT + 5, moving=(0, 2))
    assert found is not None
    assert found.ranks == (1,)
    assert found.reason == (
        "rank 1 has made no progress for 61 s (step 2; the others are at step 63)"
    )


def test_all_wait_for_the_one_with_the_lowest_step() -> None:
    """It is named, not those who wait for it in a collective."""
    play = begun()
    play.move((0, 2))
    found = play.wait(2 * LIMIT)
    assert found is not None
    assert found.ranks == (1,)
    assert "rank 1 has made no progress for 6" in found.reason
    assert "(step 2; the others are at step 3)" in found.reason


def test_nobody_is_named_where_nobody_is_known_to_be_behind() -> None:
    """All stand still at one step."""
    found = begun().wait(2 * LIMIT)
    assert found is not None
    assert (found.ranks, found.named) == ((0, 1, 2), False)
    assert found.reason == "no rank has made progress for 61 s (all at step 2)"


def test_who_stops_a_little_earlier_is_not_blamed_alone() -> None:
    """Ranks in lockstep stop within a step of each other; that is no proof."""
    play = begun()
    for rank in (0, 1, 2):
        mark = play.marks[rank]
        assert mark is not None
        play.marks[rank] = replace(mark, value=("beat", rank))
        play.look(8.0, longest=10.0)
    found = play.wait(2 * LIMIT)
    assert found is not None
    assert found.ranks == (0, 1, 2)


def test_one_worker_alone_is_named() -> None:
    """Also where nobody else could be meant."""
    found = begun(1).wait(2 * LIMIT)
    assert found is not None
    assert found.reason == "rank 0 has made no progress for 61 s (step 2)"


def test_a_section_with_a_timeout_is_judged_by_it() -> None:
    """Long after the limit, and right after the deadline."""
    play = begun()
    play.enter(1, "eval", 900)
    assert play.wait(890) is None
    found = play.wait(30)
    assert found is not None
    assert found.ranks == (1,)
    assert found.reason == (
        "rank 1 has not left section eval in time (step 2; the others are at step 2)"
    )


def test_a_section_may_be_shorter_than_the_limit() -> None:
    """Its deadline counts then, too."""
    play = begun()
    play.enter(0, "save", 5)
    found = play.wait(10)
    assert found is not None and found.ranks == (0,)


def test_a_section_counts_also_without_a_limit() -> None:
    """``auto`` may not know one yet."""
    play = begun()
    play.enter(0, "save", 5)
    for _ in range(10):
        play.look(TICK)
    assert judge(play.history, None) is not None


def test_each_section_has_its_own_time() -> None:
    """A deadline that was passed over in an earlier one is none."""
    play = begun()
    for _ in range(4):
        play.enter(1, "save", 5)
        assert play.wait(4) is None
        play.enter(1, "")
        play.move()
    assert judge(play.history, LIMIT) is None


def test_who_waits_for_another_ranks_section_is_excused() -> None:
    """And has its full time again when that is over."""
    play = begun()
    assert play.wait(LIMIT - 10) is None
    play.enter(0, "eval", 10_000)
    assert play.wait(600) is None
    play.enter(0, "")
    play.move((0,))
    found = play.wait(2 * LIMIT)
    assert found is not None and found.ranks == (1, 2)


def test_short_sections_of_others_do_not_hide_a_hang() -> None:
    """Only the time in which they last is excused."""
    play = begun()
    for _ in range(200):
        play.enter(0, "data")
        play.enter(0, "")
        found = judge(play.history, LIMIT)
        if found is not None:
            break
    assert found is not None and 1 in found.ranks


def test_a_section_without_a_timeout_has_more_time() -> None:
    """Ten times the limit, and a heartbeat inside begins it anew."""
    play = begun()
    play.enter(2, "eval")
    assert play.wait(LENIENT * LIMIT - 10) is None
    mark = play.marks[2]
    assert mark is not None
    play.marks[2] = replace(mark, value="a heartbeat")
    assert play.wait(LENIENT * LIMIT - 10) is None
    found = play.wait(30)
    assert found is not None
    assert found.ranks == (2,)
    assert "in section eval" in found.reason


def test_all_in_one_section_without_a_timeout() -> None:
    """Nobody is excused by the others' being in it."""
    play = begun()
    for rank in range(3):
        play.enter(rank, "eval")
    found = play.wait(2 * LENIENT * LIMIT)
    assert found is not None and found.ranks == (0, 1, 2)


def test_a_start_has_ten_times_the_limit() -> None:
    """Nothing has been seen of anybody."""
    play = Play()
    assert play.wait(LENIENT * LIMIT - 2) is None
    found = play.wait(10)
    assert found is not None
    assert found.reason == "no rank has made progress in the first 601 s of the round"
    assert found.ranks == (0, 1, 2)


def test_the_first_step_may_take_longer_than_the_limit() -> None:
    """A rank that has yet to make one, while others do, has ten times the limit as well."""
    play = Play()
    assert play.wait(LENIENT * LIMIT - 5, moving=(0, 2)) is None
    found = play.wait(10, moving=(0, 2))
    assert found is not None and found.ranks == (1,)


def test_of_whom_nothing_is_ever_seen_takes_no_part() -> None:
    """Most scripts print on rank 0 only."""
    play = Play(source="log lines")
    play.marks = {0: None, 1: None, 2: None}
    play.look(TICK)
    assert play.wait(100) is None
    play.marks[0] = Mark(1, True, 1)
    assert play.wait(1000, moving=(0,)) is None
    found = play.wait(2 * LIMIT)
    assert found is not None
    assert found.ranks == (0, 1, 2)
    assert found.reason == (
        "no rank has made progress for 61 s (step 1001, no line matches --progress-regex)"
    )


def test_who_has_ended_or_detached_is_not_missed() -> None:
    """Its last mark is forgotten."""
    play = begun()
    del play.marks[1]
    play.marks[2] = None
    assert play.wait(1000, moving=(0,)) is None


def test_where_nothing_is_expected_nothing_is_a_hang() -> None:
    """The script shows nothing, or another node's ranks do; what it shows later is judged."""
    play = Play()
    play.expected = False
    play.marks = dict.fromkeys(range(3))
    assert play.wait(100 * LIMIT) is None
    play.marks[0] = Mark(1, True, 1)
    play.look(TICK)
    assert play.wait(2 * LIMIT) is not None


def test_a_frozen_agent_declares_nothing_when_it_wakes() -> None:
    """An hour passed in which nobody looked: a few ticks of it count."""
    play = begun()
    play.look(3600.0)
    assert judge(play.history, LIMIT) is None
    assert play.wait(LIMIT - 5) is None
    assert play.wait(10) is not None


def test_a_frozen_agent_does_not_end_sections_either() -> None:
    """Workers may have been frozen with it: their clock went on."""
    play = begun()
    play.enter(0, "eval", 100)
    play.look(3600.0)
    assert judge(play.history, LIMIT) is None
    assert play.wait(90) is None
    assert play.wait(20) is not None


def test_workers_that_are_held_do_not_hang() -> None:
    """The fence has stopped them."""
    play = begun()
    play.held = True
    assert play.wait(10 * LIMIT) is None
    play.held = False
    assert play.wait(LIMIT - 1) is None
    assert play.wait(5) is not None


def test_another_source_begins_anew() -> None:
    """What one did not show is no proof of the other."""
    play = begun(source="log lines")
    play.wait(LIMIT - 5)
    play.source = "script"
    play.look(TICK)
    assert play.wait(LIMIT) is None


# ── auto ─────────────────────────────────────────────────────────────────────────────────────────


def test_auto_knows_nothing_before_it_has_seen_pauses() -> None:
    """Then it is a multiple of the longest, and not less than half a minute."""
    play = begun()
    assert limit(play.history, "auto") is None
    for _ in range(LEARNED):
        play.move()
    assert limit(play.history, "auto") == LEAST
    for _ in range(20):
        play.look(TICK)
    play.move()
    assert limit(play.history, "auto") == pytest.approx(FACTOR * 21)


def test_auto_leaves_sections_out() -> None:
    """An evaluation says nothing of how long a step may take."""
    play = begun()
    for _ in range(LEARNED):
        play.move()
    play.enter(0, "eval")
    for _ in range(300):
        play.look(TICK)
    play.enter(0, "")
    play.move()
    assert limit(play.history, "auto") == LEAST


def test_auto_keeps_what_it_knows_over_rounds() -> None:
    """For each source by itself."""
    play = begun()
    for _ in range(LEARNED):
        play.move()
    play.history = play.history.next_round()
    play.marks = {rank: Mark(0) for rank in range(3)}
    play.look(TICK)
    assert limit(play.history, "auto") == LEAST
    play.source = "log lines"
    play.look(TICK)
    assert limit(play.history, "auto") is None


def test_auto_waits_for_every_rank() -> None:
    """One that has made no pause yet may make the longest."""
    play = begun()
    for _ in range(3 * LEARNED):
        play.move((0, 1))
    assert limit(play.history, "auto") is None


def test_what_each_rank_said_last() -> None:
    """Its step, its section, its call, and how long ago."""
    play = begun(2)
    for rank in (0, 1):
        play.marks[rank] = Mark(
            99, True, 41 + rank, "" if rank else "eval", None, f"allgather #{rank}", play.now
        )
    found = play.wait(20 * LIMIT)
    assert found is not None
    first, second = last_words(play.history)
    assert first.startswith("rank 0: step 41, in section eval, silent for ")
    assert second.startswith("rank 1: step 42, silent for ")
    assert second.endswith(" s, last call allgather #1")
    assert last_words(begun(source="log lines").history) == ()


# ── collectives ──────────────────────────────────────────────────────────────────────────────────


def waiting(play: Play, *ranks: int, waits: bool = True) -> None:
    """Let ranks wait in a collective, or leave it."""
    for rank in ranks:
        mark = play.marks[rank] or Mark(0)
        play.marks[rank] = replace(mark, value=("in", rank, play.now), waits=waits)


def test_a_rank_that_waits_is_not_judged_while_another_is_in_no_collective() -> None:
    """That one is: any time while it gets something done, for the limit while it does not."""
    play = begun(source="collectives")
    waiting(play, 0, 2)
    assert play.wait(5 * LIMIT, moving=(1,)) is None
    found = play.wait(LIMIT + 5)
    assert found is not None and (found.ranks, found.named) == ((1,), True)


def test_where_all_ranks_wait_they_are_judged() -> None:
    """Whom they wait for is found otherwise."""
    play = begun(source="collectives")
    waiting(play, 0, 1, 2)
    found = play.wait(LIMIT + 5)
    assert found is not None and not found.named


def test_collectives_before_the_first_step_are_no_rhythm() -> None:
    """The first step may be compiled; what goes on meanwhile is progress all the same."""
    play = Play(source="collectives")
    for rank in range(3):
        play.marks[rank] = Mark(0, early=True)
    for _ in range(12):
        assert play.wait(LENIENT * LIMIT - 5) is None
        play.marks[0] = Mark(play.now, early=True)
        play.look(TICK)
    found = play.wait(LENIENT * LIMIT + 5)
    assert found is not None and "in the first" in found.reason
