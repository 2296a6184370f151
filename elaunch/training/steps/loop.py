"""The loop over the steps: ``ctx.train.steps()``.

Between two steps, in this order: the step counts; rank 0 reports its metrics; the state is saved
where that is due; and the loop ends where it is done, or where the job is to end. The state that is
saved has, beside what the script gave, where the loop stands.

Loops may follow each other, as for pre-training and fine-tuning: the steps of all count on, in
checkpoints and metrics. The metadata of a checkpoint says which of them it is of. Those before are
over at once, and load nothing: the state of the one that is under way has what is needed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from elaunch.checkpoint.records import Keep
from elaunch.env import CHECKPOINT_KEEP
from elaunch.errors import ContextError, ElaunchError
from elaunch.training.distributed import DistributedContext
from elaunch.training.preempt.preempt import PreemptContext
from elaunch.training.steps import group, refusals
from elaunch.training.steps.feed import LeafFeed
from elaunch.training.steps.gradients import Gradients
from elaunch.training.steps.group import Group
from elaunch.training.steps.order import Position, Progress
from elaunch.training.steps.refusals import Options
from elaunch.training.steps.step import Step

KEPT: Final = 2
"""Checkpoints that stay by ``save_every="auto"``, where nothing says how many."""
LOOP: Final = "steps_loop"
"""The name in a checkpoint's metadata of the loop's number."""
MOST_SKIPPING: Final = 10
"""Steps in a row that may leave out micro-batches: after them it is not the data."""

log = logging.getLogger("elaunch")


@dataclass
class Script:
    """The parts of a script's context that its loops use.

    ``checkpoint`` returns ``ctx.checkpoint``, which imports this package's users: its type would
    make a circle.
    """

    distributed: DistributedContext
    preempt: PreemptContext
    checkpoint: Callable[[], Any]
    report: Callable[[int, Mapping[str, Any]], None]
    progress: Callable[[float], None]
    loops: int = 0
    """How many loops were made."""
    done: int = 0
    """Steps of all of them."""
    is_running: bool = False
    group: Group | None = None
    """The ranks' group, once a loop has made it; none for one rank alone."""
    step: Step | None = None
    """The step that has begun and does not count yet."""

    def connect(self, saves: bool) -> None:
        """Have the ranks' group; ALL ranks call it together."""
        self.group = self.group or group.connect(self.distributed)
        if saves and self.group is not None:
            self.group.provide_default()

    def note(self, error: BaseException) -> None:
        """Add to an error of the script's in which micro-batch it was raised, if in one."""
        what = "" if self.step is None or isinstance(error, ElaunchError) else self.step.under_way()
        if what and (add := getattr(error, "add_note", None)) is not None:  # Python 3.11
            add(f"elaunch: in {what}")

    def close(self) -> None:
        """Let go of the ranks' group."""
        if self.group is not None:
            self.group.close()
        self.group = None


class Steps:
    """The steps of a training, one after the other: made by ``ctx.train.steps()``.

    Attributes:
        preempted: whether the loop has ended because the job is to end; what the script has after
            it belongs to a training that goes on later.
    """

    def __init__(self, script: Script, state: Mapping[str, Any], options: Options) -> None:
        self.preempted = False
        self._script = script
        self._options = options
        ranks = script.distributed
        if threading.current_thread() is not threading.main_thread():
            raise ContextError("steps() is called in a thread: call it in the main thread")
        if script.is_running:
            raise ContextError("steps() is called inside of another loop: end that one first")
        self._trained = refusals.check(ranks, state, options)
        self._order = options.order()
        self._progress = Progress(self._order, script.loops)
        script.loops += 1
        self._state = {**state, refusals.PROGRESS: self._progress}
        self._end = self._last_step()
        self._saved: int | None = None
        self._is_past = False
        self._skipping = 0
        script.connect(saves=options.save_every is not None)
        if not self._resume():
            self._progress.before = script.done
            refusals.check_same(ranks, self._state)
        script.done = self._total()
        leaves = options.global_batch // options.micro_batch
        if ranks.rank == 0 and leaves < ranks.size:
            log.warning(
                "steps(): %d ranks and %d micro-batches in a step: %d ranks compute nothing",
                *(ranks.size, leaves, ranks.size - leaves),
            )

    @property
    def done(self) -> int:
        """The number of steps that are applied."""
        return self._progress.position.step

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._order.next(self._progress.position).epoch

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that are left; ALL ranks go through them together.

        A step blocks at the end of its micro-batches until all ranks have come there.

        Raises:
            ContextError: a step was not applied, or its micro-batches were not all computed.
            NotFiniteError: a loss or a gradient is not finite.
            BitsDifferError: two ranks have computed different bits of a micro-batch.
            PeerLost: another rank is lost.
            SaveError: a checkpoint was not committed.
        """
        script, options = self._script, self._options
        if script.is_running:
            raise ContextError("two loops over steps() at once: end the first one first")
        trained, ranks = self._trained, script.distributed
        sources = (options.dataset, options.collate_fn, options.batch)
        feed = LeafFeed(self._order, (ranks.rank, ranks.size), sources, options.loader)
        gradients = Gradients(trained.parameters, script.group)
        threads = torch.get_num_threads()
        script.is_running = True
        try:
            torch.set_num_threads(options.threads)
            feed.begin(self._progress.position, self._is_over)
            while not self._is_done():
                data = self._order.next(self._progress.position)
                parts = (self._order, feed, gradients, script.group)
                skips = options.on_bad_batch == "skip" and self._skipping < MOST_SKIPPING
                script.step = step = Step(data, *parts, trained.optimizers, skips, options.check)
                yield step
                self._count(step, self._order.after(data))
                script.step = None
            self._save_last()
        finally:
            script.is_running = False
            feed.end()
            gradients.close()
            torch.set_num_threads(threads)

    def _last_step(self) -> int | None:
        if self._options.epochs is None:
            return self._options.until
        length, batch = self._order.length, self._order.global_batch
        steps = length // batch if self._order.drops_last else -(-length // batch)
        return self._options.epochs * steps

    def _total(self) -> int:
        """Return how many steps are done, those of the loops before included."""
        return self._progress.before + self.done

    def _is_over(self, position: Position) -> bool:
        if self._is_past:
            return True
        if self._options.epochs is not None:  # a loop may go on with another global_batch
            return position.epoch >= self._options.epochs
        return self._end is not None and position.step >= self._end

    def _is_done(self) -> bool:
        if self._is_over(self._progress.position):
            return True
        self.preempted = self._script.preempt.should_preempt()
        return self.preempted

    def _resume(self) -> bool:
        """Go on from the newest checkpoint, if it is one of this loop; return whether it began."""
        if self._options.save_every is None:
            return False
        checkpoint, progress = self._script.checkpoint(), self._progress
        newest = checkpoint.latest()
        loop = 0 if newest is None else newest.metadata.get(LOOP, 0)
        if loop > progress.loop:
            progress.position, self._is_past = Position(self._end or 0), True
            return True
        if loop < progress.loop:
            return False
        found = checkpoint.load(self._state)
        if found is None or not found.step:  # it begins, maybe from another run's weights
            return False
        progress.adopt()
        self._saved = found.step
        return True

    def _count(self, step: Step, position: Position) -> None:
        """Have a step count; report and save it."""
        if not step.is_applied:
            raise ContextError(
                f"step {step.number}: its apply() was not called: call step.apply(optimizer) once "
                "in each step"
            )
        self._progress.position = position
        self._skipping = self._skipping + 1 if step.skipped else 0
        total = self._script.done = self._total()
        options = self._options
        if self._script.distributed.rank == 0:
            self._script.report(total, step.metrics)
            if self._end:
                self._script.progress(min(1.0, step.number / self._end))
        if options.save_every is not None:
            handle = self._script.checkpoint().save(
                self._state, total, every=options.save_every, block=False, **self._how()
            )
            self._saved = self._saved if handle.skipped else total

    def _save_last(self) -> None:
        """Save the last step, and wait for it."""
        total = self._total()
        if self._options.save_every is not None and self.done and self._saved != total:
            self._script.checkpoint().save(self._state, total, block=True, **self._how())
            self._saved = total

    def _how(self) -> dict[str, Any]:
        """Return what goes with each save."""
        keep, every = self._options.keep, self._options.save_every
        if keep is None and every == "auto" and not os.environ.get(CHECKPOINT_KEEP):
            keep = Keep(last=KEPT)
        return {"keep": keep, "metadata": {LOOP: self._progress.loop}}
