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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from elaunch.checkpoint.storage.storage import open_storage
from elaunch.dashboard.summary import RunReader
from elaunch.errors import ElaunchError
from elaunch.runs.directory import RunDir
from elaunch.training.metrics.files import ROUNDS, ROWS, SUPERSEDED
from elaunch.training.metrics.reading import StoredRow, read

BUCKETS: Final = 400
SEPARATE: Final = 12
"""Ranks that are shown by a curve each; more are folded."""
SAMPLE: Final = 1000
SHARE: Final = 20
LEADING: Final = frozenset(("steps_completed", "rank", "group", "round", "time"))

Axis = Literal["step", "time"]
Name = tuple[str, str]


@dataclass
class Points:
    """Points in the order of their steps."""

    step: array[float] = field(default_factory=lambda: array("d"))
    time: array[float] = field(default_factory=lambda: array("d"))
    value: array[float] = field(default_factory=lambda: array("d"))
    by_time: Points | None = None

    def add(self, step: float, at: float, value: float) -> None:
        """Append one point."""
        self.step.append(step)
        self.time.append(at)
        self.value.append(value)

    def along(self, axis: Axis) -> tuple[array[float], array[float]]:
        """Return x and y in the order of x; clocks of ranks and rounds need not agree."""
        if axis == "step":
            return self.step, self.value
        if self.by_time is None:
            order = sorted(range(len(self.time)), key=self.time.__getitem__)
            self.by_time = Points(
                time=array("d", (self.time[i] for i in order)),
                value=array("d", (self.value[i] for i in order)),
            )
        return self.by_time.time, self.by_time.value


@dataclass
class Metric:
    """One metric of one group: all its points, and those of each rank."""

    every: Points = field(default_factory=Points)
    ranks: dict[int, Points] = field(default_factory=dict)
    not_finite: int = 0


class MetricsReader:
    """The metrics of one run; read again when they have changed, and seldom where that is long."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen: object = None
        self._due = 0.0
        self._torn = 0
        self._metrics: dict[Name, Metric] = {}
        self._lock = threading.Lock()

    def metrics(self) -> Mapping[Name, Metric]:
        """Return the metrics by group and name; several threads may call."""
        with self._lock:
            seen, began = self._files(), time.monotonic()
            if seen != self._seen and began >= self._due:
                reading = read([self._run])
                self._metrics = gather(row for row in reading.rows if not row.superseded)
                self._seen, self._torn = seen, reading.torn
                ended = time.monotonic()
                self._due = ended + SHARE * (ended - began)
            return self._metrics

    def overview(self) -> dict[str, Any]:
        """Return which metrics there are, and what happened meanwhile: restarts, checkpoints."""
        metrics = self.metrics()
        return {
            "metrics": [_described(name, metric) for name, metric in sorted(metrics.items())],
            "markers": list(markers(self._run)) if metrics else [],
            "torn": self._torn,
            "separate": SEPARATE,
        }

    def _files(self) -> object:
        stats = []
        for name in (ROWS, SUPERSEDED, ROUNDS):
            try:
                info = (self._run.path / name).stat()
            except FileNotFoundError:
                continue
            stats.append((name, info.st_size, info.st_mtime_ns))
        return stats


def gather(rows: Iterator[StoredRow]) -> dict[Name, Metric]:
    """Return the numbers in the rows, which come in the order of their steps."""
    metrics: dict[Name, Metric] = {}
    for row in rows:
        values = row.values
        at, place = float(values.get("time") or 0.0), row.place
        for name, value in values.items():
            if name in LEADING or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            metric = metrics.setdefault((place.group, name), Metric())
            if not math.isfinite(value):
                metric.not_finite += 1
                continue
            metric.every.add(place.step, at, value)
            metric.ranks.setdefault(place.rank, Points()).add(place.step, at, value)
    return metrics


def _described(name: Name, metric: Metric) -> dict[str, Any]:
    return {
        "group": name[0],
        "name": name[1],
        "ranks": len(metric.ranks),
        "points": len(metric.every.value),
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
        return [{"rank": None, **_folded(*_within(metric.every, axis, first, last))}]
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


def _folded(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    found: dict[str, list[float]] = {"x": [], "low": [], "y": [], "high": []}
    for begin, end in _parts(xs) if xs else ():
        part = ys[begin:end]
        some = sorted(part[:: len(part) // SAMPLE + 1])
        for key, value in (
            ("x", xs[begin]),
            ("low", min(part)),
            ("y", some[len(some) // 2]),
            ("high", max(part)),
        ):
            found[key].append(value)
    return found


def markers(run: RunDir) -> Iterator[dict[str, Any]]:
    """Yield rounds that began after another, and checkpoints, by step and by time."""
    summary = RunReader(run).read()
    failed = {failure["round"]: failure for failure in summary.get("failures", ())}
    for round_ in summary.get("history", ())[1:]:
        before = failed.get(round_["round"] - 1) or {}
        step = before.get("at_step")
        yield {
            "kind": "restart",
            "step": round_["resumed_step"] if step is None else step,
            "time": round_["started_at"],
            "text": f"round {round_['round']}: {round_['reason'] or 'began'}",
        }
    place = summary.get("checkpoint_dir")
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
