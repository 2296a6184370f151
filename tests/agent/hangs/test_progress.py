"""Which source tells of the workers' progress, and what each of them sees."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from elaunch.agent.hangs.collectives import CollectiveCall, GroupPlace, RankPlace
from elaunch.agent.hangs.hang import Look
from elaunch.agent.hangs.living import Living
from elaunch.agent.hangs.progress import (
    LONGEST,
    LONGEST_S,
    SET_UP,
    SILENT,
    ProgressLines,
    RoundProgress,
)
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.runs.record import ProgressRecord
from elaunch.wire.progress import PageReader, ProgressPage, Reading


class Pages:
    """Workers' pages, as the links would read them."""

    def __init__(self) -> None:
        self.pages: dict[int, ProgressPage] = {}
        self.readers: dict[int, PageReader] = {}
        self.gone: dict[int, Reading] = {}

    def attach(self, local_rank: int) -> ProgressPage:
        """Let a worker attach; return its page."""
        page = ProgressPage()
        self.pages[local_rank] = page
        self.readers[local_rank] = PageReader(os.dup(page.fd))
        return page

    def detach(self, local_rank: int) -> None:
        """Let it go."""
        reader = self.readers.pop(local_rank)
        self.gone[local_rank] = reader.read()
        reader.close()
        self.pages.pop(local_rank).close()

    def readings(self) -> dict[int, Reading]:
        """Return what is attached."""
        return {rank: reader.read() for rank, reader in self.readers.items()}

    def left(self) -> dict[int, Reading]:
        """Return what has gone."""
        return self.gone


@pytest.fixture
def pages() -> Iterator[Pages]:
    """Return pages that are freed at the end."""
    made = Pages()
    yield made
    for rank in list(made.readers):
        made.detach(rank)


class Followed:
    """The progress of two workers, ranks 4 and 5, which are this process.

    ``places`` are theirs in their collectives, ``busy`` grows while they compute.
    """

    def __init__(
        self,
        pages: Pages,
        lines: ProgressLines | None = None,
        alone: bool = True,
        places: Mapping[int, RankPlace] | None = None,
        computes: bool = False,
    ) -> None:
        self.pages = pages
        self.places = {} if places is None else places
        self.busy = 0
        activity = (lambda _: self.busy) if computes else None
        self.progress = RoundProgress(lines, alone=alone, activity=activity)
        self.living = Living(cast(Round, SimpleNamespace(first_rank=4)))
        for local_rank in (0, 1):
            self.hear(events.WorkerStarted(0, local_rank, os.getpid(), 0.0))

    def hear(self, event: events.Event) -> None:
        """Hear of an event as the loop does."""
        self.living = self.living.after(event)

    def record(self, watched: bool = False) -> ProgressRecord | None:
        """Return what the record says."""
        pages = {**self.pages.left(), **self.pages.readings()}
        return self.progress.record(self.living, pages, watched)

    def look(self) -> Look | None:
        """Return what is seen now, with the collectives if they are to be asked."""
        pages = self.pages.readings()
        places = {} if self.progress.note(pages) else self.places
        return self.progress.look(self.living, pages, places)


def seen(made: Followed) -> Look:
    """Return what is seen of living workers."""
    found = made.look()
    assert found is not None
    return found


# ── which ────────────────────────────────────────────────────────────────────────────────────────


def test_of_a_script_that_shows_nothing_nothing_is_expected(pages: Pages) -> None:
    """Neither computing nor waiting says anything of progress."""
    found = seen(Followed(pages))
    assert (found.source, found.expected) == ("script", False)
    assert found.marks == {4: None, 5: None}


def test_a_script_that_only_attaches_is_not_judged_by_its_silence(pages: Pages) -> None:
    """elaunch.init() makes a few heartbeats by itself."""
    made = Followed(pages)
    page = pages.attach(0)
    assert not seen(made).expected
    for _ in range(SILENT):
        page.beat()
    assert not seen(made).expected
    page.beat()
    found = seen(made)
    assert found.expected and found.marks[4] is not None


@pytest.mark.parametrize("call", ["step", "progress", "status", "enter"])
def test_a_script_that_says_something_is_the_source(pages: Pages, call: str) -> None:
    """At the first word."""
    made = Followed(pages)
    page = pages.attach(1)
    words = {"step": (3,), "progress": (0.5,), "status": ("warm",), "enter": ("eval", None)}
    getattr(page, call)(*words[call])
    found = seen(made)
    assert found.source == "script"
    assert found.marks[4] is None  # of which nothing is seen
    assert found.marks[5] is not None


def test_calls_of_the_checkpoint_are_no_reports(pages: Pages) -> None:
    """A script that saves every hour shows nothing in between; its collectives do."""
    inside = CollectiveCall(61, "all_reduce", waits=True)
    places = {
        4: RankPlace({"0": GroupPlace((4, 5))}, done=SET_UP + 1),
        5: RankPlace({"0": GroupPlace((4, 5), calls=(inside,))}, done=SET_UP + 1),
    }
    made = Followed(pages, places=places)
    page = pages.attach(0)
    page.ready()
    for kind in ("load", "save", "save"):
        section = page.enter("checkpoint", 60.0, kind)
        for _ in range(SILENT):
            page.note("allgather")
        found = seen(made)
        assert found.source == "collectives"
        mark = found.marks[4]
        assert mark is not None and mark.section == "checkpoint" and mark.until is not None
        page.leave(section)
        after = seen(made).marks[4]
        assert after is not None and not after.section and after.value != mark.value
    page.step(1)
    assert seen(made).source == "script"


def test_ranks_that_attach_and_say_nothing_are_not_judged(pages: Pages) -> None:
    """Some scripts speak on rank 0 only."""
    made = Followed(pages)
    pages.attach(0).step(1)
    pages.attach(1).beat()
    marks = seen(made).marks
    assert marks[4] is not None and marks[5] is None


def test_the_script_wins_over_lines(pages: Pages) -> None:
    """The first that is there."""
    made = Followed(pages, ProgressLines("step"))
    assert seen(made).source == "log lines"
    pages.attach(0).step(1)
    assert seen(made).source == "script"


def test_lines_are_expected_where_no_other_node_may_print_them(pages: Pages) -> None:
    """Or where they have come before."""
    lines = ProgressLines("step")
    assert seen(Followed(pages, lines)).expected
    made = Followed(pages, lines, alone=False)
    assert not seen(made).expected
    lines.listener(0)(b"step 1\n")
    made.progress.begin()
    assert seen(made).expected


def test_a_script_that_has_spoken_is_the_source_of_the_next_round_from_its_start(
    pages: Pages,
) -> None:
    """Until it has come and gone."""
    made = Followed(pages)
    pages.attach(0).step(1)
    assert seen(made).source == "script"
    pages.detach(0)
    assert not seen(made).expected
    made.progress.begin()
    found = seen(made)
    assert (found.expected, found.marks) == (True, {4: None, 5: None})


def test_nothing_is_seen_where_no_worker_lives(pages: Pages) -> None:
    """Before the start and after the end."""
    made = Followed(pages)
    assert made.look() is not None
    for local_rank in (0, 1):
        made.hear(events.Exit(0, 4 + local_rank, local_rank, os.getpid(), 0, 1.0))
    assert made.look() is None


# ── what ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_page_shows(pages: Pages) -> None:
    """Every call is progress; the section and the last call are told."""
    made = Followed(pages)
    page = pages.attach(0)
    page.step(41)
    first = seen(made).marks[4]
    page.note("allgather #3")
    page.enter("eval", 900)
    second = seen(made).marks[4]
    assert first is not None and second is not None
    assert first.value != second.value
    assert (first.step, first.section, first.until) == (41, "", None)
    assert (second.section, second.doing, second.begun) == ("eval", "allgather #3", True)
    page.enter("a\nb \x1b[31m", None)
    third = seen(made).marks[4]
    assert third is not None and third.section == "a?b ?[31m"
    assert second.until is not None and second.until > time.monotonic() + 800


def test_what_lines_show() -> None:
    """A match in a whole line; carriage returns end lines too; the group is the step."""
    lines = ProgressLines(r"step (\d+)?")
    hear, other = lines.listener(0), lines.listener(1)
    hear(b"loading\nst")
    assert lines.marks() == {}
    hear(b"ep 7")
    assert lines.marks() == {}
    hear(b"\n")
    other(b"step ten\r")
    assert {rank: (m.count, m.step) for rank, m in lines.marks().items()} == {
        0: (1, 7),
        1: (1, None),
    }
    hear(b"step 8\rstep 9\r\nnothing\nstep \n")
    assert (lines.marks()[0].count, lines.marks()[0].step) == (4, 9)
    lines.begin()
    assert lines.marks() == {}


def test_a_line_without_an_end_takes_no_memory() -> None:
    """And what comes after it is found."""
    lines = ProgressLines("step")
    hear = lines.listener(0)
    for _ in range(100):
        hear(b"x" * LONGEST)
    hear(b"\xff\xfe step\n")
    assert lines.marks() == {}
    hear(b"\xff\xfe step\n")
    assert lines.marks()[0].count == 1


def test_a_pattern_that_backtracks_for_ever() -> None:
    """Another thread runs meanwhile; from then on each line counts, so that nobody is killed."""
    lines = ProgressLines("^(?:a|a)*$")
    hear = lines.listener(0)
    turns = iter(range(1 << 60))
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            next(turns)
            time.sleep(0.001)

    other = threading.Thread(target=turn)
    other.start()
    began = time.process_time()
    hear(b"a" * 50 + b"!\n")
    assert time.process_time() - began < 10 * LONGEST_S
    assert next(turns) > 10
    over.set()
    other.join()
    hear(b"-\n")
    lines.listener(1)(b"-\n")
    assert {rank: mark.count for rank, mark in lines.marks().items()} == {0: 2, 1: 1}


def test_what_lines_are_to_the_judge(pages: Pages) -> None:
    """Ranks that never matched are not watched."""
    lines = ProgressLines(r"step (\d+)")
    made = Followed(pages, lines)
    lines.listener(1)(b"step 3\n")
    found = seen(made)
    mark = found.marks[5]
    assert found.marks[4] is None and mark is not None
    assert (mark.value, mark.begun, mark.step) == (1, True, 3)


# ── the record ───────────────────────────────────────────────────────────────────────────────────


def test_what_the_record_says(pages: Pages) -> None:
    """Fresh at each asking."""
    made = Followed(pages)
    assert made.record() is None
    page = pages.attach(0)
    page.step(41)
    page.progress(0.5)
    page.status("warm")
    page.enter("eval", None)
    page.note("barrier #1")
    found = made.record()
    assert found is not None and found["source"] == "script"
    first, second = found["workers"]
    silent = first.pop("silent_s")
    assert silent is not None and silent < 60
    assert first == {
        "rank": 4,
        "local_rank": 0,
        "step": 41,
        "progress": 0.5,
        "status": "warm",
        "section": "eval",
        "doing": "barrier #1",
    }
    assert (second["rank"], second["step"], second["silent_s"]) == (5, None, None)
    page.step(42)
    again = made.record()
    assert again is not None and again["workers"][0]["step"] == 42


def test_what_was_said_last_is_kept(pages: Pages) -> None:
    """Until the next round begins."""
    made = Followed(pages)
    pages.attach(0).step(7)
    pages.detach(0)
    found = made.record()
    assert found is not None and found["workers"][0]["step"] == 7


def test_the_record_names_the_source_before_the_first_look(pages: Pages) -> None:
    """Where hangs are looked for, there is always one."""
    found = Followed(pages).record(watched=True)
    assert found is not None and found["source"] == "script"
    lines = ProgressLines("x")
    found = Followed(pages, lines).record()
    assert found is not None and found["source"] == "log lines"


# ── collectives ──────────────────────────────────────────────────────────────────────────────────


def test_an_unchanged_script_is_seen_by_its_collectives(pages: Pages) -> None:
    """Once it has a process group; a rank that does not answer is not seen."""
    places: dict[int, RankPlace] = {}
    made = Followed(pages, places=places, computes=True)
    assert seen(made).source == "script"
    inside = CollectiveCall(61, "all_reduce", waits=True)
    places |= {
        4: RankPlace({"0": GroupPlace((4, 5), calls=(inside,))}, done=SET_UP + 1),
        5: RankPlace({"0": GroupPlace((4, 5))}, done=SET_UP),
    }
    first = seen(made)
    assert (first.source, first.expected) == ("collectives", True)
    four, five = first.marks[4], first.marks[5]
    assert four is not None and (four.waits, four.begun, four.early) == (True, True, False)
    assert five is not None and (five.waits, five.begun, five.early) == (False, False, True)
    made.busy += 1  # what a rank does that waits is no progress
    second = seen(made)
    assert second.marks[4] == four and second.marks[5] != five
    places[5] = RankPlace(problem="no answer")
    assert seen(made).marks[5] is None
    pages.attach(0).step(1)
    assert seen(made).source == "script"


@pytest.mark.parametrize(
    "place",
    [RankPlace(problem="its answer is too long"), RankPlace({"0": GroupPlace((4, 5))})],
    ids=["unreadable", "switched off"],
)
def test_a_record_that_shows_nothing_is_no_source(pages: Pages, place: RankPlace) -> None:
    """Nothing would ever move in it."""
    made = Followed(pages, places={4: place, 5: place})
    found = seen(made)
    assert (found.source, found.expected) == ("script", False)


@pytest.mark.parametrize("alone", [True, False])
def test_a_process_group_in_the_making_is_seen_as_long_as_it_is(pages: Pages, alone: bool) -> None:
    """No rank has entered a collective yet, on this node or another."""
    places = {5: RankPlace({"0": GroupPlace((4, 5))}, (CollectiveCall(0, "", waits=True),))}
    made = Followed(pages, alone=alone, places=places)
    found = seen(made)
    assert (found.source, found.expected, found.marks[4]) == ("collectives", True, None)
    assert found.marks[5] is not None and found.marks[5].waits and not found.marks[5].begun
    places[5] = RankPlace({"0": GroupPlace((4, 5))})
    assert (seen(made).source, seen(made).expected) == ("script", False)


def test_what_a_rank_computes_before_it_has_a_process_group_counts_with_auto(pages: Pages) -> None:
    """Others wait for it in ``init_process_group``; once one is in the script, it does not."""
    places = {5: RankPlace({"0": GroupPlace((4, 5))}, (CollectiveCall(0, "", waits=True),))}
    made = Followed(pages, places=places, computes=True)
    first = seen(made).marks[4]
    made.busy += 1
    assert first is not None and seen(made).marks[4] not in (None, first)
    places[5] = RankPlace({"0": GroupPlace((4, 5))}, done=SET_UP + 1)
    assert seen(made).marks[4] is None


def test_a_script_that_has_reported_and_detached_is_not_judged_by_its_collectives(
    pages: Pages,
) -> None:
    """It may upload for long after its last step."""
    place = RankPlace({"0": GroupPlace((4, 5))}, done=SET_UP + 1)
    made = Followed(pages, places={4: place, 5: place})
    assert seen(made).source == "collectives"
    pages.attach(0).step(1)
    assert seen(made).source == "script"
    pages.detach(0)
    found = seen(made)
    assert (found.source, found.expected) == ("script", False)
