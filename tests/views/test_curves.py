"""Metrics as curves: thinned without losing a spike, folded over ranks, with what happened."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pytest

from elaunch.dashboard.app import Dashboard
from elaunch.dashboard.guard import App
from elaunch.runs.directory import RunDir
from elaunch.runs.record import new_round
from elaunch.training.metrics.files import MetricFiles
from elaunch.views.curves import BUCKETS, SEPARATE
from tests.cli.views.test_metrics import report
from tests.dashboard.asking import ask
from tests.dashboard.test_app import failed, made


@pytest.fixture
def run(environ: dict[str, str]) -> RunDir:
    """Return a run that has ended."""
    return made(environ)


@pytest.fixture
def app(environ: dict[str, str]) -> App:
    """Return the application, without its guard."""
    return Dashboard(environ).app()


def curve(app: App, **query: Any) -> list[Any]:
    """Return the curves of ``loss``."""
    known = {"run": "train-1", "group": "training", "name": "loss"}
    found: list[Any] = ask(app, "/api/curves", **{**known, **query}).json["curves"]
    return found


def test_curves_are_what_the_script_reported(app: App, run: RunDir) -> None:
    """One for each rank, in the order of the steps; values that are no numbers are counted."""
    report(run, "training", [1, 2, 3], loss=1.5, name="text")
    report(run, "training", [1, 2], rank=3, loss=math.nan, ok=True)
    report(run, "training", [4], rank=3, loss=-2)
    overview = ask(app, "/api/metrics", run="train-1").json
    assert overview["metrics"] == [
        {"group": "training", "name": "loss", "ranks": 2, "points": 4, "not_finite": 2}
    ]
    assert curve(app) == [
        {"rank": 0, "x": [1, 2, 3], "y": [1.5, 1.5, 1.5]},
        {"rank": 3, "x": [4], "y": [-2]},
    ]
    assert curve(app, ranks="3-7") == [{"rank": 3, "x": [4], "y": [-2]}]
    assert curve(app, x="time")[0]["x"] == [1.5e9] * 3
    assert ask(app, "/api/curves", run="train-1", group="training", name="no").status == 404
    assert ask(app, "/api/curves", run="train-1", **{"from": "x"}, name="loss").status in (400, 404)
    answer = ask(app, "/api/csv", run="train-1")
    rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    assert [row["steps_completed"] for row in rows] == ["1", "1", "2", "2", "3", "4"]
    assert "attachment" in answer.headers["content-disposition"]


def test_what_a_later_round_does_again_is_drawn_once(app: App, run: RunDir) -> None:
    """Superseded rows are left out, and a file that grows is read again."""
    report(run, "training", [1, 2, 3], loss=1)
    assert curve(app)[0]["y"] == [1, 1, 1]
    report(run, "training", [3, 4], round=1, loss=2)
    app = Dashboard({"XDG_STATE_HOME": str(run.path.parent.parent.parent)}).app()
    assert curve(app)[0] == {"rank": 0, "x": [1, 2, 3, 4], "y": [1, 1, 2, 2]}


def test_a_long_curve_is_thinned_and_keeps_its_spikes(app: App, run: RunDir) -> None:
    """Of each part the lowest and the highest; a zoom shows all points of its part."""
    line = b'{"group":"training","steps_completed":%d,"round":0,"rank":0,"time":1.0,"loss":%d}\n'
    values = {7777: 100, 3: -100}
    rows = (line % (step, values.get(step, step % 7)) for step in range(20_000))
    MetricFiles(run.path, 0, None).append(b"".join(rows), {"training": 0})
    (whole,) = curve(app)
    assert len(whole["x"]) <= 2 * BUCKETS and whole["x"] == sorted(whole["x"])
    assert dict(zip(whole["x"], whole["y"], strict=True)).items() >= values.items()
    (part,) = curve(app, **{"from": 7700, "to": 7800})
    assert part["x"] == list(range(7699, 7802))


def test_many_ranks_are_folded(app: App, run: RunDir) -> None:
    """The median, with the lowest and the highest; chosen ranks have a curve each."""
    for rank in range(SEPARATE + 1):
        report(run, "training", [1, 2], rank=rank, loss=float(rank))
    (folded,) = curve(app)
    middle = (SEPARATE + 1) // 2
    assert folded == {
        "rank": None,
        "x": [1, 2],
        "low": [0, 0],
        "y": [middle, middle],
        "high": [SEPARATE, SEPARATE],
    }
    assert [one["rank"] for one in curve(app, ranks="2,5")] == [2, 5]


def test_restarts_are_marked(app: App, environ: dict[str, str]) -> None:
    """By the step that the failed round had reached, and by time."""
    history = [new_round(0, None), new_round(1, "rank 1 exited with code 7")]
    run = made(environ, history=history)
    failed(run, 0, at_step=41)
    report(run, "training", [1], loss=1)
    (marker,) = ask(app, "/api/metrics", run="train-1").json["markers"]
    assert (marker["kind"], marker["step"]) == ("restart", 41)
    assert marker["time"] == history[1]["started_at"]
