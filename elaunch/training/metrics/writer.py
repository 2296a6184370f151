"""The thread that writes rows, so that no step waits for a disk.

``put`` appends to a bounded queue. The thread sleeps while the queue is empty; woken by the first
row it waits GATHER_S for more and writes them at once, so that it wakes ten times a second at most.
Only where the disk is slower than the script for so long that the queue is full does ``put`` wait,
and logs so once.

Rows that cannot be written are tried again. After RETRY_S ``put`` and ``close`` raise, with path
and reason; the rows are kept and tried on, so that a disk that was cleaned up loses nothing.

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

from elaunch.errors import ContextError, RunDirError
from elaunch.training.metrics.files import Beginning, MetricFiles, firsts
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
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._writer is None or self._given_up:
            return
        try:
            self._writer.close()
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)

    def _open(self, rows: Sequence[Row]) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        begun = Beginning(self._resume_step, firsts((r.group, r.steps_completed) for r in rows))
        resumed = begun.resumed_step
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
ROOM_S: Final = 60.0
"""How long ``put`` waits for room in a full queue while no error is known."""


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
        self._put = self._written = 0
        self._awake = False
        self._urgent = 0
        self._closed = False
        self._abandoned = False
        self._ended = False
        self._attempts = 0
        self._failing_since: float | None = None
        self._problem = ""
        self._warned = False

    def put(self, row: Row) -> None:
        """Take a row; raise RunDirError if rows cannot be written any more.

        Blocks only while the queue is full, for ROOM_S at most.
        """
        if os.getpid() != self._pid:
            raise ContextError(
                f"this process (pid {os.getpid()}) was forked from the rank (pid {self._pid}) and "
                "cannot report for it: report from the rank itself"
            )
        with self._changed:
            self._refuse()
            if len(self._rows) >= MOST_ROWS or self._characters >= MOST_CHARACTERS:
                self._wait_for_room()
            self._rows.append(row)
            self._characters += len(row.line)
            self._put += 1
            if not self._awake:
                self._wake()

    def flush(self, timeout: float) -> None:
        """Wait until all rows put so far are written; RunDirError if they are not in time."""
        if os.getpid() != self._pid or self._thread is None:
            return
        with self._changed:
            aim = self._put
            self._drain(lambda: self._written >= aim, timeout)
            if self._written < aim:
                raise self._unwritten(aim)

    def close(self, timeout: float) -> None:
        """Write what is left and end the thread; RunDirError names what was not written.

        Blocks for ``timeout`` seconds at most; later calls do nothing.
        """
        if os.getpid() != self._pid or self._closed:
            return
        with self._changed:
            self._closed = True
            thread = self._thread
            if thread is None:
                return
            self._drain(lambda: self._ended, timeout)
            self._abandoned = True
            self._changed.notify_all()
        thread.join(JOIN_S)
        if self._written < self._put:
            raise self._unwritten(self._put)
        try:
            self._files.sync()
        except OSError as error:
            raise RunDirError(f"cannot write {self._files.path}: {error.strerror}") from error

    def _drain(self, done: Callable[[], bool], timeout: float) -> None:
        """Let the thread write without gathering until ``done``, or until it fails for good."""
        attempts = self._attempts

        def over() -> bool:
            hopeless = bool(self._problem) and self._attempts > attempts
            return done() or self._ended or hopeless

        self._urgent += 1
        self._changed.notify_all()
        try:
            self._changed.wait_for(over, timeout)
        finally:
            self._urgent -= 1

    def _unwritten(self, aim: int) -> RunDirError:
        left = aim - self._written
        rows = "1 row was" if left == 1 else f"{left} rows were"
        why = self._problem or f"cannot write {self._files.path}: it takes too long"
        return RunDirError(f"{why}; {rows} not written")

    def _refuse(self) -> None:
        if self._closed:
            raise ContextError("the context is closed: nothing can be reported any more")
        if self._problem:
            raise RunDirError(self._problem)

    def _wake(self) -> None:
        self._awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elaunch-metrics", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _wait_for_room(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%d reported rows wait to be written to %s: reporting now waits for the disk",
                len(self._rows),
                self._files.path,
            )
        self._urgent += 1
        self._changed.notify_all()
        try:
            room = self._changed.wait_for(
                lambda: len(self._rows) < MOST_ROWS // 2 or self._problem or self._closed, ROOM_S
            )
        finally:
            self._urgent -= 1
        self._refuse()
        if not room:
            raise RunDirError(f"cannot write {self._files.path}: nothing for {ROOM_S:g} s")

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._write(batch)
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
            self._changed.wait_for(lambda: self._urgent or self._closed, GATHER_S)
            batch, self._rows = self._rows[:MOST_BATCH], self._rows[MOST_BATCH:]
            self._characters -= sum(len(row.line) for row in batch)
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
            if not problem:
                self._failing_since, self._problem = None, ""
                return True
            now = time.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            if now - self._failing_since >= RETRY_S:
                self._problem = problem
            self._changed.notify_all()
            return False
