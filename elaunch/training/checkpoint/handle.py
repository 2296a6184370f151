"""The handle that ``save`` returns, and when a save is due.

With ``every=…`` a save is due at steps that all ranks know without asking each other. A save ends
with all ranks knowing the step of the next one; a call in between compares two numbers.

==========  ====================================================================================
``every``   the next save is due
==========  ====================================================================================
a number    so many steps after the last save, or after the checkpoint that the round began with
``"auto"``  ``FIRST`` steps after the first call; then as rank 0 chooses after each save
==========  ====================================================================================

Rank 0 measures for how long a save stops the training, and what a step takes. How often the job
fails it reads in the run's record: a round that is not the first began because one had ended.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from elaunch import text
from elaunch.errors import ContextError, RunDirError, SaveError
from elaunch.runs.directory import RunDir
from elaunch.runs.record import RoundRecord
from elaunch.runs.verdict import expected_failure, seconds_between
from elaunch.training.checkpoint import where
from elaunch.training.checkpoint.together import together
from elaunch.training.distributed import for_purpose

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Committed, Keep, Stage
    from elaunch.training.checkpoint.callcontext import CallContext, SaveRequest
    from elaunch.training.checkpoint.saver import AgentSaverClient


Busy = Literal["wait", "skip"]

ALONE_S: Final = 5.0
"""Seconds that a rank waits for its agent until the ranks ask each other: another node's agent may
have given the save up, and not reach this one."""
LONGER_S: Final = 10.0
"""Seconds that the ranks wait longer for each other than for a save in flight."""


def await_saver(
    call: CallContext,
    saver: AgentSaverClient,
    timeout: float | None,
    check: Callable[[], None] = lambda: None,
) -> Committed | None:
    """Return what rank 0's last save has become, when no rank has one in flight any more.

    ALL ranks call it together; each calls ``check`` first. With a ``timeout`` a save that takes
    longer is a SaveError; without one the agents say when the storage takes nothing of it any more.
    """
    seconds = call.seconds(timeout)
    while True:
        with (
            call.awaiting(seconds),
            together(call.distributed, "wait", seconds + LONGER_S, everyone=True) as step,
        ):
            check()
            step.sent = _waited(saver, alone(seconds, timeout), patient=timeout is None)
        if all(over for over, _ in step.received):
            committed: Committed | None = step.received[0][1]
            return committed


def _waited(
    saver: AgentSaverClient, seconds: float, *, patient: bool
) -> tuple[bool, Committed | None]:
    """Return whether this rank's save is over, and what it has become."""
    from elaunch.training.checkpoint.saver import StillInFlight

    try:
        return True, saver.wait(seconds)
    except StillInFlight:
        if not patient:
            raise
        return False, None


def alone(seconds: float, timeout: float | None) -> float:
    """Return for how long a rank waits for its agent at once; the script has given ``timeout``."""
    return min(seconds, ALONE_S) if timeout is None else seconds


def give_up(saver: AgentSaverClient, stage: Stage | None = None) -> None:
    """Report to this rank's agent that nothing comes of what was begun: ``abandon``.

    All ranks are about to raise another error, so a failure here is only logged.
    """
    try:
        saver.abandon(stage)
    except SaveError as problem:
        log.warning("a save cannot be taken back: %s", problem)


class SaveHandle:
    """One ``save``, and what has become of it.

    Attributes:
        step: the number of steps done that it saves.
        skipped: nothing is saved: another save was in flight, and ``when_busy`` was ``skip``; or
            the step was not due, as ``every`` has it.
        committed: the checkpoint, once this rank knows of its commit.
    """

    def __init__(self, step: int, committed: Committed | None = None) -> None:
        self.step = step
        self.skipped = committed is None
        self.committed = committed
        self._problem: SaveError | None = None
        self._next_due: int | None = None

    def done(self) -> bool:
        """Return whether the save is over; any rank may ask, alone. It does not block.

        On nodes other than rank 0's it is done when the node's own shards are on the disk.
        """
        return True

    def replicated(self) -> bool:
        """Return whether this rank's shard is in the memory of another node, too.

        Any rank may ask, alone; it does not block. The shard is sent there
        (``--checkpoint-replicas 1``) after ``save`` has returned: until it has come, or the save is
        committed, the loss of this node costs the step.
        """
        return False

    def result(self, timeout: float | None = None) -> Committed | None:
        """Return what was committed, when it is; None if the save was skipped.

        ALL ranks call it together. It blocks until the save is over, at most ``timeout`` seconds;
        None: as long as the storage takes something of it.

        Raises SaveError on all ranks, each time: the save came to nothing, or is not over yet, and
        goes on.
        """
        del timeout
        if self._problem is not None:
            raise self._problem
        return self.committed


class SaveInFlight(SaveHandle):
    """A save that the agents have in flight, until :meth:`settle` ends that, on all ranks alike.

    The next save or ``wait()`` settles it, or :meth:`result`, whichever all ranks call first.
    """

    def __init__(
        self, call: CallContext, saver: AgentSaverClient, stage: Stage, next_due: int | None = None
    ) -> None:
        super().__init__(stage.step)
        self._next_due = next_due
        self.skipped = self.is_settled = False
        self._call = call
        self._saver = saver
        self._stage = stage
        self._lost: SaveError | None = None

    def done(self) -> bool:
        """Return whether this rank's agent has nothing of it in flight any more."""
        from elaunch.training.checkpoint.saver import StillInFlight

        if not self.is_settled and self._lost is None:
            try:
                self._saver.wait(0.0)
            except StillInFlight:
                return False
            except SaveError as error:
                if not error.lost:
                    raise
                self._lost = error  # the agent sends it once; the next call of all ranks raises it
        return True

    def replicated(self) -> bool:
        """Return whether another node has this rank's shard, as far as this one's agent knows."""
        self.done()
        return self._saver.replicated == self._stage.uuid

    def result(self, timeout: float | None = None) -> Committed | None:
        """Wait until it is committed, on all ranks."""
        if self.is_settled:
            return super().result()
        try:
            committed = await_saver(self._call, self._saver, timeout, self.raise_if_lost)
        except SaveError as error:
            if error.lost:
                self.settle(None, error)
            raise
        self.settle(committed)
        return super().result()

    def raise_if_lost(self) -> None:
        """Raise the SaveError of a save that this rank knows to have come to nothing."""
        if self._lost is not None:
            raise self._lost

    def settle(self, committed: Committed | None, problem: SaveError | None = None) -> None:
        """Note what has become of it, the same on all ranks: ``committed`` is rank 0's.

        With a ``problem`` the agents wait for no shard of it any more.
        """
        if self.is_settled:
            return
        self.is_settled, self._problem = True, problem
        if problem is not None:
            give_up(self._saver, self._stage)
            return
        if committed is None or committed.uuid != self._stage.uuid:
            text = f"checkpoint {self._stage.final}: its agent does not know what has become of it"
            self._problem = SaveError(text)
            return
        self.committed = committed
        self._call.known.note(committed)


Every = int | Literal["auto"]

EVERY: Final = "save(every='auto')"
FIRST: Final = 10
"""Steps before the first save by ``auto``: what a step takes is measured on them."""
SAMPLES: Final = 5
"""Saves whose cost is remembered; their median counts."""
CHANGED: Final = 2.0
"""By so much another choice differs from the one that was printed, to be printed, too."""

log = logging.getLogger("elaunch")


class Schedule:
    """Which step is saved next; one of a context, the same on all ranks.

    Args:
        directory: of the run, which has its record; None: nothing is known of failures.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._every: Every | None = None
        self._due = 0
        self._last: int | None = None
        self._steps = FIRST
        self._marked: tuple[float, int] | None = (0.0, 0)
        self._begun = 0.0
        self._costs: deque[float] = deque(maxlen=SAMPLES)
        self._failed: tuple[int, float] | None = None
        self._prepared = False
        self._printed = self._now = 0.0
        self._pace = 1.0

    def measured(self) -> tuple[Every | None, int, int | None, int]:
        """Return what :meth:`follow` takes on another rank; the earliest due one is the least."""
        return self._every, self._due, self._last, self._steps

    def follow(self, every: Every | None, due: int, last: int | None, steps: int) -> None:
        """Have the next save due when it is on another rank."""
        self._every, self._due, self._last, self._steps = every, due, last, steps

    def move(self) -> None:
        """Prepare anew for the first save among other ranks, and measure from the next step on."""
        self._prepared, self._begun, self._marked = False, time.monotonic(), None

    def prepare(self, reserve: Callable[[], None]) -> None:
        """Have what only the first save needs done before it: it is not what a save costs."""
        if not self._prepared:
            reserve()
        self._prepared = True

    def is_due(
        self, every: Every, request: SaveRequest, latest: Callable[[], Committed | None]
    ) -> bool:
        """Return whether a step is to be saved; the same on all ranks, without asking them.

        ``latest`` gives what the round began with. Raises ContextError if ``every`` is no interval,
        or would fill the storage.
        """
        step: object = request.step
        if not isinstance(step, int):
            return True  # the save says what is wrong with it
        if every != self._every:
            _check(every, request.keep)
            if self._last is None:
                found = latest()
                self._last = 0 if found is None else found.step
            self._begun = time.monotonic()
            self._every, self._marked = every, (self._begun, step)
            self._due = step + FIRST if every == "auto" else self._last + every
        self._marked = self._marked or (time.monotonic(), step)
        return step >= self._due

    def begin(self, step: int) -> None:
        """Note that a save begins, and what a step has taken since the last one."""
        self._now = time.monotonic()
        since, at = self._marked or (self._now, step)
        if step > at:
            self._pace = max(self._now - since, 1e-6) / (step - at)

    def choose(self) -> int:
        """Return rank 0's choice of the steps to the next save; called at the end of a save."""
        self._costs.append(time.monotonic() - self._now)
        cost, failures = statistics.median(self._costs), expected_failure(*self._failures())
        return max(1, math.ceil(seconds_between(cost, failures) / self._pace))

    def note(self, call: CallContext, handle: SaveHandle) -> None:
        """Note a save that has begun; by ``auto``, agree on the next one.

        ALL ranks call it together, after every save.
        """
        step, now, chosen = handle.step, time.monotonic(), handle._next_due
        if self._every == "auto":
            if handle.skipped:  # the storage takes longer than the steps from one save to the next
                chosen = max(1, math.ceil((now - self._begun) / 2 / self._pace))
            elif chosen is None and call.rank == 0:
                chosen = self.choose()
            self._steps = handle._next_due or for_purpose(call.distributed, EVERY).broadcast(chosen)
            self._due = step + self._steps
            if call.rank == 0 and not handle.skipped:
                self._costs[-1] = now - self._now
                self._print()
        elif self._every is not None and not handle.skipped:
            self._due = step + self._every
        if not handle.skipped:
            self._begun, self._last = self._now, step
        self._marked = (time.monotonic(), step)

    def _print(self) -> None:
        """Print the choice, if it is another one."""
        chosen = self._steps * self._pace
        if self._printed / CHANGED <= chosen <= self._printed * CHANGED:
            return
        self._printed, (failures, seconds) = chosen, self._failures()
        print(
            f"elaunch: saves every {text.count(self._steps, 'step')} "
            f"({text.duration(chosen)}): a save stops the training for "
            f"{1000 * statistics.median(self._costs):.1f} ms, and the job has failed "
            f"{text.count(failures, 'time')} in {text.duration(seconds)}",
            file=sys.stderr,
            flush=True,
        )

    def _failures(self) -> tuple[int, float]:
        """Return how often the job has failed, and in how many seconds."""
        if self._failed is None:
            self._failed = (0, time.monotonic())
            try:
                rounds = [] if self._directory is None else _history(self._directory)
            except RunDirError as error:
                log.debug("how often the job has failed is not known: %s", error)
                rounds = []
            if rounds:
                ago = max(0.0, time.time() - rounds[0]["started_at"])
                # torchrun's rounds each have a record of their own.
                failures = sum(not one.get("planned") for one in rounds[1:])
                failures += rounds[0].get("round", 0)
                self._failed = (failures, time.monotonic() - ago)
        failures, first = self._failed
        return failures, time.monotonic() - first


def _check(every: Every, keep: Keep | None) -> None:
    """Raise ContextError unless ``every`` says how often to save, and what may go then."""
    if every == "auto":
        if not (keep or where.keep_of(os.environ)):
            raise ContextError(
                "every='auto' saves as often as is worth it, and all of that would stay: say what "
                "may go, as with keep=elaunch.Keep(last=3) or --checkpoint-keep-last 3"
            )
    elif isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ContextError(f"every={every!r}: give a number of steps, 1 or more, or 'auto'")


def _history(directory: Path) -> list[RoundRecord]:
    """Return the rounds that the run's record has."""
    return RunDir(directory).read_state()["history"]
