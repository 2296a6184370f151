"""How fast a run trains, from one reading of its workers' progress to the next.

The step is that of the rank that has done the fewest, so that none is promised what only one has.
A new round, or a step that is done again, begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elaunch.text import duration

WINDOW_S: Final = 60.0
"""Seconds over which the rate is taken, or longer, between two steps."""
LEAST_S: Final = 0.5
"""Seconds from a first step, or progress, to the newest, to say anything of a rate."""


@dataclass
class StepRate:
    """Steps and their rate; ``step`` and ``done`` (0 to 1) are None where nothing is reported."""

    step: int | None = None
    last: int | None = None
    done: float | None = None
    _round: int = -1
    _steps: deque[tuple[float, int]] = field(default_factory=deque)
    _begun: tuple[float, float] | None = None
    _now: float = 0.0

    def see(self, at: float, number: int, workers: Iterable[Mapping[str, Any]]) -> None:
        """Take a reading of round ``number``: the ``workers`` of a record's ``progress``.

        ``at`` is in seconds of any clock.
        """
        known = [(worker.get("step"), worker.get("progress")) for worker in workers]
        steps = [step for step, _ in known if step is not None]
        before, self.step, self.last = self.step, min(steps, default=None), max(steps, default=None)
        done = self.done
        self.done = max((part for _, part in known if part is not None), default=None)
        self._now = at
        if number != self._round or (before or 0) > (self.step or 0):
            self._round, self._begun = number, None
            self._steps.clear()
        if (done or 0.0) > (self.done or 0.0):  # a restart from a checkpoint, without steps
            self._begun = None
        if self._begun is None and self.done is not None:
            self._begun = at, self.done
        if self.step is not None and (not self._steps or self._steps[-1][1] != self.step):
            self._steps.append((at, self.step))
        while len(self._steps) > 2 and self._steps[1][0] < at - WINDOW_S:
            self._steps.popleft()

    @property
    def rate(self) -> float | None:
        """Steps in a second, over the last minute; None where that is not known.

        It falls from the moment on at which the next step is overdue.
        """
        if not self._steps:
            return None
        (begun, first), (at, last) = self._steps[0], self._steps[-1]
        if at - begun < LEAST_S:
            return None
        return min((last - first) / (at - begun), (last - first + 1) / (self._now - begun))

    @property
    def eta_s(self) -> float | None:
        """Seconds until all is done, where the script reports how much is (``report_progress``)."""
        if self._begun is None or self.done is None:
            return None
        begun, part = self._begun
        if self.done >= 1.0:
            return 0.0
        if self.done <= part or self._now - begun < LEAST_S:
            return None
        return (1.0 - self.done) * (self._now - begun) / (self.done - part)

    def text(self, live: bool = True) -> str:
        """Return "step 12, 3.1 steps/s, 40 % done, ETA 2m 05s", of it what is known.

        Of a run that is no longer ``live`` only how far it is.
        """
        parts = []
        if self.step is not None:
            parts.append(f"step {self.step}" + (f"-{self.last}" if self.last != self.step else ""))
        if live and self.rate is not None:
            slow = 0 < self.rate < 0.1
            parts.append(f"{1 / self.rate:.3g} s/step" if slow else f"{self.rate:.3g} steps/s")
        if self.done is not None:
            parts.append(f"{100 * self.done:.0f} % done")
        if live and self.eta_s is not None:
            parts.append(f"ETA {duration(self.eta_s)}")
        return ", ".join(parts)
