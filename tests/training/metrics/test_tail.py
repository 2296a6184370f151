"""elaunch.training.metrics.tail: what was appended since, and when the reading begins anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.monitor.screen.curves import nodes_of
from elaunch.runs.directory import RunDir
from elaunch.training.metrics.files import ROWS
from elaunch.training.metrics.reading import read
from elaunch.training.metrics.tail import RowTail
from tests.training.metrics.test_reading import environ, report, start

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
