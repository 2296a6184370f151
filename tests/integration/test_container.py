"""The agent as PID 1 of a container: here, of a namespace of processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import programs
from tests.integration.jobs import ACT, both_methods
from tests.integration.watching import act, children, wait_for_workers
from tests.launching import Launcher

pytestmark = pytest.mark.slow

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

ORPHANS = """
import os, sys, time
from pathlib import Path
until, give_up = Path(sys.argv[1]), time.monotonic() + 100
for _ in range(3):  # orphans of a worker, beside the one that the container's shell left
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
assert os.readlink("/proc/self") == str(os.getpid())
while not until.exists() and time.monotonic() < give_up:
    time.sleep(0.01)
def zombies():
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append(path.read_text().rpartition(")")[2].split())
        except OSError:
            continue  # it has just ended
    return [fields for fields in stats if fields[0] == "Z" and fields[1] != str(os.getpid())]
while zombies() and time.monotonic() < give_up:
    time.sleep(0.01)
print("agent", Path("/proc/1/cmdline").read_text().split("\\0")[1:4], "zombies", zombies())
"""


@pytest.fixture
def as_pid_1() -> list[str]:
    """Return the words before a command that make it PID 1 of its own namespace."""
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=60)
    programs.allowed(done.stderr if done.returncode else None)
    return UNSHARE


@both_methods
def test_orphans_are_reaped(
    elaunch: Launcher, as_pid_1: list[str], method: Sequence[str], tmp_path: Path
) -> None:
    """Those of the workers, and those that only PID 1 can get."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    orphaned = f"(sleep 0.3; touch {tmp_path}/orphan_is_done)"
    shell = f'({orphaned} &) ; exec {sys.executable} -m elaunch "$@"'
    words = ["run", *method, script, tmp_path / "orphan_is_done"]
    running = elaunch.start_command([*as_pid_1, "sh", "-c", shell, "sh", *words])
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "agent ['-m', 'elaunch', 'run'] zombies []\n"


@both_methods
def test_sigterm_is_forwarded(
    elaunch: Launcher, as_pid_1: list[str], method: Sequence[str], tmp_path: Path
) -> None:
    """As by ``docker stop``: the workers save, and the container ends in the grace."""
    words = act(method, f"save={tmp_path}/saved,0.2", "say=up", "wait", nproc=1)
    running = elaunch.start_command([*as_pid_1, sys.executable, "-m", "elaunch", *words])
    wait_for_workers(running, nproc=1)
    (agent,) = children(running.pid)
    os.kill(agent, signal.SIGTERM)
    assert running.wait().returncode == 143
    assert (tmp_path / "saved").read_text() == "saved"


def test_docker_stop_lets_the_workers_save(
    elaunch: Launcher, as_pid_1: list[str], tmp_path: Path
) -> None:
    """Those that ask should_preempt(): the container ends with 75, to be started again."""
    asks = ACT.with_name("asks.py")
    words = ["run", "--preload=none", "--nproc-per-node=2", asks, tmp_path, "left"]
    running = elaunch.start_command([*as_pid_1, sys.executable, "-m", "elaunch", *words])
    for rank in range(2):
        running.wait_for_line(rf"^steps rank={rank} ", 60.0)
    (agent,) = children(running.pid)
    os.kill(agent, signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 75
    assert len({path.read_text() for path in tmp_path.glob("end.0.*")}) == 1
    assert len(list(tmp_path.glob("end.0.*"))) == done.stdout.count("left rank=") == 2


def test_the_unit_of_the_documentation_is_one(tmp_path: Path) -> None:
    """As systemd reads it: no section, key or value that it would ignore."""
    programs.needed("systemd-analyze")
    page = (Path(__file__).parents[2] / "docs" / "containers.md").read_text()
    (text,) = re.findall(r"^```ini\n(.*?)^```", page, re.M | re.S)
    program, directory = "/srv/train/.venv/bin/elaunch", "WorkingDirectory=/srv/train"
    assert program in text and directory in text
    text = text.replace(program, sys.executable).replace(directory, f"WorkingDirectory={tmp_path}")

    def remarks(unit: str) -> str:
        path = tmp_path / "train.service"
        path.write_text(unit)
        words = ["systemd-analyze", "verify", "--man=no", path]
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stderr

    assert remarks(text) == ""
    assert "KillModes" in remarks(text.replace("KillMode=", "KillModes="))


def test_all_options_may_come_from_the_environment(elaunch: Launcher, as_pid_1: list[str]) -> None:
    """ENTRYPOINT ["elaunch", "run"], with the script as the container's command."""
    variables = {"ELAUNCH_START_METHOD": "spawn", "PET_NPROC_PER_NODE": "3"}
    command = [*as_pid_1, sys.executable, "-m", "elaunch", "run", ACT, "show=WORLD_SIZE"]
    done = elaunch.start_command(command, env=variables).wait()
    assert sorted(done.stdout.splitlines()) == [f"{rank}.0 WORLD_SIZE=3" for rank in range(3)]
