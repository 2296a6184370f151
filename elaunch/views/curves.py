"""Metrics as curves: read as ``elaunch metrics`` reads them, thinned to what a screen can show.

A curve that is thinned keeps, of each of BUCKETS parts, the lowest and the highest point, so no
spike is lost. Many ranks are folded into one curve: lowest, median and highest of each part. Rows
that a later round did again are left out, values that are no numbers too; the latter are counted.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final, Literal

from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import ElaunchError
from elaunch.runs.directory import RunDir, run_id_of, runs_of
from elaunch.training.metrics.reading import Columns, RowTail, starts_of
from elaunch.views.failures import read_card
from elaunch.views.read import read

BUCKETS: Final = 400
SEPARATE: Final = 12
"""Ranks that are shown by a curve each; more are folded."""
SAMPLE: Final = 1000
SHARE: Final = 20
NUMBERS: Final = frozenset((int, float))

Axis = Literal["step", "time"]
Name = tuple[str, str]


@dataclass
class Points:
    """The points of one metric and rank, in the order in which they came."""

    step: array[float] = field(default_factory=lambda: array("d"))
    time: array[float] = field(default_factory=lambda: array("d"))
    value: array[float] = field(default_factory=lambda: array("d"))
    _ordered: dict[Axis, tuple[array[float], array[float]]] = field(default_factory=dict)

    def extend(self, step: array[float], time: array[float], value: array[float]) -> None:
        """Append points."""
        self.step.extend(step)
        self.time.extend(time)
        self.value.extend(value)
        self._ordered.clear()

    def along(self, axis: Axis) -> tuple[array[float], array[float]]:
        """Return x and y in the order of x; clocks of rounds need not agree."""
        if axis not in self._ordered:
            xs, ys = self.step if axis == "step" else self.time, self.value
            ordered = array("d", sorted(xs))
            if ordered != xs:
                order = sorted(range(len(xs)), key=xs.__getitem__)
                xs, ys = ordered, array("d", map(ys.__getitem__, order))
            self._ordered[axis] = xs, ys
        return self._ordered[axis]


@dataclass
class Metric:
    """One metric of one group: the points of each rank."""

    ranks: dict[int, Points] = field(default_factory=lambda: defaultdict(Points))
    not_finite: int = 0


class MetricsReader:
    """The metrics of one run on all nodes whose directories are here; several threads may call.

    Each reading is of what was appended since, and where that takes long it is seldom.
    """

    def __init__(self, run: RunDir, environ: Mapping[str, str]) -> None:
        self._run = run
        self._tail = RowTail(lambda: nodes_of(run, environ))
        self._due = 0.0
        self._metrics: dict[Name, Metric] = {}
        self._lock = threading.Lock()

    def overview(self) -> dict[str, Any]:
        """Return which metrics there are, and what happened meanwhile: restarts, checkpoints."""
        with self._lock:
            self._read()
            described = [_described(name, metric) for name, metric in sorted(self._metrics.items())]
        return {
            "metrics": described,
            "markers": list(markers(self._run)) if described else [],
            "torn": self._tail.torn,
            "separate": SEPARATE,
        }

    def curves(
        self, name: Name, axis: Axis, ranks: Sequence[int] | None, first: float, last: float
    ) -> list[dict[str, Any]]:
        """Return what is drawn of a metric; raise LookupError where there is none of that name."""
        with self._lock:
            self._read()
            metric = self._metrics.get(name)
            if metric is None:
                raise LookupError(f"metric {name[1][:200]!r}")
            return curves(metric, axis, ranks, first, last)

    def _read(self) -> None:
        began = time.monotonic()
        if began < self._due:
            return
        anew, appended = self._tail.read()
        if anew:
            self._metrics = {}
        for columns in appended:
            self._add(columns)
        self._due = time.monotonic() + SHARE * (time.monotonic() - began)

    def _add(self, columns: Columns) -> None:
        for name, values in columns.values.items():
            step, at = columns.step, columns.time
            kinds = set(map(type, values))
            if not kinds <= NUMBERS:
                chosen = [type(value) in NUMBERS for value in values]
                step, at = (array("d", compress(all_, chosen)) for all_ in (step, at))
                values = list(compress(values, chosen))
                if not values:
                    continue
            metric = self._metrics.setdefault((columns.group, name), Metric())
            numbers = array("d", values)
            if not all(map(math.isfinite, values)):
                chosen = list(map(math.isfinite, numbers))
                step, at, numbers = (array("d", compress(c, chosen)) for c in (step, at, numbers))
                metric.not_finite += len(chosen) - len(numbers)
            if numbers:
                metric.ranks[columns.rank].extend(step, at, numbers)


def nodes_of(run: RunDir, environ: Mapping[str, str]) -> list[RunDir]:
    """Return the directories of this start of a run: those that live at one time with ``run``."""
    starts = starts_of([one for one in runs_of(run_id_of(run), environ) if one.path != run.path])
    (own,) = starts_of([run])
    beside = [s.path for s in starts if s.began < own.ended and own.began < s.ended]
    return [run, *map(RunDir, beside)]


def _described(name: Name, metric: Metric) -> dict[str, Any]:
    return {
        "group": name[0],
        "name": name[1],
        "ranks": len(metric.ranks),
        "points": sum(len(points.value) for points in metric.ranks.values()),
        "not_finite": metric.not_finite,
    }


def curves(
    metric: Metric, axis: Axis, ranks: Sequence[int] | None, first: float, last: float
) -> list[dict[str, Any]]:
    """Return what is drawn between ``first`` and ``last``: a curve for each rank, or one of all.

    ``ranks`` None means all of them.
    """
    chosen = sorted(metric.ranks) if ranks is None else [r for r in ranks if r in metric.ranks]
    if ranks is None and len(chosen) > SEPARATE:
        parts = [_within(points, axis, first, last) for points in metric.ranks.values()]
        return [{"rank": None, **_folded(parts)}]
    return [
        {"rank": rank, **_thinned(*_within(metric.ranks[rank], axis, first, last))}
        for rank in chosen[:SEPARATE]
    ]


def _within(
    points: Points, axis: Axis, first: float, last: float
) -> tuple[Sequence[float], Sequence[float]]:
    xs, ys = points.along(axis)
    # One more at each end: a line leads out of what is shown.
    begin = max(0, bisect_left(xs, first) - 1)
    end = bisect_right(xs, last) + 1
    return xs[begin:end], ys[begin:end]


def _parts(xs: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield where each part of equal width begins and ends, empty ones left out."""
    width = (xs[-1] - xs[0]) / BUCKETS
    begin = 0
    for number in range(1, BUCKETS + 1):
        end = len(xs) if number == BUCKETS else bisect_left(xs, xs[0] + number * width, begin)
        if end > begin:
            yield begin, end
        begin = end


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    if len(xs) <= 2 * BUCKETS:
        return {"x": list(xs), "y": list(ys)}
    kept: list[int] = []
    for begin, end in _parts(xs):
        part = ys[begin:end]
        at = {begin + part.index(min(part)), begin + part.index(max(part))}
        kept += sorted(at)
    return {"x": [xs[i] for i in kept], "y": [ys[i] for i in kept]}


def _folded(ranks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    """Return the lowest, the median and the highest of all ranks in each part of x."""
    found: dict[str, list[float]] = {"x": [], "low": [], "y": [], "high": []}
    ranks = [(xs, ys) for xs, ys in ranks if xs]
    if not ranks:
        return found
    first = min(xs[0] for xs, _ in ranks)
    width = (max(xs[-1] for xs, _ in ranks) - first) / BUCKETS or 1.0
    parts: defaultdict[int, list[float]] = defaultdict(list)
    begins: dict[int, float] = {}
    for xs, ys in ranks:
        for x, y in zip(xs, ys, strict=True):
            number = int((x - first) / width)
            parts[number].append(y)
            if x < begins.get(number, math.inf):
                begins[number] = x
    for number, part in sorted(parts.items()):
        some = sorted(part[:: len(part) // SAMPLE + 1])
        found["x"].append(begins[number])
        found["low"].append(min(part))
        found["y"].append(some[len(some) // 2])
        found["high"].append(max(part))
    return found


def markers(run: RunDir) -> Iterator[dict[str, Any]]:
    """Yield rounds that began after another, and checkpoints, by step and by time."""
    record = read(run).record
    if record is None:
        return
    for round_ in record["history"][1:]:
        failed = read_card(run, round_["round"] - 1).document or {}
        step = failed.get("at_step")
        yield {
            "kind": "restart",
            "step": round_["resumed_step"] if step is None else step,
            "time": round_["started_at"],
            "text": f"round {round_['round']}: {round_['reason'] or 'began'}",
        }
    place = record["checkpoint_dir"]
    if place is None:
        return
    try:
        saved = open_storage(place).listed()
    except (ElaunchError, OSError):
        return  # the page of the checkpoints shows why
    for found in saved:
        yield {
            "kind": "checkpoint",
            "step": found.step,
            "time": found.committed or None,
            "text": found.name,
        }
