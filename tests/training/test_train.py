"""elaunch.training.train: reports by rank, chief_only, progress and status."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elaunch.errors import ContextError, MetricError
from elaunch.training.launch import alone
from elaunch.training.train import TrainContext
from elaunch.wire.progress import PageReader, ProgressPage


def context(directory: Path | None, rank: int = 0, **options: Any) -> TrainContext:
    """Return the context of one rank of two, in round 1."""
    placed = alone({})._replace(rank=rank, size=2, local_rank=rank, local_size=2, round=1)
    page = options.pop("page", None) or ProgressPage()
    return TrainContext(placed, page, directory, **options)


def rows(directory: Path) -> list[dict[str, Any]]:
    """Return what is on disk."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_every_rank_reports_and_is_named(tmp_path: Path) -> None:
    """Ranks share the steps between them, as in Determined's detached example."""

    def rank(number: int) -> None:
        train = context(tmp_path, number)
        for step in range(number, 100, 2):
            train.report_training_metrics(
                steps_completed=step, metrics={"loss": 1 / (step + 1), "rank": number}
            )
            if step % 10 == number:
                train.report_validation_metrics(steps_completed=step, metrics={"acc": 0.5})
        train.report_metrics("test", steps_completed=99, metrics={"f1": 0.25})
        train.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows(tmp_path)
    training = sorted((r["steps_completed"], r["rank"]) for r in found if r["group"] == "training")
    assert training == [(step, step % 2) for step in range(100)]
    assert sum(row["group"] == "validation" for row in found) == 20
    assert sorted(row["rank"] for row in found if row["group"] == "test") == [0, 1]
    assert {row["round"] for row in found} == {1}


@pytest.mark.parametrize("at_init", [True, False])
def test_chief_only(tmp_path: Path, at_init: bool) -> None:
    options, call = ({"chief_only": True}, {}) if at_init else ({}, {"chief_only": True})
    chief, other = (context(tmp_path, rank, **options) for rank in range(2))
    chief.report_training_metrics(steps_completed=1, metrics={"loss": 0.5}, **call)
    chief.report_progress(0.5, **call)
    refused = [
        lambda: other.report_training_metrics(steps_completed=1, metrics={}, **call),
        lambda: other.report_validation_metrics(steps_completed=1, metrics={}, **call),
        lambda: other.report_metrics("x", steps_completed=1, metrics={}, **call),
        lambda: other.report_progress(0.5, **call),
        lambda: other.set_status("x", **call),
    ]
    for report in refused:
        with pytest.raises(ContextError, match=r"rank 1 reports .* only rank 0 may"):
            report()
    if at_init:
        other.report_training_metrics(2, {}, chief_only=False)
    for train in (chief, other):
        train.close()
    assert [row["rank"] for row in rows(tmp_path)] == [0, 1] if at_init else [0]


def test_progress_status_and_steps_are_on_the_page(tmp_path: Path) -> None:
    page = ProgressPage()
    train = context(tmp_path, page=page)
    reader = PageReader(page.fd)
    beats = reader.read().beats
    train.report_training_metrics(steps_completed=17, metrics={})
    train.report_progress(np.float32(0.25))
    train.set_status("warming up")
    seen = reader.read()
    assert (seen.step, seen.progress, seen.status) == (17, 0.25, "warming up")
    assert seen.beats >= beats + 3
    train.close()


@pytest.mark.parametrize("progress", [-0.01, 1.01, math.nan, math.inf, "0.5", None, 10**400])
def test_progress_out_of_range(progress: Any) -> None:
    train = context(None)
    with pytest.raises(ValueError, match=r"progress is .*: it goes from 0\.0 to 1\.0") as caught:
        train.report_progress(progress)
    assert isinstance(caught.value, MetricError)


@pytest.mark.parametrize("progress", [0, 1, 0.5, True])
def test_progress_in_range(progress: float) -> None:
    context(None).report_progress(progress)


def test_a_status_is_text() -> None:
    with pytest.raises(MetricError, match="the status is 3, a int: give text"):
        context(None).set_status(3)  # type: ignore[arg-type]


def test_an_error_is_the_callers_and_writes_nothing(tmp_path: Path) -> None:
    train = context(tmp_path)
    with pytest.raises(MetricError, match="metric 'x' is a complex"):
        train.report_training_metrics(steps_completed=1, metrics={"ok": 1, "x": 1j})
    train.report_training_metrics(steps_completed=2, metrics={"ok": 1})
    train.close()
    assert [row["steps_completed"] for row in rows(tmp_path)] == [2]
    with pytest.raises(ContextError, match="closed"):
        train.report_training_metrics(steps_completed=3, metrics={})


def test_without_a_directory_metrics_are_refused() -> None:
    train = context(None)
    with pytest.raises(ContextError, match="no run directory"):
        train.report_training_metrics(steps_completed=1, metrics={})
    train.flush()
    train.close()
