"""``elaunch.run``: a function in each worker, from a script and from where there is no file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import elaunch as package
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, elaunch

def rank(more):
    print("in", os.environ["RANK"], flush=True)
    return int(os.environ["RANK"]) + more, "torch" in sys.modules

def fails():
    raise LookupError("of the worker")

if __name__ == "__main__":
    print(elaunch.run(rank, 10, nproc=2, role="mine"))
    try:
        elaunch.run(fails, preload=["none"])
    except Exception as error:
        print(type(error).__name__, "LookupError: of the worker" in str(error))
    try:
        elaunch.run(fails, nnodes="3:1")
    except elaunch.ElaunchError as error:
        print(type(error).__name__, str(error)[:8])
"""
NO_FILE = """
import os, elaunch
print(elaunch.run(lambda: int(os.environ["RANK"]) + len(os.listdir()), nproc=2))
"""


def test_a_function_of_a_script(elaunch: Launcher) -> None:
    """By its name, in forks of a process that has torch; errors are torch's and elaunch's."""
    script = elaunch.directory / "script.py"
    script.write_text(SCRIPT)
    done = elaunch.start_command([sys.executable, script]).wait()
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["in 0", "in 1"]
    assert lines[2:] == [
        "{0: (10, True), 1: (11, True)}",
        "ChildFailedError True",
        "UsageError --nnodes",
    ], done.stderr


def test_a_function_without_a_file(elaunch: Launcher, tmp_path: Path) -> None:
    """A lambda of a program that no other process can import, as in a notebook."""
    place = tmp_path / "empty"
    place.mkdir()
    done = elaunch.start_command([sys.executable, "-c", NO_FILE], cwd=place).wait()
    assert done.stdout == "{0: 0, 1: 1}\n", done.stderr


def test_nothing_outlives_a_program_that_is_killed(elaunch: Launcher) -> None:
    """The agent ends the job, and with it the fork of the program that is its server."""
    code = "import elaunch, os, time; elaunch.run(lambda: (os.write(1, b'in\\n'), time.sleep(60)))"
    running = elaunch.start_command([sys.executable, "-c", code])
    running.wait_for_line("^in$")
    running.process.kill()
    assert running.wait().returncode == -9
    wait_until(lambda: not elaunch.leftovers(), 20.0, "the end of agent, server and worker")


def test_a_flag_that_is_none_is_named() -> None:
    """Before anything is started."""
    with pytest.raises(TypeError, match=r"no flag 'max_restart'.*did you mean 'max_restarts'"):
        package.run(print, max_restart=1)
    with pytest.raises(TypeError, match="no flag 'detach'"):
        package.run(print, detach=True)
