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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from elaunch.agent.hangs.collectives import OUTSIDE, RankPlace
from elaunch.agent.hangs.judge import Look, Mark, Source
from elaunch.agent.policy import events
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


Readings = Callable[[], Mapping[int, Reading]]


class RoundProgress:
    """Follows the workers of the round that runs; any thread may ask.

    The loop reports the living workers (:meth:`begin`, :meth:`hear`). Only the watchdog, which is
    there if it is ``watched``, may call :meth:`look`; :meth:`record` is for everybody.

    Args:
        readings: returns the pages of the workers that are attached.
        left: returns the last pages of workers that are not attached any more.
        lines: of the log pump, if a pattern is given.
        alone: no other node takes part: then lines that match come from here, or from nowhere.
        watched: see above.
        collectives: returns where the workers are whose pids it is given by rank.
        activity: returns a number that grows while the process with that pid gets anything done.
    """

    def __init__(
        self,
        readings: Readings,
        left: Readings,
        lines: ProgressLines | None = None,
        *,
        alone: bool = True,
        watched: bool = True,
        collectives: Callable[[Mapping[int, int]], Mapping[int, RankPlace]] | None = None,
        activity: Callable[[int], int] | None = None,
    ) -> None:
        self._readings = readings
        self._left = left
        self._lines = lines
        self._alone = alone
        self._watched = watched
        self._collectives = collectives
        self._activity = activity
        self._lock = threading.Lock()
        self._first_rank = 0
        self._pids: dict[int, int] = {}
        self._source: Source | None = None
        self._speaks = False
        self._seen_pages = False
        self._first_beats: dict[int, int] = {}
        self._speakers: set[int] = set()
        self._collective = False
        self._making = False

    def begin(self, first_rank: int) -> None:
        """Forget the workers of the round before; the first of the next has ``first_rank``."""
        if self._lines is not None:
            self._lines.begin()
        with self._lock:
            self._first_rank = first_rank
            self._pids = {}
            self._seen_pages, self._first_beats, self._speakers = False, {}, set()

    def hear(self, event: events.Event) -> None:
        """Take down which workers live."""
        with self._lock:
            if isinstance(event, events.WorkerStarted):
                self._pids[event.local_rank] = event.pid
            elif isinstance(event, events.Exit):
                self._pids.pop(event.local_rank, None)

    def workers(self) -> dict[int, tuple[int, int]]:
        """Return the local rank and the pid of each living worker, by its rank in the job."""
        with self._lock:
            return {self._first_rank + k: (k, pid) for k, pid in sorted(self._pids.items())}

    def look(self, by_waits: bool = False) -> Look | None:
        """Return how the living workers are now; None while there is none.

        ``by_waits``: by their collectives whatever else they show; None while none is known.
        """
        readings = self._readings()
        with self._lock:
            if not self._pids:
                return None
            self._note(readings)
            shows = bool(self._lines or self._speaks)
            asks = self._collectives is not None and (by_waits or not shows)
        places = self._places() if asks else {}
        with self._lock:
            shown = any(place.done and not place.problem for place in places.values())
            self._collective = self._collective or shown
            self._making = any(place.receives for place in places.values())
            if by_waits:
                has_left = self._speaks and not self._reports(readings)
                if has_left or not (self._collective or self._making):
                    return None
                source: Source = "collectives"
            else:
                self._source = source = self._choose(readings)
            expected = self._expects(source, readings)
            pids, first = dict(self._pids), self._first_rank
        marks = self._marks(source, pids, readings)
        if source == "collectives":
            outside = None if shown or self._activity is None else OUTSIDE
            at = {k: places.get(first + k, outside) for k in pids}
            marks = {k: self._of_place(at[k], pid, readings.get(k)) for k, pid in pids.items()}
        by_rank = {first + k: mark for k, mark in marks.items()}
        return Look(time.monotonic(), source, by_rank, expected=expected)

    def _places(self) -> Mapping[int, RankPlace]:
        assert self._collectives is not None  # its caller has looked
        return self._collectives({r: pid for r, (_, pid) in self.workers().items()})

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

    def _note(self, readings: Mapping[int, Reading]) -> None:
        for local_rank, reading in readings.items():
            first = self._first_beats.setdefault(local_rank, reading.own_beats)
            if _says(reading) or reading.own_beats - first > SILENT:
                self._speakers.add(local_rank)
        self._speaks = self._speaks or bool(self._speakers)
        self._seen_pages = self._seen_pages or bool(readings)

    def _choose(self, readings: Mapping[int, Reading]) -> Source:
        if self._reports(readings):
            return "script"
        if self._lines is not None:
            return "log lines"
        seen = self._collective or self._making
        return "collectives" if seen and not self._speaks else "script"

    def _reports(self, readings: Mapping[int, Reading]) -> bool:
        """Whether the script has reported in this run, and has not detached from this round."""
        return self._speaks and bool(readings or not self._seen_pages)

    def _expects(self, source: Source, readings: Mapping[int, Reading]) -> bool:
        """Whether a source that shows nothing means that there is no progress."""
        lines = self._lines
        if source == "collectives":
            return True
        if source == "script" or lines is None:
            return self._reports(readings)
        return self._alone or lines.ever

    def _marks(
        self, source: Source, pids: Mapping[int, int], readings: Mapping[int, Reading]
    ) -> dict[int, Mark | None]:
        if source == "script":
            heard = self._speakers & readings.keys()
            return {k: _of_page(readings[k]) if k in heard else None for k in pids}
        found = {} if self._lines is None else self._lines.marks()
        return {k: _of_lines(found[k]) if k in found else None for k in pids}

    def record(self) -> ProgressRecord | None:
        """Return what the run's record says of progress now; None if nothing is known."""
        readings, left = self._readings(), self._left()
        lines = self._lines
        marks = {} if lines is None else lines.marks()
        with self._lock:
            self._note(readings)
            pages, source = {**left, **readings}, self._source
            if source is None and self._watched:
                source = self._choose(readings)
            first, living = self._first_rank, sorted({*self._pids, *pages, *marks})
        if source is None:
            if not (pages or lines):
                return None
            source = "script" if pages else "log lines"
        now = time.monotonic()
        workers = [_worker(first, k, pages.get(k), marks.get(k), now) for k in living]
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


def _of_lines(found: LineMark) -> Mark:
    return Mark(found.count, True, found.step, said_at=found.at)


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
