"""TensorBoard's files, beside the rows: ``<directory>/rank-<rank>``, one for each rank.

A scalar is named ``<group>/<metric>``. Numbers only: TensorBoard has no place for the rest. A round
that goes on from an earlier step has TensorBoard leave out what it had from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elaunch.errors import ContextError
from elaunch.training.metrics.history import Beginning, firsts
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
