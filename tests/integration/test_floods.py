"""The agent's deadlines hold while a worker has it do something all the time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.jobs import SPAWN
from tests.launching import Launcher

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("jobs") / "flooding.py"
LATE = 20.0
"""Seconds after a grace of 2 s, at a machine that is busy."""


@pytest.mark.parametrize("op", ["listens", "knows", "ack"])
def test_the_grace_of_a_worker_that_floods_its_connection(
    elaunch: Launcher, tmp_path: Path, op: str
) -> None:
    """It is killed when the grace is over, and the job has the code of the one that failed."""
    flags = [*SPAWN, "--nproc-per-node=2", "--max-restarts=0", "--sibling-grace=2"]
    done = elaunch.run(["run", *flags, SCRIPT, op, tmp_path / "started"])
    assert done.returncode == 3, done.stderr
    times = re.findall(
        r"^elaunch (\d+):(\d+):(\d+\.\d+) .*(grace 2 s|grace is over)", done.stderr, re.M
    )
    asked, over = (60 * int(minute) + float(second) for _, minute, second, _ in times)
    assert (over - asked) % 3600 < 2 + LATE, done.stderr
