"""Reading the rows of a run: of all its directories, with what a later round made void set apart.

A run that was started again under the same id has a directory for each start. They are read in the
order in which they began; where one began after another had ended, it supersedes rows of that one
as a later round does. Directories of one time are nodes of one job that share a disk.

Nothing is locked: files are only appended to, or replaced as a whole, and half a line at the end is
one that is being written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from elaunch.errors import RunDirError
from elaunch.runs.directory import RunDir, find, handle, is_live, run_id_of, runs_of
from elaunch.training.metrics.files import ROUNDS, ROWS, SUPERSEDED, read_rounds
from elaunch.training.metrics.history import Beginning, RowKey, row_key

_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


class StoredRow(NamedTuple):
    """A row as it is on disk; ``superseded`` if a later round began before it.

    There may be millions, so only what they are chosen by is taken out of the line beforehand.
    """

    place: RowKey
    line: bytes
    superseded: bool

    @property
    def values(self) -> dict[str, Any]:
        """The columns and the metrics."""
        return decoded(self.line)


@dataclass(frozen=True)
class MetricRows:
    """All rows of a run, by step and rank; ``torn`` counts lines that are no rows."""

    rows: tuple[StoredRow, ...]
    torn: int
    directories: tuple[Path, ...]


@dataclass(frozen=True)
class Start:
    """One directory of a run: when it began and ended, and where its rounds began."""

    path: Path
    began: float
    ended: float
    rounds: Mapping[int, Beginning]


def directories(run: str, environ: Mapping[str, str]) -> list[RunDir]:
    """Return what ``run`` names: all directories of a run id, or the one of a path or a number.

    Raises UsageError with the nearest names.
    """
    found = find(run, environ)
    run_id = run_id_of(found)
    if run != run_id and (os.sep in run or run in (found.path.name, handle(found))):
        return [found]
    return runs_of(run_id, environ) or [found]


def read(runs: Sequence[RunDir]) -> MetricRows:
    """Return the rows of a run's directories; raise RunDirError for one that cannot be read."""
    starts = starts_of(runs)
    rows: list[StoredRow] = []
    torn = 0
    for start in starts:
        void = later_rounds(start, starts)
        # A writer that was killed while it moved rows has left them in both files.
        moved = set(_lines(start.path / SUPERSEDED))
        for line in _lines(start.path / ROWS):
            place = row_key(line)
            if place is None or not _is_json(line):
                torn += 1
                continue
            moved.discard(line)
            rows.append(StoredRow(place, line, void.takes(place)))
        places = ((row_key(line), line) for line in moved)
        rows += [StoredRow(place, line, True) for place, line in places if place is not None]
    rows.sort(key=_order)
    return MetricRows(tuple(rows), torn, tuple(start.path for start in starts))


def starts_of(runs: Sequence[RunDir]) -> list[Start]:
    """Return the directories of a run in the order in which they began."""
    return sorted((_start(run) for run in runs), key=lambda start: start.began)


class LaterRounds:
    """Tells which rows of one directory are superseded: by its own later rounds, by later starts.

    It is the same for all rows of a round, and is put together once.
    """

    def __init__(self, own: Mapping[int, Beginning], starts: Sequence[Beginning]) -> None:
        self.own = own
        self.starts = starts
        self._known: dict[int, Beginning] = {}

    def void_from(self, round: int, group: str) -> int | None:
        """Return the step from which rows of a round are superseded; None where none is."""
        begun = self._known.get(round)
        if begun is None:
            after = [b for number, b in self.own.items() if number > round]
            begun = reduce(Beginning.joined, [*after, *self.starts], Beginning())
            self._known[round] = begun
        return begun.void_from(group)

    def takes(self, place: RowKey) -> bool:
        """Tell whether the row of that place is superseded."""
        limit = self.void_from(place.round, place.group)
        return limit is not None and place.step >= limit


def later_rounds(start: Start, starts: Sequence[Start]) -> LaterRounds:
    """Return what supersedes rows of ``start``, one of ``starts``."""
    later = [begun for s in starts if s.began >= start.ended for begun in s.rounds.values()]
    return LaterRounds(start.rounds, later)


def decoded(line: bytes) -> dict[str, Any]:
    """Return the values of a line; raise ValueError or RecursionError for what is no object."""
    try:
        return _decode(line)
    except msgspec.MsgspecError:
        values = json.loads(line)  # msgspec takes no NaN
        if not isinstance(values, dict):
            raise ValueError("no object") from None
        return values


def _is_json(line: bytes) -> bool:
    try:
        decoded(line)
    except (ValueError, RecursionError):
        return False
    return True


def _order(row: StoredRow) -> tuple[int, int, str, int]:
    place = row.place
    return (place.step, place.rank, place.group, place.round)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            # The last one without an end is being written, or its writer was killed.
            yield from (line for line in file if line.endswith(b"\n"))
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirError(f"cannot read {path}: {error.strerror}") from error


def _start(run: RunDir) -> Start:
    try:
        rounds = read_rounds(run.path / ROUNDS)
    except OSError as error:
        raise RunDirError(f"cannot read {run.path / ROUNDS}: {error.strerror}") from error
    try:
        record = run.read_state()
    except RunDirError:
        return Start(run.path, _changed(run.path), math.inf, rounds)
    ended = record["ended_at"]
    if ended is None:
        ended = math.inf if is_live(run) else _changed(run.path / ROWS, run.state_file)
    return Start(run.path, record["started_at"], ended, rounds)


def _changed(*paths: Path) -> float:
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
