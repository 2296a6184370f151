"""elaunch.training.tracking: runs that no agent keeps are in ``elaunch status`` all the same."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.launching import TORCHRUN, Launcher, Running, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("tracked.py")
TWO = [*TORCHRUN, "--nproc-per-node", "2"]


def start(elaunch: Launcher, launcher: list[str], *words: str, **env: str) -> Running:
    """Start the script under a launcher."""
    path = {"PYTHONPATH": str(ROOT)}
    return elaunch.start_command([*launcher, str(SCRIPT), *words], env=path | env)


def alone(elaunch: Launcher, *words: str, **env: str) -> Running:
    """Start the script by hand."""
    return start(elaunch, [sys.executable], *words, **env)


def directory(running: Running) -> Path:
    """Return the run directory that a rank has told."""
    return Path(running.wait_for_line(r"^\d+ of \d+ in (.+)$")[1])


def status(elaunch: Launcher, run: str | None = None) -> Any:
    """Return what ``elaunch status`` says of all runs, or of one."""
    done = elaunch.run(["status", *([run] if run else []), "--json"])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def steps(elaunch: Launcher, run: str) -> list[tuple[int, int, int]]:
    """Return (step, rank, round) of the metrics of a run."""
    done = elaunch.run(["metrics", run, "--json"])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [(row["steps_completed"], row["rank"], row["round"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "state", "code", "reason"),
    [
        ([], "COMPLETED", 0, None),
        (["exit:0"], "COMPLETED", 0, None),
        (["exit:3"], "FAILED", 3, "rank 0 failed: exit code 3"),
        (["fail:0"], "FAILED", 1, "rank 0 failed: ValueError: it went wrong"),
        (["interrupt"], "STOPPED", 130, None),
    ],
)
def test_a_lone_script(
    elaunch: Launcher, words: list[str], state: str, code: int, reason: str | None
) -> None:
    running = alone(elaunch, *words)
    running.wait()
    path = directory(running)
    assert re.fullmatch(r"tracked-[0-9a-f]{6}", path.name)
    (listed,) = status(elaunch)
    assert (listed["run_id"], listed["state"], listed["exit_code"]) == (path.name, state, code)
    assert (listed["world_size"], listed["round"], listed["reason"]) == (1, 0, reason)
    assert listed["ended_at"] >= listed["started_at"]
    shown = status(elaunch, path.name)
    assert shown["launcher"] == "alone"
    assert [worker["exit_code"] for worker in shown["workers"]] == [code]
    assert steps(elaunch, path.name) == [(step, 0, 0) for step in range(1, 11)]
    page = elaunch.run(["status", path.name]).stdout
    assert page.startswith(f"{path.name}  {state}  exit code {code}\n")
    assert f"command  {sys.executable} {SCRIPT}" in page


@pytest.mark.slow
def test_a_lone_script_that_is_killed(elaunch: Launcher) -> None:
    running = alone(elaunch, "hold:0")
    path = directory(running)
    shown = status(elaunch, path.name)
    assert (shown["state"], shown["agent"]["condition"]) == ("RUNNING", "runs")
    assert shown["workers"][0]["rss_bytes"] > 0
    assert elaunch.run(["status", path.name]).stdout.startswith(f"{path.name}  RUNNING  for ")
    running.send_signal(signal.SIGSTOP)
    wait_until(lambda: status(elaunch, path.name)["agent"]["condition"] == "stopped")
    running.send_signal(signal.SIGKILL)
    running.wait()
    (listed,) = status(elaunch)
    assert (listed["state"], listed["ended_at"]) == ("LOST", None)
    assert listed["reason"] == (
        f"the script (pid {running.pid}) ended without closing its context: it was killed, say"
    )
    assert status(elaunch, path.name)["workers"][0]["state"] == "GONE"


def test_where_there_is_no_place(elaunch: Launcher) -> None:
    """A state directory that cannot be made, and no directory for temporary files either."""
    elaunch.state.touch()
    temporary = elaunch.directory / "tmp"
    temporary.mkdir()
    (temporary / f"elaunch-{os.geteuid()}").symlink_to("/")
    done = alone(elaunch, TMPDIR=str(temporary)).wait()
    assert done.returncode == 1
    assert "RunDirError: no place for the record of the run" in done.stderr


@pytest.mark.slow
def test_a_job_of_slurm_keeps_its_id(elaunch: Launcher) -> None:
    """A job that is queued again has the same number; its second start supersedes."""
    env = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    for _ in range(2):
        running = alone(elaunch, **env)
        assert running.wait().returncode == 0, running.output("stderr")
    assert [run["run_id"] for run in status(elaunch)] == ["4711", "4711"]
    assert [Path(run["dir"]).name for run in status(elaunch)] == ["4711.2", "4711"]
    assert len(steps(elaunch, "4711")) == 10


@pytest.mark.trial
@pytest.mark.slow
def test_torchrun_is_tracked(elaunch: Launcher) -> None:
    running = start(elaunch, TWO, "hold:1")
    path = directory(running)
    shown = status(elaunch, path.name)
    assert (shown["state"], shown["world_size"], shown["launcher"]) == ("RUNNING", 2, "torchrun")
    wait_until(lambda: status(elaunch, path.name)["workers"][0]["state"] == "SUCCEEDED")
    shown = status(elaunch, path.name)
    assert (shown["state"], shown["workers"][1]["state"]) == ("RUNNING", "RUNNING")
    assert shown["agent"]["pid"] == shown["workers"][1]["pid"]
    (path / "release").touch()
    assert running.wait().returncode == 0
    shown = status(elaunch, path.name)
    assert (shown["state"], shown["exit_code"]) == ("COMPLETED", 0)
    assert steps(elaunch, path.name) == [(step, (step - 1) % 2, 0) for step in range(1, 11)]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["kill:1", pytest.param("fail:1", marks=pytest.mark.trial)])
def test_torchruns_rounds_are_one_run(elaunch: Launcher, word: str) -> None:
    running = start(elaunch, [*TWO, "--max-restarts", "1"], word, "hold:0")
    assert running.wait(120).returncode == 0, running.output("stderr")
    found = {run["round"]: run for run in status(elaunch)}
    assert found[1]["run_id"] == found[0]["run_id"] and found[1]["dir"] != found[0]["dir"]
    assert found[0]["state"] in ("FAILED", "LOST")
    listed = found[1]
    assert listed["state"] == "COMPLETED"
    assert (listed["restarts"]["used"], listed["restarts"]["max"]) == (1, 1)
    assert steps(elaunch, listed["run_id"]) == [(step, (step - 1) % 2, 1) for step in range(1, 11)]


@pytest.mark.slow
def test_a_rank_of_torchrun_that_fails(elaunch: Launcher) -> None:
    running = start(elaunch, TWO, "fail:1", "hold:0")
    assert running.wait(120).returncode == 1
    (listed,) = status(elaunch)
    assert (listed["state"], listed["exit_code"]) == ("FAILED", 1)
    assert listed["reason"] == "rank 1 failed: ValueError: it went wrong"


@pytest.mark.trial
@pytest.mark.slow
def test_mpirun_is_tracked(elaunch: Launcher) -> None:
    programs.needed("mpirun", "orted", "ssh")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
    running = start(elaunch, mpirun)
    assert running.wait(120).returncode == 0, running.output("stderr")
    (listed,) = status(elaunch)
    assert (listed["state"], listed["world_size"]) == ("COMPLETED", 2)
    assert re.fullmatch(r"tracked-[0-9a-f]{6}", listed["run_id"])
    assert len(steps(elaunch, listed["run_id"])) == 10
