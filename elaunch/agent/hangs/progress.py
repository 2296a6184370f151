"""How far the workers of a round are, by what their script shows of it.

============  ==================================================  =================================
source        used when                                           a worker's progress
============  ==================================================  =================================
script        the script reports something by itself: a step, a   its page (elaunch.wire.progress):
              section, or more than SILENT heartbeats; and        any call of the script API
              where no pattern is given
log lines     ``--progress-regex`` is given                       a line that matches
collectives   neither of these in any round, and torch's record   it enters a collective, or leaves
              has shown that a worker has entered a collective,   one (elaunch.wire.recorder)
              or one waits now in the making of a group
============  ==================================================  =================================

A script that only calls ``elaunch.init()``, or ``ctx.checkpoint`` now and then, is not judged by
what it never reports, nor are the ranks of one that reports on rank 0 only. Once a script has
reported, its next rounds are watched by that from the first moment, until all have detached. What a
process does beyond that (its use of the CPU, files that it writes) is no sign of progress: a rank
that hangs in a collective computes. Only with ``auto``, and of a rank that is in no collective, it
is: nothing else tells an evaluation that it makes while the others wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from elaunch.agent.hangs.collectives import OUTSIDE, RankPlace
from elaunch.agent.hangs.hang import Look, Mark, Source
from elaunch.agent.hangs.living import Living
from elaunch.runs.record import ProgressRecord, WorkerProgressRecord
from elaunch.wire.progress import Reading

if TYPE_CHECKING:
    import regex

SILENT: Final = 3
"""Heartbeats that elaunch.init() makes by itself, and a few more."""
SET_UP: Final = 40
"""Beginnings and ends of collectives that may come before the first step, which is compiled."""
LONGEST: Final = 4096
"""Bytes of a line of output that are looked at."""
LONGEST_S: Final = 1.0

log = logging.getLogger("elaunch")


class LineMark(Struct, frozen=True):
    """The matching lines of one worker so far; ``at`` is when the newest came (monotonic)."""

    count: int
    step: int | None
    at: float


class ProgressLines:
    """Counts the lines of each worker of a round that match ``--progress-regex``.

    It is a hook in the log pump. A line of a worker's stdout or stderr that the expression matches
    is progress of that worker; a group in the expression is its step. Lines end with a line feed
    or, as progress bars do it, with a carriage return. The search takes neither Python's lock nor
    more than LONGEST_S of processor time: the agent goes on whatever the pattern.
    """

    def __init__(self, pattern: str) -> None:
        import regex  # for those alone who give a pattern

        self._pattern: regex.Pattern[str] | None = regex.compile(pattern)
        self._lock = threading.Lock()
        self._marks: dict[int, LineMark] = {}
        self.ever = False
        """Whether any line of this run has matched."""

    def begin(self) -> None:
        """Forget the lines of the round before."""
        with self._lock:
            self._marks = {}

    def marks(self) -> dict[int, LineMark]:
        """Return what is known by local rank; of workers without a matching line nothing."""
        with self._lock:
            return dict(self._marks)

    def listener(self, local_rank: int) -> Callable[[bytes], None]:
        """Return what takes the bytes of one stream of a worker, as they are read."""
        held = bytearray()

        def hear(data: bytes) -> None:
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end:
                self._search(local_rank, bytes(held) + data[:end])
                held.clear()
            held.extend(data[end : end + max(0, LONGEST - len(held))])

        return hear

    def _search(self, local_rank: int, text: bytes) -> None:
        for line in filter(None, text.replace(b"\r", b"\n").split(b"\n")):
            if self._pattern is None:
                self._note(local_rank, None)
                continue
            try:
                string = line[:LONGEST].decode("utf-8", "replace")
                found = self._pattern.search(string, timeout=LONGEST_S, concurrent=True)
            except TimeoutError:
                self._pattern = None
                log.warning(
                    "--progress-regex took longer than %g s to match a line: from now on each line "
                    "of output counts as progress. Avoid repetitions within repetitions, as in "
                    "(a+)+",
                    LONGEST_S,
                )
                self._note(local_rank, None)
                continue
            if found is not None:
                self._note(local_rank, _step(found))

    def _note(self, local_rank: int, step: int | None) -> None:
        with self._lock:
            before = self._marks.get(local_rank)
            count = 1 if before is None else before.count + 1
            known = step if step is not None or before is None else before.step
            self.ever = True
            self._marks[local_rank] = LineMark(count, known, time.monotonic())


def _step(found: regex.Match[str]) -> int | None:
    if found.re.groups == 0 or found[1] is None:
        return None
    try:
        return int(found[1].replace(",", ""))
    except ValueError:  # the group took something else; the line is progress all the same
        return None


Pages = Mapping[int, Reading]
"""By local rank."""


class RoundProgress:
    """Follows the workers of the round that runs; one thread looks, any may ask for the record.

    Args:
        lines: of the log pump, if a pattern is given.
        alone: no other node takes part: then lines that match come from here, or from nowhere.
        activity: returns a number that grows while the process with that pid gets anything done.
    """

    def __init__(
        self,
        lines: ProgressLines | None = None,
        *,
        alone: bool = True,
        activity: Callable[[int], int] | None = None,
    ) -> None:
        self._lines = lines
        self._alone = alone
        self._activity = activity
        self._source: Source | None = None
        self._speaks = False
        self._collective = False
        self._making = False
        self.begin()

    def begin(self) -> None:
        """Forget the workers of the round before."""
        self._seen_pages, self._first_beats = False, dict[int, int]()
        self._speakers: set[int] = set()

    def note(self, pages: Pages) -> bool:
        """Take down what workers report; whether they show anything but their collectives."""
        for local_rank, reading in pages.items():
            first = self._first_beats.setdefault(local_rank, reading.own_beats)
            if _says(reading) or reading.own_beats - first > SILENT:
                self._speakers.add(local_rank)
        self._speaks = self._speaks or bool(self._speakers)
        self._seen_pages = self._seen_pages or bool(pages)
        return bool(self._lines or self._speaks)

    def look(
        self, living: Living, pages: Pages, places: Mapping[int, RankPlace], by_waits: bool = False
    ) -> Look | None:
        """Return how the living workers are now; None while there is none.

        ``places`` are theirs by their collectives, as far as those were asked; with ``by_waits``
        only these count, whatever else there is; None while none is known.
        """
        if not living.pids:
            return None
        places = {rank: place for rank, place in places.items() if rank in living.pids}
        shown = any(place.done and not place.problem for place in places.values())
        self._collective = self._collective or shown
        self._making = any(place.receives for place in places.values())
        if by_waits:
            has_left = self._speaks and not self._reports(pages)
            if has_left or not (self._collective or self._making):
                return None
            source: Source = "collectives"
        else:
            self._source = source = self._choose(pages)
        own = {rank - living.first_rank: rank for rank in living.pids}
        marks = self._marks(source, own, pages)
        if source == "collectives":
            outside = None if shown or self._activity is None else OUTSIDE
            marks = {
                k: self._of_place(places.get(rank, outside), living.pids[rank], pages.get(k))
                for k, rank in own.items()
            }
        by_rank = {rank: marks[k] for k, rank in own.items()}
        expected = self._expects(source, pages)
        return Look(time.monotonic(), source, by_rank, expected=expected)

    def _of_place(self, place: RankPlace | None, pid: int, page: Reading | None) -> Mark | None:
        if place is None or place.problem:
            return None
        busy = 0 if self._activity is None or place.waits else self._activity(pid)
        value = (place.done, tuple(sorted(place.groups.items())), busy)
        early = place.done <= SET_UP
        mark = Mark(value, not early, waits=place.waits, early=early)
        if page is None:
            return mark
        # A script that has no reports but its checkpoints: each call of those is a section.
        shown = _of_page(page)
        return structs.replace(
            mark, value=(value, page.beats), section=shown.section, until=shown.until
        )

    def _choose(self, pages: Pages) -> Source:
        if self._reports(pages):
            return "script"
        if self._lines is not None:
            return "log lines"
        seen = self._collective or self._making
        return "collectives" if seen and not self._speaks else "script"

    def _reports(self, pages: Pages) -> bool:
        """Whether the script has reported in this run, and has not detached from this round."""
        return self._speaks and bool(pages or not self._seen_pages)

    def _expects(self, source: Source, pages: Pages) -> bool:
        """Whether a source that shows nothing means that there is no progress."""
        lines = self._lines
        if source == "collectives":
            return True
        if source == "script" or lines is None:
            return self._reports(pages)
        return self._alone or lines.ever

    def _marks(self, source: Source, own: Iterable[int], pages: Pages) -> dict[int, Mark | None]:
        if source == "script":
            heard = self._speakers & pages.keys()
            return {k: _of_page(pages[k]) if k in heard else None for k in own}
        found = {} if self._lines is None else self._lines.marks()
        shown = {k: Mark(one.count, True, one.step, said_at=one.at) for k, one in found.items()}
        return {k: shown.get(k) for k in own}

    def record(self, living: Living, pages: Pages, watched: bool = False) -> ProgressRecord | None:
        """Return what the run's record says of progress now; None if nothing is known.

        ``pages`` are also those of workers that are not attached any more.
        """
        marks = {} if self._lines is None else self._lines.marks()
        source = self._source or (self._choose(pages) if watched else None)
        if source is None:
            if not (pages or self._lines):
                return None
            source = "script" if pages else "log lines"
        now, first = time.monotonic(), living.first_rank
        there = sorted({*(rank - first for rank in living.pids), *pages, *marks})
        workers = [_worker(first, k, pages.get(k), marks.get(k), now) for k in there]
        return {"source": source, "limit_s": None, "learning": False, "workers": workers}


def _says(reading: Reading) -> bool:
    """Whether the script itself has reported something, beyond being there and its checkpoints."""
    return bool(
        reading.step is not None
        or reading.progress is not None
        or (reading.section and reading.kind not in ("load", "save"))
        or reading.status
    )


def _of_page(reading: Reading) -> Mark:
    return Mark(
        value=(reading.beats, reading.step),
        begun=True,
        step=reading.step,
        section=_one_line(reading.section),
        until=reading.section_until,
        doing=_one_line(reading.doing),
        said_at=reading.beat_at,
    )


def _one_line(text: str) -> str:
    """Return a text of the script's as it may stand in a log line."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _worker(
    first: int, local_rank: int, page: Reading | None, line: LineMark | None, now: float
) -> WorkerProgressRecord:
    said_at = page.beat_at if page is not None else line.at if line is not None else None
    step = None if page is None else page.step
    return {
        "rank": first + local_rank,
        "local_rank": local_rank,
        "step": line.step if step is None and line is not None else step,
        "progress": None if page is None else page.progress,
        "status": "" if page is None else page.status,
        "section": "" if page is None else page.section,
        "doing": "" if page is None else page.doing,
        "silent_s": None if said_at is None else max(0.0, now - said_at),
    }
