"""The files in the run directory: appended under a lock, so that a node's ranks share them.

A batch is whole lines in one write. The half line of a killed writer is cut off by the next one.
Rows that are superseded are first appended to their own file, then left out of ``metrics.jsonl``,
which is replaced as a whole: a writer that dies between the two leaves them in both, which readers
know (``reading``), never in none.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO, Final

from elaunch.runs.statedir import locked, replace_file
from elaunch.training.metrics.history import Beginning, parsed, row_key, written

ROWS: Final = "metrics.jsonl"
SUPERSEDED: Final = "metrics.superseded.jsonl"
ROUNDS: Final = "metrics.rounds.json"
LOCK: Final = "metrics.lock"
TENSORBOARD: Final = "tensorboard"

CHUNK: Final = 1 << 20
_TAIL: Final = 1 << 16


class MetricFiles:
    """Appends one round's rows in a run directory; one thread of each rank calls."""

    def __init__(self, directory: Path, round: int, resume_step: int | None) -> None:
        self.path = directory / ROWS
        self._directory = directory
        self._round = round
        self._noted: Beginning | None = None
        self._resume_step = resume_step

    def append(self, lines: bytes, first: dict[str, int]) -> None:
        """Append whole lines; ``first`` is the smallest step of each group in them.

        Raises OSError when they cannot be written; then none of them is. Blocks while another rank
        of this node writes.
        """
        beginning = Beginning(self._resume_step, first)
        with locked(self._directory / LOCK):
            if self._noted is None or self._noted.joined(beginning) != self._noted:
                self._begin(beginning)
            _append(self.path, lines)

    def sync(self) -> None:
        """Wait until the disk has the rows; raise OSError for what the disk did not take."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _begin(self, beginning: Beginning) -> None:
        """Note where this round began, as far as its ranks here have reported, and supersede."""
        path = self._directory / ROUNDS
        known = read_rounds(path)
        before = known.get(self._round)
        begun = beginning if before is None else before.joined(beginning)
        if self._noted is not None:
            begun = begun.joined(self._noted)
        if begun != before:
            self._supersede(begun)
            replace_file(path, written({**known, self._round: begun}))
        self._noted = begun

    def _supersede(self, begun: Beginning) -> None:
        """Take the rows of earlier rounds that ``begun`` makes void out of ``metrics.jsonl``."""
        draft = self.path.with_name(f".{ROWS}.new")
        try:
            with open(self.path, "rb") as rows, open(draft, "wb", opener=_private) as kept:
                moved = self._divide(rows, kept, begun)
            if moved:
                os.replace(draft, self.path)
        except FileNotFoundError:
            return  # nobody has reported anything yet
        finally:
            draft.unlink(missing_ok=True)

    def _divide(self, rows: BinaryIO, kept: BinaryIO, begun: Beginning) -> bool:
        """Write each row to ``kept`` or to the superseded ones; return whether there are any."""
        void: list[bytes] = []
        size, moved = 0, False
        for line in rows:
            key = row_key(line)
            if key is None or key.round >= self._round or not line.endswith(b"\n"):
                kept.write(line)
            elif begun.supersedes(key.group, key.step):
                void.append(line)
                size += len(line)
            else:
                kept.write(line)
            if size > CHUNK:
                _append(self._directory / SUPERSEDED, b"".join(void))
                void, size, moved = [], 0, True
        if void:
            _append(self._directory / SUPERSEDED, b"".join(void))
        return moved or bool(void)


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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
