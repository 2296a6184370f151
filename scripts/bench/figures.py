"""What is measured: figures, their targets, samples, and the verdict on them.

A **case** is one way to run a job; each of its samples gives one value to each of its figures. The
runner takes the samples of the two launchers in turns, so that both see the same machine.

A sample's value is a number in the figure's unit, infinity for "never", or None when it could not
be measured; then its note says why. Such a sample stays in the results and in the table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launchers import ELAUNCH, TORCHRUN, Launcher

Unit = Literal["s", "ms", "us", "MB", "B/s", "/s", "%", "share", "steps", "trials", "count"]


@dataclass(frozen=True)
class Sample:
    """One value of one figure; ``detail`` is kept in the JSON file only."""

    value: float | None
    note: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What elaunch is to reach.

    ``at_most``, ``at_least``: elaunch's median, in the figure's unit. ``ratio``: elaunch's median
    over torchrun's, at most. ``all``: every trial counts 1, of at least ``limit``.
    """

    kind: Literal["at_most", "at_least", "ratio", "all"]
    limit: float


@dataclass(frozen=True)
class Figure:
    """One line of the table; without a target it is for information."""

    key: str
    title: str
    unit: Unit
    target: Target | None = None


@dataclass(frozen=True)
class Options:
    """How much to measure; seconds where not said otherwise."""

    repeats: int = 5
    trials: int = 20
    sizes: tuple[int, ...] = (2, 4, 8)
    settle: float = 1.0
    cpu_window: float = 20.0
    goodput_window: float = 90.0
    kill_interval: float = 15.0


@dataclass(frozen=True)
class Trial:
    """What a case needs to take one sample."""

    launcher: Launcher
    number: int
    options: Options
    root: Path
    earlier: Callable[[str], Sequence[Sample]]  # this launcher's samples of a figure so far

    @property
    def is_elaunch(self) -> bool:
        """Whether elaunch is the launcher under test."""
        return self.launcher.name == ELAUNCH


@dataclass(frozen=True)
class Case:
    """One way to run a job, and how often for each launcher; ``measure`` returns key → sample."""

    family: str
    title: str
    figures: tuple[Figure, ...]
    measure: Callable[[Trial], Mapping[str, Sample]]
    repeats: Mapping[str, int]


Results = dict[str, dict[str, list[Sample]]]  # figure key → launcher → samples


def values(samples: Sequence[Sample]) -> list[float]:
    """Return the values of the samples that were measured."""
    return [sample.value for sample in samples if sample.value is not None]


def median(samples: Sequence[Sample]) -> float | None:
    """Return the median of the samples that were measured; None when there are none."""
    found = values(samples)
    return statistics.median(found) if found else None


def ratio(by_launcher: Mapping[str, Sequence[Sample]]) -> float | None:
    """Return elaunch's median over torchrun's; None unless both are finite."""
    ours, theirs = median(by_launcher.get(ELAUNCH, ())), median(by_launcher.get(TORCHRUN, ()))
    if ours is None or not theirs or math.isinf(theirs) or math.isinf(ours):
        return None
    return ours / theirs


def is_met(target: Target, by_launcher: Mapping[str, Sequence[Sample]]) -> bool | None:
    """Return whether the target is reached; None when that cannot be said.

    A sample of elaunch that failed means "not reached", whatever the others say.
    """
    ours = by_launcher.get(ELAUNCH, ())
    middle = median(ours)
    if not ours:
        return None
    if middle is None or len(values(ours)) < len(ours):
        return False
    if target.kind == "all":
        if any(value != 1 for value in values(ours)):
            return False
        return True if len(ours) >= target.limit else None
    if target.kind == "at_most":
        return middle <= target.limit
    if target.kind == "at_least":
        return middle >= target.limit
    compared = ratio(by_launcher)
    return None if compared is None else compared <= target.limit


def as_json(sample: Sample) -> dict[str, Any]:
    """Return a sample as JSON-able data: what never came has no value and says so."""
    never = sample.value is not None and math.isinf(sample.value)
    found = {"value": finite(sample.value), "never": never, "note": sample.note}
    return {**found, "detail": dict(sample.detail)}


def finite(value: float | None) -> float | None:
    """Return ``value``, or None for what never came: JSON has no infinity."""
    return None if value is None or math.isinf(value) else value
