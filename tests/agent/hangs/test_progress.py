"""Which source tells of the workers' progress, and what each of them sees."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elaunch.agent.hangs.checkpoints import CheckpointGrowth, CheckpointPace, Growth, look
from elaunch.agent.hangs.cputime import Used, tree_seconds
from elaunch.agent.hangs.history import Look, Mark
from elaunch.agent.hangs.loglines import LONGEST, ProgressLines
from elaunch.agent.hangs.progress import BETWEEN_SAVES, SILENT, ProgressSources, RoundProgress
from elaunch.agent.policy import events
from elaunch.wire.progress import PageReader, ProgressPage, Reading
from tests.agent.logrig import eventually


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


def progress(
    pages: Pages,
    lines: ProgressLines | None = None,
    growth: CheckpointGrowth | None = None,
    watched: bool = True,
) -> RoundProgress:
    """Return the progress of two workers, ranks 4 and 5, which are this process."""
    made = RoundProgress(ProgressSources(pages.readings, pages.left, lines, growth), watched)
    begin(made)
    return made


def begin(made: RoundProgress) -> None:
    """Start a round."""
    made.begin(first_rank=4)
    for local_rank in (0, 1):
        made.hear(events.WorkerStarted(0, local_rank, os.getpid(), 0.0))


def seen(made: RoundProgress) -> Look:
    """Return what is seen now."""
    found = made.look()
    assert found is not None
    return found


# ── which ────────────────────────────────────────────────────────────────────────────────────────


def test_cpu_time_is_the_last_resort(pages: Pages) -> None:
    """Of a script that says nothing, there is nothing else."""
    made = progress(pages)
    found = seen(made)
    assert found.source == "CPU time"
    assert found.marks.keys() == {4, 5}


def test_a_script_that_only_attaches_is_not_judged_by_its_silence(pages: Pages) -> None:
    """elaunch.init() makes a few heartbeats by itself."""
    made = progress(pages)
    page = pages.attach(0)
    assert seen(made).source == "CPU time"
    for _ in range(SILENT):
        page.beat()
    assert seen(made).source == "CPU time"
    page.beat()
    assert seen(made).source == "script"


@pytest.mark.parametrize("call", ["step", "progress", "status", "enter"])
def test_a_script_that_says_something_is_the_source(pages: Pages, call: str) -> None:
    """At the first word."""
    made = progress(pages)
    page = pages.attach(1)
    words = {"step": (3,), "progress": (0.5,), "status": ("warm",), "enter": ("eval", None)}
    getattr(page, call)(*words[call])
    found = seen(made)
    assert found.source == "script"
    assert found.marks[4] is None  # of which nothing is seen
    assert found.marks[5] is not None


def test_ranks_that_attach_and_say_nothing_are_not_judged(pages: Pages) -> None:
    """Some scripts speak on rank 0 only."""
    made = progress(pages)
    pages.attach(0).step(1)
    pages.attach(1).beat()
    marks = seen(made).marks
    assert marks[4] is not None and marks[5] is None


def test_the_script_wins_over_lines_and_these_over_the_rest(pages: Pages, tmp_path: Path) -> None:
    """The first that is there."""
    growth = CheckpointGrowth(tmp_path, None, 100.0)
    growth._pace = CheckpointPace(Growth(2, 20, 0), 5.0, 2, 30.0)
    lines = ProgressLines("step")
    made = progress(pages, lines, growth)
    assert seen(made).source == "log lines"
    pages.attach(0).step(1)
    assert seen(made).source == "script"
    assert seen(progress(pages=Pages(), growth=growth)).source == "checkpoints"


def test_a_script_that_has_spoken_is_the_source_of_the_next_round_from_its_start(
    pages: Pages,
) -> None:
    """Until it has come and gone."""
    made = progress(pages)
    pages.attach(0).step(1)
    assert seen(made).source == "script"
    pages.detach(0)
    assert seen(made).source == "CPU time"
    begin(made)
    found = seen(made)
    assert (found.source, found.marks) == ("script", {4: None, 5: None})


def test_nothing_is_seen_where_no_worker_lives(pages: Pages) -> None:
    """Before the start and after the end."""
    made = RoundProgress(ProgressSources(pages.readings, pages.left), True)
    assert made.look() is None
    begin(made)
    for local_rank in (0, 1):
        made.hear(events.WorkerExited(0, local_rank, os.getpid(), 0, 1.0))
    assert made.look() is None


def test_workers_that_are_held(pages: Pages) -> None:
    """And let go."""
    made = progress(pages)
    for on in (True, False):
        made.hear(events.WorkersHeld(on))
        assert seen(made).held is on


# ── what ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_page_shows(pages: Pages) -> None:
    """Every call is progress; the section and the last call are told."""
    made = progress(pages)
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


def test_what_lines_are_to_the_judge(pages: Pages) -> None:
    """Ranks that never matched are not watched."""
    lines = ProgressLines(r"step (\d+)")
    made = progress(pages, lines)
    lines.listener(1)(b"step 3\n")
    found = seen(made)
    mark = found.marks[5]
    assert found.marks[4] is None and mark is not None
    assert (mark.value, mark.begun, mark.step) == (1, True, 3)


def test_what_checkpoints_are_to_the_judge(pages: Pages, tmp_path: Path) -> None:
    """All ranks are told of by each new one; pauses may be longer than any before."""
    growth = CheckpointGrowth(tmp_path, None, 100.0)
    growth._pace = CheckpointPace(Growth(2, 20, 0), 5.0, 2, 30.0)
    found = seen(progress(pages, growth=growth))
    assert found.marks == dict.fromkeys((4, 5), Mark(Growth(2, 20, 0), True, 20))
    assert found.least == BETWEEN_SAVES * 30.0


def test_checkpoints_are_looked_at_while_nothing_better_is_known(
    pages: Pages, tmp_path: Path
) -> None:
    """A directory in which they come at a pace."""
    with ExitStack() as stack:
        growth = CheckpointGrowth(tmp_path, "step_*.pt", 0.02)
        growth.start()
        stack.callback(growth.close)
        made = progress(pages, growth=growth)
        for step in (10, 20, 30):
            assert seen(made).source == "CPU time"
            (tmp_path / f"step_{step}.pt").touch()

            def is_seen(step: int = step) -> bool:
                newest = growth.pace.growth
                return newest is not None and newest.step == step

            eventually(is_seen)
        assert seen(made).source == "checkpoints"
        pages.attach(0).step(1)
        assert seen(made).source == "script"
        assert not growth.wanted


def test_what_is_in_a_directory(tmp_path: Path) -> None:
    """Names that elaunch knows, or the user's; a file that changes is progress as well."""
    assert look(tmp_path / "missing", None) is None
    assert look(tmp_path, None) is None
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "notes.txt").touch()
    found = look(tmp_path, None)
    assert found is not None and (found.number, found.step) == (1, 20)
    (tmp_path / "m_7.pt").touch()
    os.utime(tmp_path / "m_7.pt", ns=(1, 1))
    assert look(tmp_path, "m_*.pt") == Growth(1, 7, 1)


def test_the_pace_of_checkpoints() -> None:
    """Known after two new ones; the longest pause is kept."""
    pace = CheckpointPace().seen(Growth(1, 10, 0), 0.0)
    assert not pace.known
    pace = pace.seen(Growth(1, 10, 5), 50.0)
    assert pace.news == 0
    pace = pace.seen(Growth(2, 20, 0), 100.0)
    assert (pace.known, pace.pause) == (False, 0.0)
    pace = pace.seen(Growth(3, 30, 0), 160.0).seen(Growth(2, 40, 0), 180.0)
    assert (pace.known, pace.pause) == (True, 60.0)


def test_cpu_time_of_a_tree() -> None:
    """What a child uses is its parent's, also when that child has ended."""
    code = (
        "import subprocess, sys, time\n"
        "busy = 'import time\\nt = time.monotonic()\\n"
        "while time.process_time() < 0.3: pass'\n"
        "subprocess.run([sys.executable, '-c', busy])\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"done\n"
        assert tree_seconds(process.pid) >= 0.3
        process.stdin.close()
    assert tree_seconds(process.pid) == 0.0


def test_what_counts_as_use_of_the_cpu() -> None:
    """Not a process that wakes up now and then for its own threads."""
    used = Used(0, 10.0, 100.0)
    assert used.again(10.02, 101.0).count == 0
    assert used.again(10.05, 101.0).count == 1
    assert used.again(10.5, 160.0).count == 0  # half a second in a minute
    assert used.again(12.0, 160.0) == Used(1, 12.0, 160.0)
    assert used.again(3.0, 101.0).again(3.1, 102.0).count == 1  # a child took its time away


# ── the record ───────────────────────────────────────────────────────────────────────────────────


def test_what_the_record_says(pages: Pages) -> None:
    """Fresh at each asking."""
    made = progress(pages, watched=False)
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
    made = progress(pages, watched=False)
    pages.attach(0).step(7)
    pages.detach(0)
    found = made.record()
    assert found is not None and found["workers"][0]["step"] == 7


def test_the_record_names_the_source_before_the_first_look(pages: Pages) -> None:
    """Where hangs are looked for, there is always one."""
    found = progress(pages).record()
    assert found is not None and found["source"] == "CPU time"
    lines = ProgressLines("x")
    found = progress(pages, lines, watched=False).record()
    assert found is not None and found["source"] == "log lines"
