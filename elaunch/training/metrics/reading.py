"""Reading the rows of a run: of all its directories, with what a later round made void set apart.

A run that was started again under the same id has a directory for each start. They are read in the
order in which they began; where one began after another had ended, it supersedes rows of that one
as a later round does. Directories of one time are nodes of one job that share a disk.

Nothing is locked: files are only appended to, or replaced as a whole, and half a line at the end is
one that is being written.

A run that is watched is read again and again (`RowTail`), and its rows may be millions: of each
file what is behind the last whole line of the reading before is read, and a row is no object of its
own for longer than a CHUNK. The reading begins anew where a file was replaced, and where another
round or start supersedes other rows than before.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from elaunch.errors import RunDirError
from elaunch.runs.directory import RunDir, handle, is_live, named, run_id_of, runs_of
from elaunch.training.metrics.files import (
    ROUNDS,
    ROWS,
    Beginning,
    RowKey,
    read_rounds,
    row_key,
)
from elaunch.training.metrics.rows import COLUMNS

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


def directories(run: str | None, environ: Mapping[str, str]) -> list[RunDir]:
    """Return what ``run`` names: all directories of a run id, or the one of a path or a number.

    Without it, those of the newest run. Raises UsageError with the nearest names.
    """
    found = named(run, environ)
    run_id = run_id_of(found)
    name = run or run_id
    if name != run_id and (os.sep in name or name in (found.path.name, handle(found))):
        return [found]
    return runs_of(run_id, environ) or [found]


def read(runs: Sequence[RunDir]) -> MetricRows:
    """Return the rows of a run's directories; raise RunDirError for one that cannot be read."""
    starts = starts_of(runs)
    rows: list[StoredRow] = []
    torn = 0
    for start in starts:
        void = later_rounds(start, starts)
        for line in _lines(start.path / ROWS):
            place = row_key(line)
            if place is None or not _is_json(line):
                torn += 1
                continue
            rows.append(StoredRow(place, line, void.takes(place)))
    rows.sort(key=_order)
    return MetricRows(tuple(rows), torn, tuple(start.path for start in starts))


def read_metrics(run: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a run, without those that a later round did again: for pandas.DataFrame.

    Any rank may call it alone, and any other process; it blocks while the files are read. ``run``
    is a run id, the beginning of one, or a run directory; None: the newest run.

    Raises RunDirError for files that cannot be read.
    """
    return [row.values for row in read(directories(run, os.environ)).rows if not row.superseded]


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


LEADING: Final = ("steps_completed", "rank", "group", "round", "time")
LINES: Final = 1000


def names(rows: Iterable[StoredRow], everything: bool) -> list[str]:
    """Return the columns: what each row has, then the metrics in the order in which they came."""
    found = dict.fromkeys(LEADING)
    for row in rows:
        found.update(dict.fromkeys(row.values))
    return [*found, *(["superseded"] if everything and "superseded" not in found else [])]


def marked(rows: Iterable[StoredRow], everything: bool) -> Iterator[Mapping[str, Any]]:
    """Yield the values of each row; with ``everything`` also whether it is superseded."""
    for row in rows:
        yield {**row.values, "superseded": row.superseded} if everything else row.values


def csv_text(rows: Sequence[StoredRow], everything: bool) -> Iterator[str]:
    """Yield the table in pieces of LINES lines."""
    text = io.StringIO()
    columns = names(rows, everything)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for number, values in enumerate(marked(rows, everything)):
        writer.writerow([_csv_value(values.get(name)) for name in columns])
        if number % LINES == LINES - 1:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()


def _csv_value(value: object) -> object:
    return json.dumps(value) if isinstance(value, bool | list | dict) else value


CHUNK: Final = 1 << 22
SEAM: Final = 256
"""Bytes before the end of a reading that have to be there still at the next one."""

_key: Final = itemgetter("group", "round", "rank")
_decoder: Final = msgspec.json.Decoder(dict[str, Any])
_BAD: Final = (KeyError, TypeError, OverflowError, ValueError)


class Columns(NamedTuple):
    """Rows of one rank, round and group with the same names, in the order of the file."""

    group: str
    rank: int
    step: array[float]
    time: array[float]
    values: Mapping[str, Sequence[Any]]


@dataclass
class _Position:
    """How far a file was read, and what stood just before."""

    inode: int = -1
    offset: int = 0
    seam: bytes = b""


class RowTail:
    """The rows of a run's directories from one reading to the next; one thread calls.

    ``runs`` returns the directories, which may become more. ``torn`` counts lines that are no rows.
    """

    def __init__(self, runs: Callable[[], Sequence[RunDir]]) -> None:
        self._runs = runs
        self._frame: object = None
        self._positions: dict[Path, _Position] = {}
        self.torn = 0

    def read(self) -> tuple[bool, Iterator[Columns]]:
        """Return whether the reading begins anew, and rows that count; consume them all.

        Raises RunDirError for a directory that cannot be read, OSError later for a file.
        """
        starts = starts_of(self._runs())
        later = {start.path / ROWS: later_rounds(start, starts) for start in starts}
        frame = {path: (rounds.own, rounds.starts) for path, rounds in later.items()}
        anew = frame != self._frame or not all(
            _is_as_left(path, position) for path, position in self._positions.items()
        )
        if anew:
            self._frame, self.torn = frame, 0
            self._positions = {path: _Position() for path in later}
        return anew, self._appended(later)

    def _appended(self, later: Mapping[Path, LaterRounds]) -> Iterator[Columns]:
        for path, rounds in later.items():
            for chunk in _chunks(path, self._positions[path]):
                yield from self._columns(chunk, rounds)

    def _columns(self, chunk: bytes, rounds: LaterRounds) -> Iterator[Columns]:
        try:
            found = list(_divided(_decoder.decode_lines(chunk), rounds))
        except _BAD:  # msgspec's errors are ValueErrors; it takes no NaN
            lines = chunk[:-1].split(b"\n")
            rows = [row for line in lines if (row := _row(line)) is not None]
            self.torn += len(lines) - len(rows)
            found = list(_divided(rows, rounds))
        yield from found


def _is_as_left(path: Path, position: _Position) -> bool:
    """Tell whether a file still has what was read of it; one that is not there was not read."""
    try:
        with open(path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            seam = os.pread(file.fileno(), len(position.seam), position.offset - len(position.seam))
    except FileNotFoundError:
        return position.offset == 0
    except OSError as error:
        raise RunDirError(f"cannot read {path}: {error.strerror}") from error
    return position.offset == 0 or (inode == position.inode and seam == position.seam)


def _chunks(path: Path, position: _Position) -> Iterator[bytes]:
    """Yield whole lines behind ``position``, and move it; half a line is one being written."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return
    with file:
        position.inode = os.fstat(file.fileno()).st_ino
        size = CHUNK
        while raw := os.pread(file.fileno(), size, position.offset):
            end = raw.rfind(b"\n") + 1
            if not end and len(raw) < size:
                return
            size = CHUNK if end else 2 * size
            if end:
                position.offset += end
                position.seam = raw[max(0, end - SEAM) : end]
                yield raw[:end]


def _divided(rows: Sequence[dict[str, Any]], rounds: LaterRounds) -> Iterator[Columns]:
    """Yield the rows in columns, without those that are superseded; raise for what is no row."""
    groups: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for key, names, row in zip(map(_key, rows), map(tuple, rows), rows, strict=True):
        groups[key, names].append(row)
    for ((group, round, rank), names), members in groups.items():
        if type(group) is not str or type(round) is not int or type(rank) is not int:
            raise TypeError("a row is of a group, a round and a rank")
        limit = rounds.void_from(round, group)
        steps = array("d", map(itemgetter("steps_completed"), members))
        if limit is not None and max(steps) >= limit:
            members = [row for row in members if row["steps_completed"] < limit]
            steps = array("d", map(itemgetter("steps_completed"), members))
        times = array("d", map(itemgetter("time"), members))
        values = {
            name: list(map(itemgetter(name), members)) for name in names if name not in COLUMNS
        }
        yield Columns(group, rank, steps, times, values)


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line; None for what is no row, or has a time that is no number."""
    key = row_key(line)
    try:
        values = decoded(line)
        array("d", (values["steps_completed"], values["time"]))
    except (*_BAD, RecursionError):
        return None
    return None if key is None else values
