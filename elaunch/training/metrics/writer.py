"""The thread that writes rows, so that no step waits for a disk.

``put`` appends to a bounded queue. The thread sleeps while the queue is empty; woken by the first
row it waits GATHER_S for more and writes them at once, so that it wakes ten times a second at most.

Metrics never stop or slow the training. Rows that cannot be written are tried again, and wait in
the queue: a disk that was cleaned up loses nothing. After RETRY_S that is logged, once. Rows for
which the queue has no room are lost; ``close`` logs how many.

TensorBoard's files are beside the rows: ``<directory>/rank-<rank>``, one for each rank. A scalar is
named ``<group>/<metric>``. Numbers only: TensorBoard has no place for the rest. A round that goes
on from an earlier step has TensorBoard leave out what it had from there on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elaunch.errors import ContextError
from elaunch.training.metrics.files import GOES_ON, Beginning, MetricFiles, firsts
from elaunch.training.metrics.rows import Row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)


def require() -> None:
    """Import torch's writer, about a second; ContextError with what to install if it is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ContextError(
            f"tensorboard= needs the package tensorboard, which cannot be imported here ({error}): "
            "pip install 'elaunch[tensorboard]'"
        ) from error


class BoardWriter:
    """Writes one rank's rows for TensorBoard; only the thread that writes rows calls.

    What it cannot write is logged once and left out: the rows themselves are in ``metrics.jsonl``.
    """

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        self._directory = directory
        self._resume_step = resume_step
        self._writer: SummaryWriter | None = None
        self._given_up = False

    def write(self, rows: Sequence[Row]) -> None:
        """Write the numbers of some rows; torch is loaded and the file made at the first ones."""
        if self._given_up or not rows:
            return
        try:
            if self._writer is None:
                self._writer = self._open(rows)
            for row in rows:
                self._add(self._writer, row)
            self._writer.flush()
        except Exception as error:  # of other people's code: whatever it is, the rows are written
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._writer is None or self._given_up:
            return
        try:
            self._writer.close()
        except Exception as error:  # of other people's code: whatever it is, the rows are written
            self._give_up(error)

    def _open(self, rows: Sequence[Row]) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        begun = Beginning(self._resume_step, firsts((r.group, r.steps_completed) for r in rows))
        resumed = None if self._resume_step == GOES_ON else begun.resumed_step
        purge = None if resumed is None else resumed + 1
        return SummaryWriter(str(self._directory), purge_step=purge)

    def _add(self, writer: SummaryWriter, row: Row) -> None:
        for name, value in row.values.items():
            if isinstance(value, int | float):
                tag = f"{row.group}/{name}"
                writer.add_scalar(tag, value, row.steps_completed, row.time)

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        log.warning(
            "nothing more is written for TensorBoard to %s: %s; the metrics themselves are",
            self._directory,
            error,
        )


MOST_ROWS: Final = 100_000
MOST_CHARACTERS: Final = 64 << 20
MOST_BATCH: Final = 10_000
GATHER_S: Final = 0.1
RETRY_S: Final = 5.0
RETRY_PAUSE_S: Final = 0.2
JOIN_S: Final = 0.5


class Writer:
    """Writes rows in a thread of its own; any thread of the process that made it may put them."""

    def __init__(self, files: MetricFiles, board: BoardWriter | None = None) -> None:
        self._files = files
        self._board = board
        self._pid = os.getpid()
        # Reentrant: a signal's handler may report while its thread does.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._rows: list[Row] = []
        self._characters = 0
        self._put = self._written = self._lost = 0
        self._wanted = 0
        """How many rows somebody waits for: up to there they are written without gathering."""
        self._awake = False
        self._closed = False
        self._abandoned = False
        self._ended = False
        self._attempts = 0
        self._begun: float | None = None
        """When the thread began with what it is writing."""
        self._problem = ""
        self._warned = False

    def put(self, row: Row) -> None:
        """Take a row; it does not block, and fails only where the script may not report."""
        if os.getpid() != self._pid:
            raise ContextError(
                f"this process (pid {os.getpid()}) was forked from the rank (pid {self._pid}) and "
                "cannot report for it: report from the rank itself"
            )
        with self._changed:
            if self._closed:
                raise ContextError("the context is closed: nothing can be reported any more")
            full = len(self._rows) >= MOST_ROWS or self._characters >= MOST_CHARACTERS
            if full or self._ended:
                self._lost += 1
            else:
                self._rows.append(row)
                self._characters += len(row.line)
                self._put += 1
            if not self._awake:
                self._wake()
            if full or self._ended or self._is_stuck(RETRY_S):
                self._warn()

    def flush(self, timeout: float) -> bool:
        """Wait until all rows put so far are written; return whether they are.

        It gives up after ``timeout`` seconds, and at once where the disk has taken that long
        already.
        """
        if os.getpid() != self._pid:
            return True
        with self._changed:
            aim = self._put
            if self._thread is not None and not self._is_stuck(timeout):
                self._drain(lambda: self._written >= aim, timeout)
            return self._written >= aim

    def move(self, round_number: int) -> None:
        """Write rows of another round from now on, once those of this one are written."""
        self.flush(RETRY_S)
        self._files = self._files.of(round_number)

    def newest(self, group: str, rank: int) -> int:
        """Return the step of the last row of a group that a rank has written; -1 for none."""
        return self._files.newest(group, rank)

    def close(self, timeout: float) -> None:
        """Write what is left and end the thread; log how many rows were lost, if any.

        Blocks for ``timeout`` seconds at most; later calls do nothing.
        """
        if os.getpid() != self._pid or self._closed:
            return
        with self._changed:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._drain(lambda: self._ended, timeout)
            self._abandoned = True
            self._changed.notify_all()
        if thread is not None:
            thread.join(JOIN_S)
        if lost := self._put - self._written + self._lost:
            rows = "1 row of metrics is" if lost == 1 else f"{lost} rows of metrics are"
            log.warning("%s lost: %s", rows, self._reason())

    def _drain(self, done: Callable[[], bool], timeout: float) -> None:
        """Let the thread write without gathering until ``done``, or until it fails for good."""
        attempts, self._wanted = self._attempts, self._put
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: (
                done()
                or self._ended
                or (self._attempts > attempts and bool(self._problem) and self._is_stuck(RETRY_S))
            ),
            timeout,
        )

    def _is_stuck(self, seconds: float) -> bool:
        """Tell whether the thread has been writing the same rows for so long."""
        return self._begun is not None and time.monotonic() - self._begun >= seconds

    def _reason(self) -> str:
        return self._problem or f"cannot write {self._files.path}: it takes too long"

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s; the training goes on, and metrics wait in memory: rows beyond %d are lost",
                self._reason(),
                MOST_ROWS,
            )

    def _wake(self) -> None:
        self._awake = True
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="elaunch-metrics", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be had; the next row tries again
                self._awake = False
            else:
                self._thread = thread
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._write(batch)
            self._sync()
        finally:
            if self._board is not None:
                self._board.close()
            with self._changed:
                self._ended = True
                if not self._closed:
                    self._problem = "the thread that writes metrics has failed (see its traceback)"
                self._changed.notify_all()

    def _next_batch(self) -> list[Row]:
        """Wait for rows; return none when there are none and the writer is closed."""
        with self._changed:
            self._awake = bool(self._rows)
            self._changed.wait_for(lambda: self._rows or self._closed)
            self._changed.wait_for(lambda: self._wanted > self._written or self._closed, GATHER_S)
            batch, self._rows = self._rows[:MOST_BATCH], self._rows[MOST_BATCH:]
            self._characters -= sum(len(row.line) for row in batch)
            self._begun = time.monotonic() if batch else None
            return batch

    def _write(self, batch: list[Row]) -> None:
        """Write a batch, however often it takes; give up only when ``close`` does."""
        lines = "".join(row.line for row in batch).encode()
        first = firsts((row.group, row.steps_completed) for row in batch)
        while not self._attempt(lines, first):
            with self._changed:
                if self._changed.wait_for(lambda: self._abandoned, RETRY_PAUSE_S):
                    return
        with self._changed:
            self._written += len(batch)
            self._begun, self._problem = None, ""
            self._changed.notify_all()
        if self._board is not None:
            self._board.write(batch)

    def _attempt(self, lines: bytes, first: dict[str, int]) -> bool:
        problem = ""
        try:
            self._files.append(lines, first)
        except OSError as error:
            problem = f"cannot write {self._files.path}: {error.strerror}"
        with self._changed:
            self._attempts += 1
            self._problem = problem
            if problem and self._is_stuck(RETRY_S):
                self._warn()
            self._changed.notify_all()
        return not problem

    def _sync(self) -> None:
        """Have what was written on the disk, too."""
        try:
            self._files.sync()
        except OSError as error:
            log.warning("cannot write %s to the disk: %s", self._files.path, error.strerror)
