"""elaunch.training.metrics.rows: what can be reported, and what is said of what cannot."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from elaunch.errors import MetricError
from elaunch.training.metrics.rows import Encoder


def encoded(metrics: Any, group: Any = "training", step: Any = 7) -> dict[str, Any]:
    """Return a row as a reader sees it."""
    row = Encoder(rank=2, round=3).row(group, step, metrics, 12.25)
    assert row.line.endswith("\n") and row.line.count("\n") == 1
    found = json.loads(row.line)
    assert isinstance(found, dict)
    return found


def refused(metrics: Any, group: Any = "training", step: Any = 7) -> str:
    """Return what is said of a row that cannot be written."""
    with pytest.raises(MetricError) as caught:
        encoded(metrics, group, step)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_row() -> None:
    assert encoded({"loss": 0.1, "note": "a\nb", "lrs": [0.1, None], "on": True}) == {
        "group": "training",
        "steps_completed": 7,
        "round": 3,
        "rank": 2,
        "time": 12.25,
        "loss": 0.1,
        "note": "a\nb",
        "lrs": [0.1, None],
        "on": True,
    }
    assert list(encoded({})) == ["group", "steps_completed", "round", "rank", "time"]


def test_nan_and_infinity_survive() -> None:
    row = encoded({"a": math.nan, "b": math.inf, "c": -math.inf, "d": [math.nan]})
    assert math.isnan(row["a"]) and math.isnan(row["d"][0])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


class Color(enum.IntEnum):
    """A subclass of int."""

    RED = 5


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array(4), 4),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor(2, dtype=torch.int32), 2),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (Color.RED, 5),
        (OrderedDict(a=(1, np.float32(2))), {"a": [1, 2.0]}),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        ("\ud800", "\ud800"),
    ],
)
def test_values_that_are_taken(value: object, written: object) -> None:
    row = encoded({"x": value})
    assert row["x"] == written
    assert type(row["x"]) is type(written)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1j, "metric 'x' is a complex, which cannot be written: give a number"),
        (object(), "metric 'x' is an object, which cannot be written"),
        ({1, 2}, "metric 'x' is a set"),
        (b"x", "metric 'x' is a bytes"),
        (2**64, "metric 'x' is an int of 65 bits"),
        (-(2**63) - 1, "metric 'x' is an int of 64 bits"),
        (np.zeros(3), r"metric 'x' is a numpy.ndarray of shape (3,), not one number"),
        (torch.zeros(1, 2), "metric 'x' is a torch.Tensor of shape (1, 2)"),
        (torch.zeros((), device="meta"), "metric 'x' is a torch.Tensor whose value cannot be had"),
        (torch.tensor(1j), "metric 'x' is a torch.Tensor that holds a complex"),
        (np.datetime64("2020-01-01"), "metric 'x' is a numpy.datetime64 that holds"),
        ({"a": {1: 2}}, "metric 'x' has a key 1, an int"),
        ([[np.zeros(2)]], "metric 'x' is a numpy.ndarray of shape (2,)"),
    ],
)
def test_values_that_are_not(value: object, said: str) -> None:
    assert said in refused({"x": value})


def test_what_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "metric 'x' is nested more than 20 deep" in refused({"x": loop})


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([("loss", 1)], "metrics is a list, not a mapping"),
        (None, "metrics is a NoneType, not a mapping"),
        ({1: 2}, "a metric's name is 1, an int: names are text; use '1'"),
    ],
)
def test_metrics_and_names_that_are_not_taken(metrics: object, said: str) -> None:
    assert said in refused(metrics)


def test_a_metric_may_say_what_its_row_says() -> None:
    metrics = {"rank": np.int64(2), "round": 3, "steps_completed": 7, "group": "training", "a": 1}
    assert encoded(metrics) == encoded({"a": 1})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_metric_with_the_name_of_a_column(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is kept under another name, as the Core API takes it; rank 0 says so once."""
    encoder = Encoder(rank, 3)
    for step in range(3):
        metrics = {"rank": rank + 0.01, "time": 1.5, "metric_time": 2, "loss": 0.5}
        row = json.loads(encoder.row("training", step, metrics, 7.0).line)
        assert (row["rank"], row["time"], row["loss"]) == (rank, 7.0, 0.5)
        assert row["metric_rank"] == rank + 0.01
        assert (row["metric_time"], row["metric_metric_time"]) == (2, 1.5)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == (
        []
        if rank
        else [
            "metric 'rank' is kept as 'metric_rank': each row has a column 'rank'",
            "metric 'time' is kept as 'metric_metric_time': each row has a column 'time'",
        ]
    )


@pytest.mark.parametrize("step", [0, 7, 2**63 - 1, np.int32(7), 7.0, torch.tensor(7)])
def test_steps_that_are_taken(step: Any) -> None:
    assert encoded({}, step=step)["steps_completed"] == int(step)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (-1, "steps_completed is -1: it goes from 0"),
        (2**63, "it goes from 0 to 2**63 - 1"),
        (1.5, "steps_completed is 1.5, a float: give the number of steps"),
        (math.nan, "steps_completed is nan"),
        (True, "steps_completed is True, a bool"),
        ("7", "steps_completed is '7', a str"),
        (None, "steps_completed is None"),
        ([7], "steps_completed is [7], a list"),
    ],
)
def test_steps_that_are_not(step: object, said: str) -> None:
    assert said in refused({}, step=step)


@pytest.mark.parametrize("group", ["training", "eval 2", "größe/1", 'a"b\\'])
def test_groups_that_are_taken(group: str) -> None:
    assert encoded({}, group=group)["group"] == group


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("", "the group has an empty name"),
        ("  ", "the group has an empty name"),
        ("a.b", "the group 'a.b' has a dot: name it 'a_b', say"),
        ("a\nb", "has a character that cannot be printed"),
        (None, "the group is None, a NoneType"),
        (["a"], "the group is ['a'], a list"),
    ],
)
def test_groups_that_are_not(group: object, said: str) -> None:
    assert said in refused({}, group=group)
