"""elaunch.runs.record: reading foreign and torn records."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from elaunch.errors import RunDirError
from elaunch.runs import record
from elaunch.runs.directory import RunDir
from elaunch.runs.record import (
    add_round,
    check,
    first_record,
    new_round,
    new_worker,
)
from tests.views.played_agent import new_record


@pytest.fixture
def valid(tmp_path: Path) -> dict[str, Any]:
    return new_record(RunDir(tmp_path), "train-3fa2c1", [11, 12])


def test_a_record_survives_json(valid: dict[str, Any]) -> None:
    valid["argv"] = ["bad\udcffbyte", "ä"]
    valid["checkpoint"] = {"path": "/c", "step": 3, "format": "dcp"}
    assert record.parse(json.dumps(valid).encode(), "here") == valid


def test_fields_of_a_later_writer_are_kept(valid: dict[str, Any]) -> None:
    valid["new"] = 1
    valid["agent"]["new"] = 1
    assert record.check(valid, "here") == valid


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "here is empty: it was cut off"),
        (b'{"schema": 1, "run_id": "tr', "here is not JSON"),
        (b"\xff\xfe\x00", "here is not JSON"),
        (b"[]", "has no field 'schema'"),
        (b'{"a": 1}', "has no field 'schema'"),
        (b'{"schema": 2}', "another version of elaunch: its schema is 2, this version reads 1"),
        (b'{"schema": 1}', "Object missing required field run_id"),
        (b"[" * 100_000, "here is not JSON"),
    ],
)
def test_torn_and_foreign_files_are_named(raw: bytes, message: str) -> None:
    with pytest.raises(RunDirError, match="here") as caught:
        record.parse(raw, "here")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["round"], "1", "in the field 'round': Expected int, got str"),
        (["round"], None, "in the field 'round': Expected int, got null"),
        (["started_at"], "now", "in the field 'started_at': Expected float, got str"),
        (["started_at"], 1e300, "1e+300 is no time"),
        (["ended_at"], float("nan"), "nan is no time"),
        (["state"], "DANCING", "the unknown state 'DANCING'"),
        (["agent"], [], "in the field 'agent': Expected object, got array"),
        (["agent", "pid"], None, "in the field 'agent.pid': Expected int, got null"),
        (["agent", "start_ticks"], "x", "in the field 'agent.start_ticks': Expected int, got str"),
        (["argv"], "x", "in the field 'argv': Expected array, got str"),
        (["argv"], [1], "in the field 'argv[0]': Expected str, got int"),
        (["workers", 1, "rank"], None, "in the field 'workers[1].rank': Expected int, got null"),
        (["workers", 0], 7, "in the field 'workers[0]': Expected object, got int"),
        (
            ["history", 0, "reason"],
            7,
            "in the field 'history[0].reason': Expected str | null, got int",
        ),
        (["checkpoint"], {}, "in the field 'checkpoint': Object missing required field path"),
        (["round"], "\ud800", "can't encode character"),
        (["failure"], "x", "in the field 'failure': Expected object | null, got str"),
    ],
)
def test_each_wrong_field_is_named(
    valid: dict[str, Any], path: list[Any], value: object, message: str
) -> None:
    broken = copy.deepcopy(valid)
    place: Any = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(RunDirError) as caught:
        record.check(broken, "here")
    assert message in str(caught.value)


def test_a_first_record_is_a_record(tmp_path: Path) -> None:
    made = first_record("job-1", "job", tmp_path)
    made["workers"].append(new_worker(3, 1))
    made["history"].append(new_round(2, "because", 120))
    assert check(made, "here") == made
    assert (made["state"], made["agent"]["pid"]) == ("STARTING", os.getpid())


def test_a_run_of_many_rounds_has_a_small_record(tmp_path: Path) -> None:
    """The newest rounds stay, and it is known how many there were."""
    made = first_record("job-1", "job", tmp_path)
    for number in range(2_700):
        add_round(made, new_round(number, "rank 1 was killed by SIGKILL", 10 * number))
    assert [entry["round"] for entry in made["history"]] == list(range(2_600, 2_700))
    assert made["rounds_left_out"] == 2_600
    assert check(made, "here") == made
    assert len(json.dumps(made)) < 30_000
