"""When a save is due: ``save(every=…)``, at steps that all ranks know without asking each other.

A save ends with all ranks knowing the step of the next one; a call in between compares two numbers.

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
from elaunch.errors import ContextError, RunDirError
from elaunch.runs.directory import RunDir
from elaunch.runs.verdict import expected_failure, seconds_between
from elaunch.training.checkpoint import where

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Committed
    from elaunch.checkpoint.retention.delete import Keep
    from elaunch.training.checkpoint.callcontext import CallContext, SaveRequest

Every = int | Literal["auto"]

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
        self._marked = (0.0, 0)
        self._begun = 0.0
        self._costs: deque[float] = deque(maxlen=SAMPLES)
        self._failed: tuple[int, float] | None = None
        self._prepared = False
        self._printed = 0.0

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
        return step >= self._due

    def note(self, call: CallContext, step: int, begun: float, *, skipped: bool) -> None:
        """Note a save, ``begun`` in monotonic seconds; by ``auto``, agree on the next one.

        ALL ranks call it together, after every save.
        """
        if self._every == "auto":
            if call.rank == 0:
                self._choose(step, begun, skipped)
            self._steps = call.distributed.broadcast(self._steps)
            self._due = step + self._steps
        elif self._every is not None and not skipped:
            self._due = step + self._every
        if not skipped:
            self._last = step
        self._marked = (time.monotonic(), step)

    def _choose(self, step: int, begun: float, skipped: bool) -> None:
        """Choose the number of steps to the next save."""
        since, at = self._marked
        pace = max(begun - since, 1e-6) / max(1, step - at)
        now = time.monotonic()
        if skipped:  # the storage takes longer for a save than the steps from one to the next
            self._steps = max(1, math.ceil((now - self._begun) / 2 / pace))
            return
        self._begun = begun
        self._costs.append(now - begun)
        cost, (failures, seconds) = statistics.median(self._costs), self._failures()
        chosen = seconds_between(cost, expected_failure(failures, seconds))
        self._steps = max(1, math.ceil(chosen / pace))
        if not self._printed / CHANGED <= chosen <= self._printed * CHANGED:
            self._printed = chosen
            print(
                f"elaunch: saves every {text.count(self._steps, 'step')} "
                f"({text.duration(self._steps * pace)}): a save stops the training for "
                f"{1000 * cost:.1f} ms, and the job has failed {text.count(failures, 'time')} in "
                f"{text.duration(seconds)}",
                file=sys.stderr,
                flush=True,
            )

    def _failures(self) -> tuple[int, float]:
        """Return how often the job has failed, and in how many seconds."""
        if self._failed is None:
            self._failed = (0, time.monotonic())
            try:
                rounds = [] if self._directory is None else _rounds(self._directory)
            except RunDirError as error:
                log.debug("how often the job has failed is not known: %s", error)
                rounds = []
            if rounds:
                ago = max(0.0, time.time() - rounds[0])
                self._failed = (len(rounds) - 1, time.monotonic() - ago)
        failures, first = self._failed
        return failures, time.monotonic() - first


def _check(every: Every, keep: Keep | None) -> None:
    """Raise ContextError unless ``every`` says how often to save, and what may go then."""
    if every == "auto":
        if not (keep or where.keep_of(os.environ)):
            raise ContextError(
                "every='auto' saves as often as is worth it, and all of that would stay: say what "
                "may go, as with keep=3 or --checkpoint-keep-last 3"
            )
    elif isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ContextError(f"every={every!r}: give a number of steps, 1 or more, or 'auto'")


def _rounds(directory: Path) -> list[float]:
    """Return when the rounds that the run's record has began, in seconds since the epoch."""
    return [one["started_at"] for one in RunDir(directory).read_state()["history"]]
