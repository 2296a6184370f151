"""What tests/sessions.py changes about a process that runs tests."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sessions
from tests.launching import Launcher, clean_environment

ROOT = Path(__file__).parents[1]
SHOW = "print(next(line for line in open('/proc/self/status') if line[:6] == 'SigIgn'))"


def ignored_by_default() -> int:
    """Return what Python ignores, as /proc shows it."""
    return sum(1 << (each - 1) for each in sessions.OF_PYTHON)


@pytest.mark.parametrize("forks", [True, False])
def test_commands_have_default_signals(tmp_path: Path, forks: bool) -> None:
    """Whatever this process was started to ignore."""
    launcher = Launcher(tmp_path, forks=forks)
    done = launcher.start_command([sys.executable, "-c", SHOW]).wait()
    launcher.close()
    (mask,) = re.findall("SigIgn:\\s+([0-9a-f]+)", done.stdout)
    standard = (1 << 31) - 1  # posix_spawn has the two that the C library keeps to itself ignored
    assert int(mask, 16) & standard == ignored_by_default(), done


@pytest.mark.trial
@pytest.mark.parametrize("processes", [[], ["-n1"]])
def test_so_have_they_under_nohup(tmp_path: Path, processes: list[str]) -> None:
    """Also with a signal that nohup does not ignore, in one process and in those of xdist."""
    shell = "trap '' HUP INT QUIT USR2; exec \"$@\""
    test = f"{Path(__file__).relative_to(ROOT)}::{test_commands_have_default_signals.__name__}"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:anyio", "-p", "no:cacheprovider"]
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *words, *processes, test],
        cwd=ROOT,
        env=clean_environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=250.0,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("chosen", "left_out"),
    [
        ("not trial and not gpu", True),
        ("not slow and not ranks and not trial", True),
        ("", False),
        ("trial or hypothesis", False),
        ("not trial or gpu", False),
        ("not (trial and slow)", False),
    ],
)
def test_trials_are_collected_unless_all_are_left_out(chosen: str, left_out: bool) -> None:
    """What pytest would still choose by its option -m is there."""
    assert sessions.leaves_trials_out(chosen) == left_out


def test_what_is_logged_below_a_logger_that_did_not_propagate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is seen once; no logger is left that pytest would treat on its own."""
    logger = logging.getLogger(f"apart.{os.getpid()}")
    logger.propagate = False
    sessions.let_loggers_propagate()
    logger.warning("seen")
    assert caplog.messages == ["seen"]
