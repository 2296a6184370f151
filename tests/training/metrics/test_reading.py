"""elaunch.training.metrics.reading: one run from all its starts, superseded rows set apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import elaunch
from elaunch.errors import RunDirError, UsageError
from elaunch.runs.directory import RunDir, create
from elaunch.training.metrics.files import ROWS, MetricFiles, firsts
from elaunch.training.metrics.reading import MetricRows, RowTail, directories, read
from elaunch.training.metrics.rows import Encoder
from elaunch.views.curves import nodes_of
from tests.views.played_agent import new_record

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


def test_rows_for_pandas(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that count, of all starts."""
    report(start(environ, -100, -50), 1, 2, 3)
    run = start(environ, -40, None)
    report(run, 3, resume=2)
    monkeypatch.setenv("XDG_STATE_HOME", environ["XDG_STATE_HOME"])
    assert [row["steps_completed"] for row in elaunch.read_metrics("job")] == [1, 2, 3]


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


__all__ = ["environ"]

ROW = b'{"group":"g","steps_completed":%d,"round":0,"rank":0,"time":1.0,"at":%s}\n'


def steps(tail: RowTail) -> tuple[bool, list[float]]:
    """Return whether a reading begins anew, and the steps of its rows."""
    anew, appended = tail.read()
    return anew, sorted(step for columns in appended for step in columns.step)


@pytest.fixture
def run(environ: dict[str, str]) -> RunDir:
    """Return a run that goes on."""
    return start(environ, -10, None)


def test_only_what_was_appended_is_read(run: RunDir) -> None:
    tail = RowTail(lambda: [run])
    assert steps(tail) == (True, [])
    report(run, 1, 2)
    assert steps(tail) == (True, [1, 2])  # its round is known from here on
    report(run, 3, rank=1)
    assert steps(tail) == (False, [3])
    assert steps(tail) == (False, [])


def test_half_a_line_is_read_when_it_is_whole(run: RunDir) -> None:
    tail, line = RowTail(lambda: [run]), ROW % (7, b"1")
    with open(run.path / ROWS, "ab", buffering=0) as file:
        file.write(ROW % (6, b"1") + line[:30])
        assert steps(tail) == (True, [6])
        file.write(line[30:])
        assert steps(tail) == (False, [7])
    assert tail.torn == 0


def test_a_round_that_goes_back_begins_the_reading_anew(run: RunDir) -> None:
    tail = RowTail(lambda: [run])
    report(run, 1, 2, 3)
    assert steps(tail) == (True, [1, 2, 3])
    report(run, 3, 4, resume=2, round=1)
    assert steps(tail) == (True, [1, 2, 3, 4])
    report(run, 3, 5)  # late rows of the round before, in a file that was replaced
    assert steps(tail) == (False, [])


def test_a_later_start_supersedes(environ: dict[str, str]) -> None:
    first, second = start(environ, -100, -50), start(environ, -40, None)
    report(first, 1, 2, 3)
    tail = RowTail(lambda: [first, second])
    assert steps(tail) == (True, [1, 2, 3])
    report(second, 3, resume=2)
    assert steps(tail) == (True, [1, 2, 3])
    assert nodes_of(second, environ) == [second]


def test_a_file_that_was_replaced_or_cut_is_read_again(run: RunDir) -> None:
    tail, path = RowTail(lambda: [run]), run.path / ROWS
    path.write_bytes(ROW % (1, b"1") + ROW % (2, b"1"))
    assert steps(tail) == (True, [1, 2])
    path.write_bytes(ROW % (3, b"1"))
    assert steps(tail) == (True, [3])
    path.write_bytes(ROW % (4, b"1") + ROW % (5, b"1"))
    assert steps(tail) == (True, [4, 5])
    path.unlink()
    assert steps(tail) == (True, [])


def test_what_is_no_row_is_counted_as_the_command_counts_it(run: RunDir) -> None:
    good = ROW % (1, b"NaN") + ROW % (2, b"1e999") + ROW % (3, b'"\\ud800"')
    bad = b'[1]\n{"group":1}\n\xff\n' + ROW.replace(b'"g"', b"[]") % (4, b"1") + ROW % (5, b"]")
    (run.path / ROWS).write_bytes(good + bad + ROW % (6, b"true"))
    tail = RowTail(lambda: [run])
    assert steps(tail) == (True, [1, 2, 3, 6])
    assert tail.torn == read([run]).torn == 5


def test_nodes_of_one_job_are_read_together(environ: dict[str, str], tmp_path: Path) -> None:
    before = start(environ, -200, -150)
    first, second = start(environ, -100, None), start(environ, -90, None)
    for rank, run in enumerate((before, first, second)):
        report(run, 1, 2, rank=rank)
    beside = nodes_of(first, environ)
    assert {run.path for run in beside} == {first.path, second.path}
    anew, appended = RowTail(lambda: beside).read()
    assert anew and sorted(columns.rank for columns in appended) == [1, 2]
