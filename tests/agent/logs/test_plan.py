"""Where each stream goes, by the flags alone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elaunch.agent.logs.plan import LogPlan, encode

ROOT = Path("logs")


@pytest.mark.parametrize(
    ("redirects", "tee", "root", "stdout", "stderr"),
    [
        (0, 0, ROOT, True, True),
        (1, 0, ROOT, False, True),
        (3, 0, ROOT, False, False),
        (3, 2, ROOT, False, True),
        (0, 3, ROOT, True, True),
        (3, 0, None, True, True),
    ],
)
def test_what_is_shown(
    redirects: int, tee: int, root: Path | None, stdout: bool, stderr: bool
) -> None:
    """Tee wins over redirect; without files nothing is redirected."""
    plan = LogPlan(root, lambda rank: redirects, lambda rank: tee)
    assert (plan.shows(0, "stdout"), plan.shows(0, "stderr")) == (stdout, stderr)
    assert (plan.tees(0, "stdout"), plan.tees(0, "stderr")) == (bool(tee & 1), bool(tee & 2))


def test_ranks_that_are_not_shown() -> None:
    """Also tee'd ones."""
    plan = LogPlan(ROOT, tee=lambda rank: 3, console_ranks=frozenset({1}))
    assert [plan.shows(rank, "stdout") for rank in range(3)] == [False, True, False]


def test_prefix() -> None:
    """torchrun's, or the template; an empty template is none."""
    assert LogPlan(ROOT, role="r", prefix_template="").prefix(1, 5) == b"[r1]:"
    template = "${role_name}|${local_rank}|${rank}|${hostname}|$x$$"
    expected = f"é|1|5|{socket.gethostname()}|$x$".encode()
    assert LogPlan(ROOT, role="é", prefix_template=template).prefix(1, 5) == expected


def test_bytes_of_the_command_line_survive() -> None:
    """An argument that is not UTF-8 comes with surrogates."""
    assert encode(b"\xff".decode(errors="surrogateescape")) == b"\xff"


def test_shortcomings() -> None:
    """Only what the plan asks for and cannot have."""
    assert LogPlan(ROOT, lambda rank: 3, stdout_filters=("x",)).shortcomings([0]) == []
    assert LogPlan(None).shortcomings([0]) == []
    plan = LogPlan(None, lambda rank: 3, console_ranks=frozenset({0}), stderr_filters=("x",))
    assert len(plan.shortcomings([0, 1])) == 3
    assert len(plan.shortcomings([0])) == 2
