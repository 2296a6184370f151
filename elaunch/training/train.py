"""``ctx.train``: a script reports metrics, progress and status of its training.

Every rank reports, and its rows carry its rank and round; with ``chief_only`` rank 0 alone does,
and a report from another is an error. Metrics go to the run directory (elaunch.training.metrics),
progress and status to the progress page, which the agent shows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elaunch.errors import ContextError, MetricError
from elaunch.training.launch import Placement
from elaunch.training.metrics.files import TENSORBOARD, TRAINING, VALIDATION, MetricFiles
from elaunch.training.metrics.rows import Encoder, Latest
from elaunch.training.metrics.writer import BoardWriter, Writer, require
from elaunch.wire.progress import ProgressPage

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Keep
    from elaunch.training.preempt.preempt import PreemptContext
    from elaunch.training.steps.feed import Batch, Collate, Dataset
    from elaunch.training.steps.loop import Script, Steps
    from elaunch.training.steps.world import StepsWorld

CLOSE_TIMEOUT_S: Final = 10.0


class TrainContext:
    """``ctx.train``: reports of one rank. Made by ``elaunch.init()``, closed with its context.

    Args:
        placement: where this rank stands.
        page: takes progress, status and the newest step; each report is a heartbeat.
        directory: the run directory; None where there is none: metrics are refused then.
        resume_step: step of the checkpoint that this round resumed from, -1 if it began from
            nothing, -2 if it goes on from the round before, None if that is not known.
        chief_only: refuse reports of all ranks but rank 0.
        tensorboard: write files for TensorBoard too: in ``tensorboard/`` of the run directory
            (True), or in a directory of your own.

    Raises ContextError if ``tensorboard`` is asked for and not installed.
    """

    def __init__(
        self,
        placement: Placement,
        page: ProgressPage,
        directory: Path | None,
        resume_step: int | None = None,
        chief_only: bool = False,
        tensorboard: bool | str | Path | None = None,
    ) -> None:
        self._rank, self._round = placement.rank, placement.round
        self._page = page
        self._chief_only = chief_only
        self._encoder = Encoder(placement.rank, placement.round)
        self._latest = Latest()
        self._writer: Writer | None = None
        self._parts: tuple[StepsWorld, PreemptContext, Callable[[], Any]] | None = None
        self._script: Script | None = None
        board = None
        if tensorboard is not None and tensorboard is not False:
            board = _board(directory, tensorboard, placement.rank, resume_step)
        if directory is not None:
            self._writer = Writer(MetricFiles(directory, placement.round, resume_step), board)

    def attach(self, parts: tuple[StepsWorld, PreemptContext, Callable[[], Any]]) -> None:
        """Take the parts of the context that :meth:`steps` uses; the context calls it."""
        self._parts = parts

    def move(self, placement: Placement) -> None:
        """Report as a rank of another world from now on; the context calls it."""
        if self._writer is not None and placement.round != self._round:
            self._writer.move(placement.round)
        self._rank, self._round = placement.rank, placement.round
        self._encoder = Encoder(placement.rank, placement.round)

    def steps(
        self,
        state: Mapping[str, Any],
        dataset: Dataset | None = None,
        *,
        global_batch: int,
        micro_batch: int,
        until: int | None = None,
        epochs: int | None = None,
        batch: Batch | None = None,
        collate_fn: Collate | None = None,
        loader: Mapping[str, Any] | None = None,
        last: str = "drop",
        shuffle: bool = True,
        seed: int = 0,
        save_every: int | str | None = "auto",
        keep: Keep | None = None,
        on_bad_batch: str = "raise",
        check: bool | str = False,
        threads: int = 1,
    ) -> Steps:
        """Return the steps of a training whose numbers do not depend on how many ranks compute it.

        ALL ranks call it together, and go through the steps together; it blocks until all have
        come. It loads the newest checkpoint, if there is one, and returns what is left to do::

            state = {"model": model, "optimizer": optimizer}
            loop = ctx.train.steps(state, dataset, global_batch=48, micro_batch=4, until=10_000)
            for step in loop:
                for x, y in step.micro_batches():
                    step.backward(loss_fn(model(x), y))
                step.apply(optimizer)

        Args:
            state: modules (plain ones, not in DDP), optimizers, and what else is to be saved, as
                for ``ctx.checkpoint.save``.
            dataset: anything with a length and samples by index.
            global_batch: samples of a step, of all ranks together; a multiple of ``micro_batch``.
            micro_batch: samples that a rank computes at once.
            until: steps at which the training is done; without it, and without ``epochs``, it goes
                on until the script leaves the loop.
            epochs: the same in epochs.
            batch: in the place of a dataset: called with a step's number, from 1, and a leaf's,
                from 0; returns that micro-batch.
            collate_fn: makes a batch of a list of samples; by default torch's.
            loader: more arguments of torch's DataLoader, as ``{"num_workers": 2}``.
            last: whether what is left at the end of an epoch is left out ("drop"), or is a "short"
                step.
            shuffle: another order of the samples in each epoch.
            seed: of that order, and of all random numbers that are drawn in a step.
            save_every: steps from one checkpoint to the next, or "auto", as for
                ``ctx.checkpoint.save``; None: neither save nor load.
            keep: as for ``ctx.checkpoint.save``; by default what the flags say, and two by "auto".
            on_bad_batch: whether a micro-batch whose loss or gradients are not finite is an error
                ("raise"), or is left out on all ranks ("skip"), in ten steps in a row at most.
            check: have about one micro-batch in a hundred computed by two ranks, and the bits
                compared: an error where they differ (True), or a warning ("warn").
            threads: of torch on the CPU while the loop runs; other numbers have other bits.

        Raises:
            ContextError: on all ranks, before the first step: something cannot be trained so; says
                what to do.
            CheckpointError: the checkpoint cannot be loaded into the state.
            SamplerError: the checkpoint is of other data.
        """
        from elaunch.training.steps import loop, refusals  # most scripts do without, and torch

        if self._parts is None:
            raise ContextError("steps() is a call of elaunch.init()'s context")
        if self._script is None:
            reports = (self.report_training_metrics, self._newest, self.report_progress)
            self._script = loop.Script(*self._parts, *reports)
        options = refusals.Options(
            dataset=dataset,
            batch=batch,
            collate_fn=collate_fn,
            loader={} if loader is None else loader,
            global_batch=global_batch,
            micro_batch=micro_batch,
            until=until,
            epochs=epochs,
            last=last,
            shuffle=shuffle,
            seed=seed,
            save_every=save_every,
            keep=keep,
            on_bad_batch=on_bad_batch,
            check=check,
            threads=threads,
        )
        return loop.Steps(self._script, state, options)

    def _newest(self) -> int:
        """Return the newest step whose metrics any rank 0 has written."""
        return -1 if self._writer is None else self._writer.newest(TRAINING, 0)

    def note_step(self, error: BaseException) -> None:
        """Add to an error of the script's in which micro-batch it was raised; the context does."""
        if self._script is not None:
            self._script.note(error)

    def report_training_metrics(
        self, steps_completed: int, metrics: Mapping[str, Any], chief_only: bool | None = None
    ) -> None:
        """Report metrics of training at a step: :meth:`report_metrics` of group ``training``.

        Any rank may, alone; it does not block.
        """
        self.report_metrics(TRAINING, steps_completed, metrics, chief_only)

    def report_validation_metrics(
        self, steps_completed: int, metrics: Mapping[str, Any], chief_only: bool | None = None
    ) -> None:
        """Report metrics of validation: :meth:`report_metrics` of group ``validation``.

        Any rank may, alone; it does not block.
        """
        self.report_metrics(VALIDATION, steps_completed, metrics, chief_only)

    def report_metrics(
        self,
        group: str,
        steps_completed: int,
        metrics: Mapping[str, Any],
        chief_only: bool | None = None,
    ) -> None:
        """Report metrics of any group at a step; any rank may, none waits for another.

        It does not block: a thread writes the rows within a tenth of a second. Where they cannot
        be written 100,000 wait in memory; further ones are lost, with a warning. To take the
        number out of a tensor on an accelerator waits for that device, as ``.item()`` does.

        Args:
            group: text that can be printed, without a dot.
            steps_completed: the x axis of everything; at least 0.
            metrics: names with numbers, text, None, or lists and dicts of them. Numpy's scalars,
                arrays and tensors of no dimension count as numbers; NaN and infinity are kept.
            chief_only: refuse this report of all ranks but rank 0; by default as in ``init()``.

        Raises MetricError, which is a ValueError too, for what cannot be written, naming it;
        ContextError on a rank that may not report, or after the end of the context.
        """
        self._check_chief(chief_only, f"metrics of group {group!r}")
        if self._writer is None:
            raise ContextError("this context has no run directory to write metrics to")
        row = self._encoder.row(group, steps_completed, metrics, time.time())
        self._page.step(row.steps_completed)
        self._latest.take(row)
        self._writer.put(row)

    def metrics_at(self, steps_completed: int) -> dict[str, float]:
        """Return the numbers that this rank last reported at a step, if it is one of the newest.

        Any rank may, alone; it does not block. By their names, and as ``group.name``; where two
        groups have a name, validation's counts.
        """
        return self._latest.at(steps_completed)

    def report_progress(self, progress: float, chief_only: bool | None = None) -> None:
        """Report how much of the whole training is done, from 0 to 1.

        Any rank may, alone; it does not block.

        Raises MetricError, a ValueError, for anything else.
        """
        self._check_chief(chief_only, "progress")
        fraction = _number(progress)
        if not 0.0 <= fraction <= 1.0:
            raise MetricError(f"progress is {progress!r}: it goes from 0.0 to 1.0")
        self._page.progress(fraction)

    def set_status(self, text: str, chief_only: bool | None = None) -> None:
        """Report in a few words what is being done, for ``elaunch status``.

        Any rank may, alone; it does not block.

        Raises MetricError for what is no text.
        """
        self._check_chief(chief_only, "a status")
        if not isinstance(text, str):
            raise MetricError(f"the status is {text!r}, a {type(text).__name__}: give text")
        self._page.status(text)

    def flush(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until all that this rank reported is written, so that its death loses none of it.

        Any rank may, alone. Returns whether it is written; it waits ``timeout`` seconds at most.
        """
        return self._writer is None or self._writer.flush(timeout)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is left, and end the thread; reports are refused then. May be called twice.

        It waits ``timeout`` seconds at most. Rows that could not be written are counted in a
        warning: that is no reason for a job to fail.
        """
        if self._writer is not None:
            self._writer.close(timeout)

    def _check_chief(self, chief_only: bool | None, what: str) -> None:
        only = self._chief_only if chief_only is None else chief_only
        if only and self._rank != 0:
            raise ContextError(
                f"rank {self._rank} reports {what}, and with chief_only=True only rank 0 may: put "
                "it under `if ctx.distributed.rank == 0:`"
            )


def _number(value: Any) -> float:
    """Return a number as float; nan for what is none."""
    if isinstance(value, str):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def _board(
    directory: Path | None, where: bool | str | Path, rank: int, resume_step: int | None
) -> BoardWriter:
    require()
    if where is True:
        if directory is None:
            raise ContextError("tensorboard=True needs a run directory: give a directory")
        where = directory / TENSORBOARD
    return BoardWriter(Path(str(where)).absolute() / f"rank-{rank}", resume_step)
