"""Workers start processes that become another user's: elaunch may not signal them, and says so.

Root without CAP_KILL stands for a user whose worker has started ``sudo`` or a container's helper.
"""

from __future__ import annotations

import os
import pwd
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.integration.jobs import FORK
from tests.integration.watching import server_of
from tests.launching import NO_KILL, Launcher, Running, wait_until

pytestmark = pytest.mark.slow

USER = pwd.getpwnam("nobody")
BRIEF = ("--shutdown-timeout", "3")
"""What may not be signalled takes all of that."""
SCRIPT = Path(__file__).with_name("jobs") / "becoming.py"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return a directory to which the processes write their pids; what is left is killed."""
    programs.needed("setpriv")
    programs.allowed("only root can become another user" if os.getuid() else None)
    path = tmp_path / "pids"
    path.mkdir()
    yield path
    for pid in pids(path):
        os.kill(pid, signal.SIGKILL)


def pids(place: Path) -> list[int]:
    """Return the processes of the other user that are still there."""
    named = [int(path.name) for path in place.iterdir()]
    return [pid for pid in named if Path(f"/proc/{pid}").exists()]


def start(elaunch: Launcher, place: Path, *words: str, flags: tuple[str, ...] = ()) -> Running:
    """Start two workers below an agent that may not signal other users' processes."""
    run = (sys.executable, "-m", "elaunch", "run", *FORK, "--nproc-per-node", "2", *flags)
    return elaunch.start_command([*NO_KILL, *run, str(SCRIPT), str(place), *words])


def is_named(pid: int, text: str) -> bool:
    """Whether the log says whose process is left."""
    return f"process {pid} (sleep) is left: it belongs to {USER.pw_name}" in text


@pytest.mark.parametrize("becomes", [pytest.param("child", marks=pytest.mark.trial), "daemon"])
def test_a_restart_goes_on(elaunch: Launcher, place: Path, becomes: str) -> None:
    """The failure is answered by a restart at once, and the process is named."""
    running = start(elaunch, place, becomes, "fails", flags=("--max-restarts", "1"))
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert len(left := pids(place)) == 1
    assert is_named(left[0], done.stderr)
    assert "hangs in the kernel" not in done.stderr
    assert "Traceback" not in done.stderr.replace("no traceback", "")


def test_the_end_has_the_scripts_code(elaunch: Launcher, place: Path) -> None:
    """Without a restart the job ends with the worker's code."""
    done = start(elaunch, place, "child", "fails", flags=("--max-restarts", "0")).wait()
    assert done.returncode == 3, done.stderr
    assert is_named(pids(place)[0], done.stderr)


def test_a_worker_that_has_become_another_user(elaunch: Launcher, place: Path) -> None:
    """It gets none of the signals either; its siblings do."""
    running = start(elaunch, place, "itself", "waits", flags=BRIEF)
    wait_until(lambda: pids(place))
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 143, done.stderr
    assert is_named(pids(place)[0], done.stderr)


def test_the_server_dies(elaunch: Launcher, place: Path) -> None:
    """What it leaves comes to the agent, which may not kill it either."""
    running = start(elaunch, place, "daemon", "waits", flags=("--max-restarts", "1", *BRIEF))
    wait_until(lambda: pids(place))
    os.kill(server_of(running), signal.SIGKILL)
    wait_until(lambda: "is left: it belongs to" in running.output("stderr"))
    wait_until(lambda: len(pids(place)) == 2, what="the next round runs")
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


@pytest.mark.parametrize("kills", ["nobody", "server"])
def test_a_wrapped_command_ends(elaunch: Launcher, place: Path, kills: str) -> None:
    """The wrapper ends with its code and names what is left."""
    wrap = (sys.executable, "-m", "elaunch", "wrap", "--", sys.executable, str(SCRIPT), str(place))
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    words = ("daemon", "fails" if kills == "nobody" else "kills")
    done = elaunch.start_command([*NO_KILL, *wrap, *words], env=env).wait()
    assert done.returncode == (3 if kills == "nobody" else 71), done.stderr
    assert f"{pids(place)[0]} (sleep, of {USER.pw_name})" in done.stderr
