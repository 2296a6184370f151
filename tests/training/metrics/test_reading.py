"""elaunch.training.metrics.reading: one run from all its starts, superseded rows set apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from elaunch.errors import RunDirError, UsageError
from elaunch.runs.directory import RunDir, create
from elaunch.training.metrics.files import ROWS, SUPERSEDED, MetricFiles
from elaunch.training.metrics.history import firsts
from elaunch.training.metrics.reading import MetricRows, directories, read
from elaunch.training.metrics.rows import Encoder
from tests.monitor.played_agent import new_record

ENDED = {"start_ticks": 1}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return a state directory of the test's own."""
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


def start(environ: dict[str, str], began: float, ended: float | None, **changes: Any) -> RunDir:
    """Make a directory of the run ``job``; its times are seconds from now."""
    run = create("job", environ)
    now = time.time()
    record = new_record(run, "job", [])
    record["started_at"] = now + began
    record["ended_at"] = None if ended is None else now + ended
    record["state"] = "RUNNING" if ended is None else "FAILED"
    record["agent"] |= changes.pop("agent", {})
    run.write_state(record | changes)
    return run


def report(
    run: RunDir, *steps: int, resume: int | None = None, rank: int = 0, round: int = 0
) -> None:
    """Report training of some steps in a round of the run."""
    encoder = Encoder(rank, round)
    lines = "".join(encoder.row("training", step, {"at": round}, 1.0).line for step in steps)
    first = firsts(("training", step) for step in steps)
    MetricFiles(run.path, round, resume).append(lines.encode(), first)


def effective(reading: MetricRows) -> list[int]:
    """Return the steps that count."""
    return [row.values["steps_completed"] for row in reading.rows if not row.superseded]


def test_rows_are_sorted_by_step_and_rank(environ: dict[str, str]) -> None:
    run = start(environ, -10, None)
    report(run, 3, 1, rank=1)
    report(run, 1, 2, rank=0)
    rows = read([run]).rows
    assert [(row.values["steps_completed"], row.place.rank) for row in rows] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (3, 1),
    ]


def test_a_later_start_supersedes_rows_of_an_earlier_one(environ: dict[str, str]) -> None:
    first, second = start(environ, -100, -50), start(environ, -40, -1)
    report(first, *range(1, 9))
    report(second, 6, 7, resume=5)
    reading = read(directories("job", environ))
    assert effective(reading) == [1, 2, 3, 4, 5, 6, 7]
    assert [row.values["steps_completed"] for row in reading.rows if row.superseded] == [6, 7, 8]
    assert reading.directories == (first.path, second.path)


def test_a_start_from_nothing_supersedes_all(environ: dict[str, str]) -> None:
    first, second = start(environ, -100, -50), start(environ, -40, None)
    report(first, *range(1, 9))
    assert effective(read(directories("job", environ))) == list(range(1, 9))
    report(second, 1)
    assert effective(read(directories("job", environ))) == [1]


def test_a_later_round_of_a_later_start_reaches_back(environ: dict[str, str]) -> None:
    first, second = start(environ, -100, -50), start(environ, -40, None)
    report(first, *range(1, 9))
    report(second, 6, 7, resume=5)
    report(second, 4, resume=3, round=1)
    assert effective(read(directories("job", environ))) == [1, 2, 3, 4]


def test_nodes_of_one_job_do_not_supersede_each_other(environ: dict[str, str]) -> None:
    """They share a home and began one after the other, but live at one time."""
    first, second = start(environ, -100, None), start(environ, -90, None)
    report(first, *range(1, 9), rank=0)
    report(second, *range(1, 9), rank=1)
    assert len(effective(read(directories("job", environ)))) == 16


def test_a_start_that_was_killed_ended_when_it_wrote_last(environ: dict[str, str]) -> None:
    first = start(environ, -100, None, agent=ENDED)
    report(first, *range(1, 9))
    second = start(environ, 10, None)
    report(second, 5, resume=4)
    assert effective(read(directories("job", environ))) == [1, 2, 3, 4, 5]


def test_which_directories_are_meant(environ: dict[str, str]) -> None:
    first, second = start(environ, -100, -50), start(environ, -40, -1)
    assert {run.path for run in directories("job", environ)} == {first.path, second.path}
    assert {run.path for run in directories("jo", environ)} == {first.path, second.path}
    assert directories("job.1", environ) == [first]
    assert directories("job.2", environ) == [second]
    assert directories(str(first.path), environ) == [first]
    with pytest.raises(UsageError, match="the nearest: job"):
        directories("jbo", environ)


def test_rows_that_are_in_both_files_are_there_once(environ: dict[str, str]) -> None:
    """So a writer leaves them that is killed while it moves them."""
    run = start(environ, -10, None)
    report(run, 1, 2)
    (run.path / SUPERSEDED).write_bytes((run.path / ROWS).read_bytes())
    assert effective(read([run])) == [1, 2]
    assert len(read([run]).rows) == 2


def test_a_late_row_of_an_earlier_round_is_superseded(environ: dict[str, str]) -> None:
    run = start(environ, -10, None)
    report(run, 1, 2)
    report(run, 2, resume=1, round=1)
    report(run, 3)
    reading = read([run])
    assert [
        (r.values["round"], r.values["steps_completed"], r.superseded) for r in reading.rows
    ] == [
        (0, 1, False),
        (0, 2, True),
        (1, 2, False),
        (0, 3, True),
    ]


def test_torn_and_foreign_lines_are_counted_and_left_out(environ: dict[str, str]) -> None:
    run = start(environ, -10, None)
    report(run, 1)
    with open(run.path / ROWS, "ab") as file:
        file.write(b'{"group":"tr\n[1]\n{"group":1}\n\xff\n{"group":"training","steps_compl')
    reading = read([run])
    assert (effective(reading), reading.torn) == ([1], 4)


def test_a_directory_without_metrics_or_record(environ: dict[str, str]) -> None:
    assert read([create("job", environ)]).rows == ()
    run = create("job", environ)
    report(run, 1)
    assert effective(read([run])) == [1]


def test_what_cannot_be_read_is_named(environ: dict[str, str]) -> None:
    run = start(environ, -10, None)
    (run.path / ROWS).mkdir()
    with pytest.raises(RunDirError, match=r"cannot read .*metrics\.jsonl: Is a directory"):
        read([run])
