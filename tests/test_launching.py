"""The fixture ``elaunch`` itself: it sees lines, deadlines and processes that were left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import launching, programs
from tests.launching import MARKER, NO_KILL, Launcher

LEAVER = """
import os, subprocess, sys
subprocess.Popen(
    [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
    start_new_session=True, env={CLEARED} or None,
)
"""


@pytest.mark.parametrize("cleared", ["{}", "{'PATH': os.environ['PATH']}"])
def test_a_process_that_is_left_behind_is_named_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: str
) -> None:
    """With the marker in its environment, and as an orphan without it."""
    monkeypatch.setattr(launching, "LEFTOVER_SECONDS", 0.2)
    launcher = Launcher(tmp_path)
    code = LEAVER.replace("{CLEARED}", cleared)
    running = launcher.start_command([sys.executable, "-c", code])
    running.wait_for_line("^up$")
    running.process.wait(60.0)
    with pytest.raises(AssertionError, match=r"left behind: .*time\.sleep\(60\)"):
        launcher.close()
    launching.wait_until(lambda: launcher.leftovers() == {})  # SIGKILL takes its moment


def test_a_line_that_never_comes_fails_with_the_transcript(tmp_path: Path) -> None:
    """The message holds what was asked for and what was said instead."""
    launcher = Launcher(tmp_path)
    running = launcher.start_command([sys.executable, "-c", "print('something else')"])
    with pytest.raises(AssertionError, match=r"(?s)'needle'.*something else"):
        running.wait_for_line("needle")
    assert running.wait().stdout == "something else\n"
    launcher.close()


def test_the_environment_is_clean_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a developer has exported reaches no run."""
    for name in ("PET_NNODES", "ELAUNCH_ROUND", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    env = Launcher(tmp_path).env
    assert not {"PET_NNODES", "ELAUNCH_ROUND", "OMP_NUM_THREADS"} & set(env)
    assert env[MARKER] and env["XDG_STATE_HOME"].startswith(str(tmp_path))


def test_a_fork_gives_up_the_same_rights_as_an_executed_command(tmp_path: Path) -> None:
    """Root's right to signal others' processes, for good: a setuid program has it no more."""
    programs.needed("setpriv")
    programs.allowed("only root has rights to give up" if os.getuid() else None)
    code = "print(*[line for line in open('/proc/self/status') if line[:3] == 'Cap'])"
    said = []
    for forks in (True, False):
        launcher = Launcher(tmp_path, forks=forks)
        said.append(launcher.start_command([*NO_KILL, sys.executable, "-c", code]).wait().stdout)
        launcher.close()
    assert said[0] == said[1]
    assert not any(int(line.split()[1], 16) & 1 << 5 for line in said[0].splitlines() if line)
