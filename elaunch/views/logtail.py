"""The newest lines of a run's logs that fit a filter, read from the end, and those that come.

Files are read backwards in chunks, always the one whose next line came last, until there are LINES
lines or its seconds are over. Where more is left, ``older`` has how far each file was read,
and another search goes on from there.
"""

from __future__ import annotations

import contextlib
import heapq
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from elaunch.errors import RunDirError
from elaunch.runs.directory import RunDir, is_live
from elaunch.views.logs import Choice, FollowedLog, Reader, nodes_of

LINES: Final = 500
BUDGET_S: Final = 0.08
SEEN_S: Final = 1.5
"""Seconds for which a search takes the files of a live run to be as they were seen: longer than
between two looks of one that follows them, so that it does not wait for the next."""
FIRST_CHUNK: Final = 1 << 14
CHUNK: Final = 1 << 20
LONGEST: Final = 4000
MOST_CURSORS: Final = 64

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")

Line = tuple[float, int, str, int, str]
"""When it came, rank, stream, round, text."""


@dataclass(frozen=True)
class LogFilter:
    """Which lines are asked for: of these files, with this text in any case."""

    choice: Choice
    text: str = ""

    @property
    def needle(self) -> bytes:
        """The text as it is looked for."""
        return self.text.lower().encode("utf-8", "surrogateescape")


class RunLogs:
    """The log files of one run, or of one ``node`` of it, for several readers at once."""

    def __init__(self, run: RunDir, environ: Mapping[str, str], node: str | None = None) -> None:
        self.run = run
        self._environ = environ
        self._node = node
        self._lock = threading.Lock()
        self._places: list[str] = []
        self._reader: Reader | None = None
        self._seen_until = 0.0
        self._ended: tuple[int, int] | None = None

    def files(self, choice: Choice, anew: bool = False) -> dict[str, FollowedLog]:
        """Return what there is of the chosen files, by name; raises UsageError, RunDirError.

        Without ``anew`` as they were seen in the last SEEN_S, or since the run has ended: to look
        at those of 2,000 ranks takes as long as a filter may.
        """
        reader = self._reader
        if reader is None or anew or not self._is_known():
            with self._lock:
                reader = self._look()
        found = filter(choice.takes, reader.chosen())
        return {f"{file.node.rank}/{file.name}": file for file in found}

    def _is_known(self) -> bool:
        if self._ended is not None:  # until another run has its directory
            return self._ended == _version(self.run)
        return time.monotonic() < self._seen_until

    def _look(self) -> Reader:
        # Asked first: what a run that has ended wrote is there.
        version, live = _version(self.run), is_live(self.run)
        nodes = nodes_of(self.run, self._node, self._environ)
        places = [node.place for node in nodes]
        reader = self._reader
        if reader is None or places != self._places:
            reader = Reader(self.run, nodes, Choice())
        reader.look()
        self._reader, self._places = reader, places
        self._seen_until, self._ended = time.monotonic() + SEEN_S, None if live else version
        return reader


def _version(run: RunDir) -> tuple[int, int] | None:
    """Return what differs once the record of a run was written again; None where there is none."""
    with contextlib.suppress(OSError):
        info = run.state_file.stat()
        return info.st_ino, info.st_mtime_ns
    return None


def _time_at(file: FollowedLog, offset: int) -> float:
    """Return when the byte at ``offset`` came."""
    at = bisect_right(file.offsets, offset)
    return file.times[at - 1] if at else file.changed


def _line(file: FollowedLog, came: float, raw: bytes) -> Line:
    """Return a line as it is sent: without escapes, of a progress bar the last state."""
    last = raw.rstrip(b"\r").rpartition(b"\r")[2][: 4 * LONGEST]
    text = _ESCAPES.sub("", last.decode(errors="replace"))[:LONGEST]
    return came, file.rank, file.name.stream, file.name.round, text


def _bytes(file: FollowedLog, start: int, end: int) -> bytes:
    """Return a part of a file; the agent of another node sends no more than it likes at once."""
    data = b""
    while len(data) < end - start:
        more = file.node.tree.read(str(file.name), start + len(data), end - start - len(data))
        if not more:
            break
        data += more
    return data


class Backwards:
    """Reads one file from ``begin`` to its start; ``begin`` is where the next search goes on."""

    def __init__(self, file: FollowedLog, begin: int, needle: bytes) -> None:
        self.file = file
        self.begin = begin
        self._needle = needle
        self._chunk = FIRST_CHUNK
        self._lines = self._read()

    def next(self) -> tuple[int, bytes | None] | None:
        """Return the next line with its offset; None for it where a chunk had none, or at the end.

        Raises RunDirError.
        """
        try:
            return next(self._lines, None)
        except OSError as error:
            raise RunDirError(f"cannot read {self.file.name}: {error.strerror or error}") from error

    def _read(self) -> Iterator[tuple[int, bytes | None]]:
        tail, at = b"", self.begin
        while at > 0:
            start = max(0, at - self._chunk)
            data = _bytes(self.file, start, at)
            body, at, self._chunk = data + tail, start, min(CHUNK, 4 * self._chunk)
            # The first line may begin in the chunk before; of one that is too long a part is left.
            cut = body.find(b"\n") + 1 if start else 0
            if start and cut in (0, len(body)) and len(body) < CHUNK:
                tail = body
                continue
            tail, body = body[:cut], body[cut:]
            if body:
                yield from self._fitting(start + len(tail), body)
            self.begin = start + len(tail)
            yield self.begin, None
        self.begin = 0

    def _fitting(self, start: int, body: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of ``body``, which begins at ``start``, from the last to the first."""
        if self._needle and self._needle not in body.lower():
            return
        end = start + len(body) + (not body.endswith(b"\n"))
        for line in reversed(body.removesuffix(b"\n").split(b"\n")):
            end -= len(line) + 1
            if not self._needle or self._needle in line.lower():
                self.begin = end
                yield end, line


def search(
    logs: RunLogs,
    wanted: LogFilter,
    older: Mapping[str, int] | None = None,
    *,
    most: int | None = None,
    seconds: float | None = None,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the ``most`` newest lines that fit, and how far each file is known: its size.

    ``seconds``: for how long it looks at most; BUDGET_S if it is not given.
    """
    files = logs.files(wanted.choice)
    ends = {name: file.size for name, file in files.items()}
    begins = ends if older is None else {n: min(a, ends[n]) for n, a in older.items() if n in ends}
    readers = {n: Backwards(files[n], at, wanted.needle) for n, at in begins.items() if at}
    due = [(-_time_at(files[n], reader.begin - 1), n) for n, reader in readers.items()]
    heapq.heapify(due)
    found: list[Line] = []
    until = time.monotonic() + (BUDGET_S if seconds is None else seconds)
    while due and len(found) < (most or LINES) and time.monotonic() < until:
        name = due[0][1]
        got = readers[name].next()
        if got is None:
            heapq.heappop(due)
            continue
        start, raw = got
        if raw is not None:
            found.append(_line(files[name], _time_at(files[name], start + len(raw)), raw))
        # The line before it has its end there, and comes when no other file has a later one.
        heapq.heapreplace(due, (-_time_at(files[name], max(0, start - 1)), name))
    left = {name: reader.begin for name, reader in readers.items() if reader.begin > 0}
    document = {
        "lines": found[::-1],
        "older": left if 0 < len(left) <= MOST_CURSORS else None,
        "files": len(files),
        "bytes": sum(ends.values()),
        "left": sum(left.values()),
    }
    return document, ends


def newer(
    logs: RunLogs, wanted: LogFilter, ends: dict[str, int], held: dict[str, bytes]
) -> list[Line]:
    """Return whole lines that came since, of very many the last."""
    found: list[tuple[float, FollowedLog, bytes]] = []
    for name, file in logs.files(wanted.choice, anew=True).items():
        at = ends.get(name, 0)
        if file.size < at:  # it was cut
            at = ends[name] = file.size
            held.pop(name, None)
        if file.size == at:
            continue
        if name not in held:  # the line that was not whole when it was read
            before = _bytes(file, max(0, at - LONGEST), at)
            held[name] = before.rpartition(b"\n")[2]
        if file.size - at > CHUNK:
            at, held[name] = file.size - CHUNK, b""
        raw = file.node.tree.read(str(file.name), at, CHUNK)
        ends[name] = at + len(raw)
        *lines, rest = (held.get(name, b"") + raw).split(b"\n")
        held[name] = rest[-CHUNK:]  # a line may never end
        came = _time_at(file, at)
        fitting = [one for one in lines if not wanted.needle or wanted.needle in one.lower()]
        found += [(came, file, one) for one in fitting[-LINES:]]
    # Lines of one file came in their order, whatever they say.
    found.sort(key=lambda one: (one[0], one[1].rank, one[1].name.stream, one[1].name.round))
    return [_line(file, came, line) for came, file, line in found[-2 * LINES :]]
