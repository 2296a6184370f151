"""``elaunch metrics`` as a command: choices, formats, errors."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaunch.runs.directory import RunDir, create
from elaunch.training.metrics.files import ROWS, MetricFiles, firsts
from elaunch.training.metrics.rows import Encoder
from tests import warm
from tests.views.conftest import environ
from tests.views.played_agent import new_record

__all__ = ["environ"]

ROOT = Path(__file__).parents[3]


def run(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command with pipes for its output."""
    return warm.run([sys.executable, "-m", "elaunch", "metrics", *args], environ)


def refused(environ: dict[str, str], *args: str) -> str:
    """Return the message of a command that ends with 2."""
    done = run(environ, *args)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.strip()


def make(environ: dict[str, str], run_id: str = "train-1", began: float = -100) -> RunDir:
    """Make the directory of a run that has ended, 10 s after it began."""
    made = create(run_id, environ)
    record = new_record(made, run_id, [])
    record["started_at"] = time.time() + began
    record["ended_at"] = record["started_at"] + 10
    record["state"] = "COMPLETED"
    made.write_state(record)
    return made


def report(
    made: RunDir,
    group: str,
    steps: Sequence[int],
    *,
    rank: int = 0,
    round: int = 0,
    resume: int | None = None,
    **metrics: Any,
) -> None:
    """Report the same metrics at several steps."""
    encoder = Encoder(rank, round)
    lines = "".join(encoder.row(group, step, metrics, 1.5e9).line for step in steps)
    first = firsts((group, step) for step in steps)
    MetricFiles(made.path, round, resume).append(lines.encode(), first)


@pytest.fixture
def made(environ: dict[str, str]) -> RunDir:
    """Return a run in which two ranks took turns."""
    made = make(environ)
    for rank in range(2):
        report(made, "training", range(rank, 100, 2), rank=rank, loss=0.5)
    report(made, "validation", range(9, 100, 10), acc=0.25)
    return made


@pytest.mark.usefixtures("made")
def test_the_table(environ: dict[str, str]) -> None:
    done = run(environ, "train-1", "--group", "training")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["steps_completed", "rank", "group", "round", "time", "loss"]
    cells = [line.split() for line in lines]
    assert [(int(c[0]), int(c[1])) for c in cells] == [(step, step % 2) for step in range(100)]
    assert cells[0][2:4] == ["training", "0"] and cells[0][-1] == "0.5"
    assert "\x1b" not in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ([], 110),
        (["--group", "training"], 100),
        (["--group", "validation"], 10),
        (["--rank", "1"], 50),
        (["--rank=0"], 60),
        (["--group", "validation", "--rank", "0"], 10),
    ],
)
def test_group_and_rank_choose(environ: dict[str, str], flags: list[str], count: int) -> None:
    rows = [
        json.loads(line) for line in run(environ, "train", *flags, "--json").stdout.splitlines()
    ]
    assert len(rows) == count
    assert [row["steps_completed"] for row in rows] == sorted(r["steps_completed"] for r in rows)


def test_json_is_exactly_what_was_reported(environ: dict[str, str]) -> None:
    made = make(environ)
    report(made, "x", [1], a=None, b=1e300, c=0.1 + 0.2, d=[1, None], e="ü\n", f=True)
    line = run(environ, "train-1", "--json").stdout
    assert line == (made.path / ROWS).read_text()
    row = json.loads(line)
    assert row["a"] is None and row["b"] == 1e300 and row["c"] == 0.1 + 0.2
    assert (row["d"], row["e"], row["f"]) == ([1, None], "ü\n", True)


def test_csv(environ: dict[str, str]) -> None:
    made = make(environ)
    report(made, "x", [1], a=math.nan, b='say "hi", twice', c=[1, 2], d=0.1 + 0.2, e=True)
    report(made, "y", [2], z=-math.inf)
    done = run(environ, "train-1", "--csv")
    first, second = csv.DictReader(io.StringIO(done.stdout))
    assert list(first) == [*"steps_completed rank group round time a b c d e z".split()]
    assert (first["a"], first["b"], first["c"]) == ("nan", 'say "hi", twice', "[1, 2]")
    assert (float(first["d"]), first["e"], first["z"]) == (0.1 + 0.2, "true", "")
    assert (second["a"], second["z"]) == ("", "-inf")


@pytest.mark.slow
def test_superseded_rows_are_shown_when_asked_for(environ: dict[str, str]) -> None:
    """Of a run that was started twice under one id, and of one with rounds."""
    first, second = make(environ, began=-100), make(environ, began=-50)
    report(first, "training", range(1, 9), loss=1.0)
    report(second, "training", [6, 7], resume=5, loss=2.0)
    report(second, "training", [7], resume=6, round=1, loss=3.0)
    done = run(environ, "train-1", "--csv")
    rows = [
        (row["steps_completed"], row["loss"]) for row in csv.DictReader(io.StringIO(done.stdout))
    ]
    assert rows == [*((str(s), "1.0") for s in range(1, 6)), ("6", "2.0"), ("7", "3.0")]
    rows = [
        json.loads(line) for line in run(environ, "train-1", "--all", "--json").stdout.splitlines()
    ]
    assert len(rows) == 11
    assert [(r["steps_completed"], r["loss"]) for r in rows if r["superseded"]] == [
        (6, 1.0),
        (7, 1.0),
        (7, 2.0),
        (8, 1.0),
    ]
    assert run(environ, "train-1", "--all").stdout.splitlines()[-1].split()[-1] == "true"
    assert len(run(environ, "train-1.1").stdout.splitlines()) == 9
    assert len(run(environ, str(second.path)).stdout.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("made")
def test_what_there_is_not(environ: dict[str, str]) -> None:
    assert refused(environ, "trian-1").endswith("the nearest: train-1 (elaunch explain E-NO-RUN)")
    assert refused(environ, "train-1", "--group", "trainin") == (
        "elaunch: error: no group 'trainin' in 'train-1'; did you mean 'training'?; there is "
        "training, validation (elaunch explain E-USAGE)"
    )
    assert refused(environ, "train-1", "--rank", "7") == (
        "elaunch: error: rank 7 has no rows in 'train-1'; those that have: 0, 1 "
        "(elaunch explain E-USAGE)"
    )
    assert "rank 1 has no rows of group 'validation'" in refused(
        environ, "train-1", "--rank", "1", "--group", "validation"
    )
    assert "--json and --csv are two formats" in refused(environ, "train-1", "--json", "--csv")
    assert "-1 is not in the range" in refused(environ, "train-1", "--rank", "-1")


@pytest.mark.usefixtures("made")
def test_without_a_run_it_is_the_newest(environ: dict[str, str]) -> None:
    """As of the other views; also where its id was used before."""
    older = make(environ, "train-0", began=-500)
    report(older, "training", [1], loss=1.0)
    assert len(run(environ, "--json").stdout.splitlines()) == 110
    newest = make(environ, "new", began=-1)
    assert f"nothing was reported in the run 'new' ({newest.path})" in refused(environ)


def test_a_run_without_metrics(environ: dict[str, str]) -> None:
    made = make(environ)
    assert f"nothing was reported in the run 'train-1' ({made.path})" in refused(environ, "train-1")


def test_torn_lines_are_said(environ: dict[str, str], made: RunDir) -> None:
    with open(made.path / ROWS, "a") as file:
        file.write('{"group":"training","ste\n{"half')
    done = run(environ, "train-1", "--group", "validation")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 11
    assert done.stderr == "elaunch: 1 line is no row and left out\n"


@pytest.mark.slow
@pytest.mark.usefixtures("made")
def test_a_reader_that_goes_away(environ: dict[str, str]) -> None:
    command = f"{sys.executable} -m elaunch metrics train-1 --json | head -1"
    done = subprocess.run(
        ["sh", "-c", command], env=environ, capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.count("\n") == 1
    assert not re.search("Traceback", done.stderr)


def test_odd_names_cannot_draw_on_the_terminal(environ: dict[str, str]) -> None:
    made = make(environ)
    report(made, "x", [1], **{"\x1b[31mred": "\x1b[2J\n"})
    assert "\x1b" not in run(environ, "train-1").stdout
    assert len(run(environ, "train-1").stdout.splitlines()) == 2


def test_json_has_no_words_of_python(environ: dict[str, str], made: RunDir) -> None:
    """NaN and infinity are null in JSON; they stand in the table and in the CSV."""
    report(made, "odd", [1], loss=math.nan, parts=[math.inf, 1.0], word="NaN")

    def no_word(name: str) -> None:
        raise AssertionError(name)

    for args in (["--json"], ["--json", "--all"]):
        lines = run(environ, *args, "--group", "odd").stdout.splitlines()
        (row,) = [json.loads(line, parse_constant=no_word) for line in lines]
        assert (row["loss"], row["parts"], row["word"]) == (None, [None, 1.0], "NaN")
    assert "nan" in run(environ, "--csv", "--group", "odd").stdout
