"""The loop over the steps: ``ctx.train.steps()``.

Between two steps, in this order: the step counts; rank 0 reports its metrics; the state is saved
where that is due; and the loop ends where it is done, or where the job is to end. The state that is
saved has, beside what the script gave, where the loop stands.

Loops may follow each other, as for pre-training and fine-tuning: the steps of all count on, in
checkpoints and metrics. The metadata of a checkpoint says which of them it is of. Those before are
over at once, and load nothing: the state of the one that is under way has what is needed.

What all ranks do between two steps may fail since a rank is lost. If the others go on without it
(elaunch.training.steps.world), asking whether to end is done anew; a save is left to the next step.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Final

import torch

from elaunch.checkpoint.records import Keep
from elaunch.env import CHECKPOINT_KEEP
from elaunch.errors import CheckpointError, CollectiveError, ContextError, ElaunchError, SaveError
from elaunch.training.preempt.preempt import PreemptContext
from elaunch.training.steps import refusals
from elaunch.training.steps.feed import LeafFeed
from elaunch.training.steps.gradients import Gradients
from elaunch.training.steps.group import Group
from elaunch.training.steps.order import Position, Progress
from elaunch.training.steps.refusals import Options
from elaunch.training.steps.step import Step
from elaunch.training.steps.world import ENTRY_S, Standing, StepsWorld

KEPT: Final = 2
"""Checkpoints that stay by ``save_every="auto"``, where nothing says how many."""
LOOP: Final = "steps_loop"
"""The name in a checkpoint's metadata of the loop's number."""
MOST_SKIPPING: Final = 10
"""Steps in a row that may leave out micro-batches: after them it is not the data."""
RECENT: Final = 300
"""Steps whose metrics each rank keeps: rank 0 may have died before it had written them."""
FAILED_S: Final = 5.0
"""Seconds for the agent to say that a rank was lost, after a save has failed."""

log = logging.getLogger("elaunch")


@dataclass
class Script:
    """The parts of a script's context that its loops use.

    ``checkpoint`` returns ``ctx.checkpoint``, which imports this package's users: its type would
    make a circle.
    """

    world: StepsWorld
    preempt: PreemptContext
    checkpoint: Callable[[], Any]
    report: Callable[[int, Mapping[str, Any]], None]
    written: Callable[[], int]
    """Returns the newest step whose metrics are written."""
    progress: Callable[[float], None]
    loops: int = 0
    """How many loops were made."""
    done: int = 0
    """Steps of all of them."""
    is_running: bool = False
    step: Step | None = None
    """The step that has begun and does not count yet."""
    recent: deque[tuple[int, Mapping[str, Any]]] = field(
        default_factory=lambda: deque(maxlen=RECENT)
    )
    """The metrics of the newest steps."""

    def note(self, error: BaseException) -> None:
        """Add to an error of the script's in which micro-batch it was raised, if in one."""
        what = "" if self.step is None or isinstance(error, ElaunchError) else self.step.under_way()
        if what and (add := getattr(error, "add_note", None)) is not None:  # Python 3.11
            add(f"elaunch: in {what}")


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
        world, ranks = script.world, script.world.ranks
        if threading.current_thread() is not threading.main_thread():
            raise ContextError("steps() is called in a thread: call it in the main thread")
        if script.is_running:
            raise ContextError("steps() is called inside of another loop: end that one first")
        world.own_calls(begin=True)
        self._trained = refusals.check(ranks, state, options, alone=world.joins)
        self._order = options.order()
        self._progress = Progress(self._order, script.loops)
        script.loops += 1
        self._state = {**state, refusals.PROGRESS: self._progress}
        self._end = self._last_step()
        self._saved: int | None = None
        self._is_past = False
        self._skipping = 0
        if world.joins:
            if world.asked() > self._progress.loop:
                self._progress.position, self._is_past = Position(self._end or 0), True
            return
        world.connect(saves=options.save_every is not None)
        if not self._resume():
            self._progress.before = script.done
            refusals.check_same(ranks, self._state)
        script.done = self._total()
        world.own_calls(begin=False)
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
            PeerLost: another rank is lost, and the job does not go on without it.
            SaveError: a checkpoint was not committed.
        """
        script, options, world = self._script, self._options, self._script.world
        if script.is_running:
            raise ContextError("two loops over steps() at once: end the first one first")
        trained, threads = self._trained, torch.get_num_threads()
        sources = (options.dataset, options.collate_fn, options.batch)
        self._feed = feed = LeafFeed(self._order, sources, options.loader)
        self._gradients = gradients = Gradients(trained.parameters, None)
        self._is_grouped = False
        script.is_running, script.step, world.loop = True, None, self._progress.loop
        try:
            torch.set_num_threads(options.threads)
            if world.joins and not self._is_past:
                self._join()
            world.stand(not self._is_past)
            while not self._is_done():
                data = self._order.next(self._progress.position)
                world.begin_step()
                self._regroup(self._progress.position)
                parts = (self._order, feed, gradients, world, trained.optimizers)
                skips = self._skipping < MOST_SKIPPING
                rules = options if skips else replace(options, on_bad_batch="raise")
                script.step = step = Step(data, *parts, self._survive, rules)
                yield step
                self._count(step, self._order.after(data))
                script.step = None
                self._together(self._save)
                if world.newcomers:
                    self._together(partial(world.admit, self.done, self._send))
            self._finish()
        finally:
            world.stand(False)
            world.own_calls(begin=False)
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
        while not self._together(self._ask_whether_to_end):
            pass
        return self.preempted

    def _ask_whether_to_end(self) -> None:
        self.preempted = self._script.preempt.should_preempt()
        if self.preempted:
            self._script.world.stand(False)

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
        script = self._script
        script.done = self._total()
        script.recent.append((script.done, step.metrics))
        if script.world.ranks.rank == 0:
            script.report(script.done, step.metrics)
            if self._end:
                script.progress(min(1.0, step.number / self._end))

    def _save(self) -> None:
        """Save the step, where that is due."""
        every, total = self._options.save_every, self._total()
        if every is not None:
            handle = self._script.checkpoint().save(
                self._state, total, every=every, block=False, **self._how()
            )
            self._saved = self._saved if handle.skipped else total

    def _finish(self) -> None:
        """Save the last step, and wait for that; and for ranks that have yet to come back."""
        until = time.monotonic() + self._script.world.ranks.timeout
        while not self._together(partial(self._end_together, until)):
            pass

    def _end_together(self, until: float) -> None:
        world = self._script.world
        self._save_last()
        while world.missing and not self.preempted:
            world.await_newcomers(until)
            if world.newcomers:
                world.admit(self.done, self._send)
                self._save_last()  # that is where they are
            else:
                self._ask_whether_to_end()

    def _save_last(self) -> None:
        if not (self.preempted or self._is_past):
            self._script.world.ranks.barrier()  # who dies before this has died in the loop
        total, saves = self._total(), self._options.save_every is not None and not self._is_past
        if saves and self.done and self._saved != total:
            self._script.checkpoint().save(self._state, total, block=True, **self._how())
            self._saved = total

    def _how(self) -> dict[str, Any]:
        """Return what goes with each save."""
        keep, every = self._options.keep, self._options.save_every
        if keep is None and every == "auto" and not os.environ.get(CHECKPOINT_KEEP):
            keep = Keep(last=KEPT)
        return {"keep": keep, "metadata": {LOOP: self._progress.loop}}

    # ── ranks that die, and come back ────────────────────────────────────────────────────────────

    def _together(self, work: Callable[[], None]) -> bool:
        """Do what all ranks do between two steps.

        Returns whether it is done: else a rank was lost, and the others go on without it.
        """
        try:
            self._script.world.check()
            work()
        except (CollectiveError, ContextError, SaveError) as error:
            self._reform(error, self.done)
            return False
        return True

    def _survive(self, error: Exception) -> None:
        """Go on in mid-step without a rank that was lost; raise ``error`` if that cannot be."""
        self._reform(error, self.done + 1)

    def _reform(self, error: Exception, calls: int) -> None:
        """Go on without ranks that were lost; ``calls`` of should_preempt() were made."""
        script, world = self._script, self._script.world
        saves, was_first = self._options.save_every is not None, world.ranks.rank == 0
        schedule = script.checkpoint().schedule if saves else None
        own = Standing(self.done + 1, self._saved, schedule)
        seconds = ENTRY_S if isinstance(error, CollectiveError) else FAILED_S
        found = world.reform(error, calls, own, seconds)
        if saves:
            known = [one.schedule for one in found if one.schedule is not None]
            # Those ahead are past the end of the step before: nobody saves it.
            earliest = self._progress.before + max(one.next for one in found)
            script.checkpoint().follow(min(known, key=itemgetter(1)), earliest)
        lost = world.spans_nodes or len({one.saved for one in found}) > 1
        self._saved = None if lost else self._saved
        if not was_first:
            self._report_recent()
        self._is_grouped = False
        position = self._progress.position
        if script.step is not None:  # its micro-batches are given out again
            position = self._order.after(self._order.next(position))
        self._regroup(position)

    def _report_recent(self) -> None:
        """Write what another rank 0 may have left unwritten, or written on another node."""
        script = self._script
        if script.world.ranks.rank == 0:
            written = script.written()
            for total, metrics in script.recent:
                if total > written:
                    script.report(total, metrics)

    def _regroup(self, position: Position) -> None:
        """Compute with the ranks that do from now on; fetch ahead from a position."""
        world, ranks = self._script.world, self._script.world.ranks
        if self._is_grouped and self._gradients.group is world.group:
            return
        self._is_grouped = True
        self._gradients.regroup(world.group)
        self._feed.begin(position, self._is_over, (ranks.rank, ranks.size))

    def _send(self, group: Group, newcomers: Sequence[int]) -> None:
        """Send newcomers where the loop stands."""
        saves, script = self._options.save_every is not None, self._script
        more = {
            "facts": refusals.facts(self._trained, self._options),
            "saved": self._saved,
            "skipping": self._skipping,
            "schedule": script.checkpoint().schedule if saves else None,
            "recent": list(script.recent) if script.world.spans_nodes else [],
        }
        metadata, file = script.checkpoint().pack(self._state)
        group.give(_bytes(metadata), newcomers)
        group.give(file, newcomers)
        group.give(_bytes(json.dumps(more, default=float).encode()), newcomers)

    def _join(self) -> None:
        """Join the others as a newcomer, between two of their steps."""
        script, world = self._script, self._script.world
        saves = self._options.save_every is not None
        group, source = world.join(saves)
        metadata, file, more = (group.take(source) for _ in range(3))
        known = json.loads(more.numpy().tobytes())
        for name, value in refusals.facts(self._trained, self._options).items():
            if known["facts"].get(name) != value:
                raise ContextError(
                    f"steps(): {name} is {value} on this rank, which takes the place of one that "
                    f"has died, and {known['facts'].get(name)} on the others"
                )
        try:
            script.checkpoint().unpack(self._state, metadata.numpy().tobytes(), file)
        except CheckpointError as error:
            raise ContextError(
                "steps(): this rank, which takes the place of one that has died, has another "
                f"state than the others: {error}"
            ) from error
        self._progress.adopt()
        self._saved, self._skipping = known["saved"], known["skipping"]
        if saves:
            script.checkpoint().follow(known["schedule"])
        script.done = self._total()
        script.recent.extend(known["recent"])
        self._report_recent()


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
