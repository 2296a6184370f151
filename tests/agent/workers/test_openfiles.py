"""The limit on open files; in processes of their own, since it cannot be raised again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from elaunch.agent.workers import group
from elaunch.server import processes
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(processes.raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE))
group.check_open_files(int(sys.argv[3]))
"""


def run(soft: int, hard: int, nproc: int) -> subprocess.CompletedProcess[str]:
    """Check the limits for ``nproc`` workers in a process that has them."""
    command = [sys.executable, "-c", PROGRAM, *map(str, (soft, hard, nproc))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_soft_limit_is_raised_and_returned() -> None:
    """The workers get what was returned."""
    done = run(64, 500, 16)
    assert (done.returncode, done.stdout) == (0, "(64, 500) (500, 500)\n")


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [73, 200])
def test_a_hard_limit_that_is_too_low_is_told(nproc: int) -> None:
    """Number, limit and fix."""
    done = run(64, 500, nproc)
    assert f"--nproc-per-node {nproc}: elaunch needs {64 + 6 * nproc} open files" in done.stderr
    assert "the hard limit is 500; raise it (ulimit -Hn" in done.stderr
