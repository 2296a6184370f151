"""Reading the rows that were appended since the last reading, in columns.

A run that is watched is read again and again, and its rows may be millions: of each file what is
behind the last whole line of the reading before is read, and a row is no object of its own for
longer than a CHUNK. The reading begins anew where a file was replaced, and where another round or
start supersedes other rows than before.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from elaunch.errors import RunDirError
from elaunch.runs.directory import RunDir
from elaunch.training.metrics.files import ROWS
from elaunch.training.metrics.history import row_key
from elaunch.training.metrics.reading import LaterRounds, decoded, later_rounds, starts_of
from elaunch.training.metrics.rows import COLUMNS

CHUNK: Final = 1 << 20
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
