"""The files in the run directory: appended under a lock, so that a node's ranks share them.

A batch is whole lines in one write. The half line of a killed writer is cut off by the next one.

A later round makes rows void: it notes where it began, and readers leave them out (``reading``).
One in which ranks go on from the round before notes nothing: it does no step again.
One that resumed from step R does every step beyond R again: rows of
earlier rounds beyond R are superseded. Where R is not known, it follows from the first report:

* ``training`` at step s: the round goes on from before s; all rows from s on are superseded.
* ``validation`` at step s: it may stand at s without having done a step; all rows beyond s are.
* any group at step s: its own rows from s on are, since this round reports them again. Another
  group shows nothing of the rest: a script may report its settings at step 0 in every round.

Ranks report apart from each other, so a later report may turn out to be the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from elaunch.runs.statedir import locked, replace_file

TRAINING: Final = "training"
VALIDATION: Final = "validation"
FROM_NOTHING: Final = -1
"""The step of a round that is known to have begun without a checkpoint."""
GOES_ON: Final = -2
"""The same of one in which ranks go on from the round before: it makes nothing void."""

_KEY: Final = re.compile(
    rb'\{"group":("(?:[^"\\]|\\.)*"),"steps_completed":(\d+),"round":(\d+),"rank":(\d+),"time":'
)

ROWS: Final = "metrics.jsonl"
ROUNDS: Final = "metrics.rounds.json"
LOCK: Final = "metrics.lock"
TENSORBOARD: Final = "tensorboard"

_TAIL: Final = 1 << 16


class MetricFiles:
    """Appends one round's rows in a run directory; one thread of each rank calls."""

    def __init__(self, directory: Path, round: int, resume_step: int | None) -> None:
        self.path = directory / ROWS
        self._directory = directory
        self._round = round
        self._noted: Beginning | None = None
        self._resume_step = resume_step

    def of(self, round: int) -> MetricFiles:
        """Return the files for another round, which goes on from this one."""
        return MetricFiles(self._directory, round, GOES_ON)

    def append(self, lines: bytes, first: dict[str, int]) -> None:
        """Append whole lines; ``first`` is the smallest step of each group in them.

        Raises OSError when they cannot be written; then none of them is. Blocks while another rank
        of this node writes.
        """
        beginning = Beginning(self._resume_step, first)
        is_noted = self._noted is not None and self._noted.joined(beginning) == self._noted
        with locked(self._directory / LOCK):
            if not is_noted and self._resume_step != GOES_ON:
                self._begin(beginning)
            _append(self.path, lines)

    def newest(self, group: str, rank: int) -> int:
        """Return the step of the last row of a group that a rank has written; -1 for none."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            end, length = file.seek(0, os.SEEK_END), _TAIL
            while True:
                start = file.seek(max(0, end - length))
                keys = map(row_key, file.read().split(b"\n")[start > 0 : -1])
                steps = [key.step for key in keys if key and (key.group, key.rank) == (group, rank)]
                if steps or not start:
                    return steps[-1] if steps else -1
                length *= 2
        return -1

    def sync(self) -> None:
        """Wait until the disk has the rows; raise OSError for what the disk did not take."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _begin(self, beginning: Beginning) -> None:
        """Note where this round began, as far as its ranks here have reported."""
        path = self._directory / ROUNDS
        known = read_rounds(path)
        before = known.get(self._round)
        begun = beginning if before is None else before.joined(beginning)
        if self._noted is not None:
            begun = begun.joined(self._noted)
        if begun != before:
            replace_file(path, written({**known, self._round: begun}))
        self._noted = begun


def read_rounds(path: Path) -> dict[int, Beginning]:
    """Return what ``metrics.rounds.json`` says; empty where it is not there."""
    try:
        return parsed(path.read_bytes())
    except FileNotFoundError:
        return {}


def _append(path: Path, lines: bytes) -> None:
    """Append whole lines, all or none, behind the last whole line that is there."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        size = os.fstat(fd).st_size
        whole = _end_of_lines(fd, size)
        if whole < size:
            os.ftruncate(fd, whole)
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            # Half of it would be doubled by the next attempt.
            os.ftruncate(fd, whole)
            raise
    finally:
        os.close(fd)


def _end_of_lines(fd: int, size: int) -> int:
    """Return the offset behind the last newline of a file."""
    end, length = size, 1
    while end > 0:
        start = max(0, end - length)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end, length = start, _TAIL
    return 0


class RowKey(NamedTuple):
    """The group, step, round and rank of a row; a tuple, since there may be millions."""

    group: str
    step: int
    round: int
    rank: int


@dataclass(frozen=True)
class Beginning:
    """Where a round began: ``resume_step``, None if not known, and each group's first step."""

    resume_step: int | None = None
    first: Mapping[str, int] = field(default_factory=dict)

    def void_from(self, group: str) -> int | None:
        """Return the first step of an earlier round that is superseded; None where none is."""
        resumed = self.resumed_step
        found = [] if resumed is None else [resumed + 1]
        found += [self.first[group]] if group in self.first else []
        return min(found, default=None)

    @cached_property
    def resumed_step(self) -> int | None:
        """Return the last step that this round did not do; None where it is not known."""
        steps = [] if self.resume_step is None else [self.resume_step]
        if TRAINING in self.first:
            steps.append(self.first[TRAINING] - 1)
        if VALIDATION in self.first:
            steps.append(self.first[VALIDATION])
        return min(steps, default=None)

    def joined(self, other: Beginning) -> Beginning:
        """Return the beginning that two reporters of one round make together.

        It supersedes what one or the other does.
        """
        steps = [b.resume_step for b in (self, other) if b.resume_step is not None]
        groups = {**self.first, **other.first}
        first = {
            group: min(b.first[group] for b in (self, other) if group in b.first)
            for group in groups
        }
        return Beginning(min(steps, default=None), first)


def row_key(line: bytes) -> RowKey | None:
    """Return what a line of ``metrics.jsonl`` is of; None for what is no row."""
    found = _KEY.match(line)
    if found is None:
        return None
    group, step, round, rank = found.groups()
    try:
        return RowKey(_group(group), int(step), int(round), int(rank))
    except ValueError:  # control characters in the group, or a number of thousands of digits
        return None


@lru_cache(maxsize=256)
def _group(raw: bytes) -> str:
    return str(json.loads(raw))


def firsts(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return each group's smallest step."""
    found: dict[str, int] = {}
    for group, step in rows:
        if step < found.get(group, step + 1):
            found[group] = step
    return found


def written(beginnings: Mapping[int, Beginning]) -> bytes:
    """Return the content of ``metrics.rounds.json``."""
    document = {
        str(number): {"resume_step": begun.resume_step, "first": dict(begun.first)}
        for number, begun in sorted(beginnings.items())
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def parsed(raw: bytes) -> dict[int, Beginning]:
    """Return the beginnings by round; empty for what nobody can read."""
    try:
        document = json.loads(raw)
        return {int(number): _beginning(entry) for number, entry in document.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _beginning(entry: Mapping[str, Any]) -> Beginning:
    step = entry["resume_step"]
    first = {str(group): int(value) for group, value in entry["first"].items()}
    return Beginning(None if step is None else int(step), first)
