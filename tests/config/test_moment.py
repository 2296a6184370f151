"""--preempt-at: what the texts mean, and what is wrong with others."""

from __future__ import annotations

import time

import pytest

from elaunch.config.checks import resolved
from elaunch.config.values import Moment, moment

FAR = 4_102_444_800  # the year 2100


@pytest.mark.parametrize(
    ("text", "seconds"), [("+90s", 90), ("+90", 90), ("+1.5m", 90), ("+3h", 10800), ("+1d", 86400)]
)
def test_after_the_start(text: str, seconds: float) -> None:
    """A duration with its unit; seconds without."""
    assert moment(text) == Moment(after=seconds)
    before = time.time()
    assert before + seconds <= resolved(moment(text), {}) <= time.time() + seconds


def test_a_time() -> None:
    """Local, or with an offset."""
    assert moment("2100-01-01T00:00:00Z") == Moment(at=FAR)
    assert moment("2100-01-01T01:00+01:00") == Moment(at=FAR)
    local = time.mktime((2100, 1, 1, 0, 0, 0, 0, 0, -1))
    assert moment("2100-01-01 00:00") == Moment(at=local)


def test_the_end_of_the_slurm_job() -> None:
    """Two minutes before it, or as long as is said."""
    environ = {"SLURM_JOB_END_TIME": str(FAR)}
    assert resolved(moment("slurm"), environ) == FAR - 120
    assert resolved(moment("slurm-5m"), environ) == FAR - 300


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3h", "is no moment; did you mean '+3h'?"),
        ("soon", "is no moment"),
        ("+soon", "has 'soon' in it, which is no duration"),
        ("slurm-", "has '' in it"),
        ("", "is no moment"),
    ],
)
def test_what_is_no_moment(text: str, problem: str) -> None:
    """The end of a sentence that begins with the value."""
    with pytest.raises(ValueError) as raised:
        moment(text)
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("text", "environ", "problem"),
    [
        ("2001-01-01", {}, "was "),
        ("slurm", {}, "needs the variable SLURM_JOB_END_TIME"),
        ("slurm", {"SLURM_JOB_END_TIME": "later"}, "needs SLURM_JOB_END_TIME in seconds"),
        ("slurm", {"SLURM_JOB_END_TIME": "nan"}, "needs SLURM_JOB_END_TIME in seconds"),
        ("slurm", {"SLURM_JOB_END_TIME": "inf"}, "needs SLURM_JOB_END_TIME in seconds"),
        ("slurm", {"SLURM_JOB_END_TIME": "1000"}, "was "),
    ],
)
def test_a_moment_that_cannot_be(text: str, environ: dict[str, str], problem: str) -> None:
    """It is over, or nobody knows it."""
    with pytest.raises(ValueError) as raised:
        resolved(moment(text), environ)
    assert str(raised.value).startswith(problem)
