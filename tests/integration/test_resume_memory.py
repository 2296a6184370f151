"""Rounds resume from what agents have in memory, while the storage still takes it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration import checkpointing
from tests.integration.checkpointing import ENV, JOBS, PRELOAD, TRAIN, Job
from tests.integration.jobs import checkpoint_fault
from tests.launching import Launcher, Running, wait_until

pytestmark = pytest.mark.slow


def held_up(elaunch: Launcher, job: Job, *flags: str, words: str = "") -> Running:
    """Start a job whose storage takes nothing of step 2 before there is a file ``go``."""
    argv: list[str | Path] = [sys.executable, JOBS / "slowagent.py", elaunch.directory, "write=2"]
    line = [*argv, "run", "--rdzv-id=job", "--nproc-per-node=2", f"--preload={PRELOAD}"]
    line += [f"--checkpoint-dir={job.saves}", *flags, TRAIN, job.directory, "aside", "4", "2"]
    env = {**ENV, "XDG_STATE_HOME": str(job.home / "state0")}
    return elaunch.start_command([*line, *words.split()], env=env)


def kill(job: Job, rank: int, number: int) -> None:
    """Kill a worker of a round."""
    os.kill(int((job.directory / f"pid.{number}.{rank}").read_text()), signal.SIGKILL)


def await_loaded(job: Job, number: int) -> None:
    """Wait until both ranks have loaded step 2 in a round."""

    def loaded() -> bool:
        notes = job.noted("loaded")
        return {r for r, note in notes if (note["round"], note["step"]) == (number, 2)} == {0, 1}

    wait_until(loaded, checkpointing.DEADLINE)


def test_two_failures_while_a_save_is_written(
    elaunch: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each round begins at once, from memory; then the save is committed, and the next one too."""
    expected = checkpointing.undisturbed(tmp_path_factory, 2)
    job = Job(elaunch, "job", "aside", steps=4)
    agent = held_up(elaunch, job, "--max-restarts=3", words="die=1.2")
    for number in (1, 2):
        agent.wait_for_line(f"restart {number} of 3.* from step 2", stream="stderr")
        await_loaded(job, number)
        assert job.listed() == []
        if number == 1:
            kill(job, 0, number)
    (elaunch.directory / "go").touch()
    done = agent.wait(checkpointing.DEADLINE)
    assert done.returncode == 0, done.stderr
    job.check_trained(expected)
    job.check_nothing_lost()
    assert [found.name for found in job.listed()] == ["step-00000002.r0", "step-00000004.r2"]
    job.check_clean()


def test_the_restarts_are_used_up_while_a_save_is_written(elaunch: Launcher) -> None:
    """It is written out before the command ends, although a round could have loaded it."""
    job = Job(elaunch, "job", "aside", steps=4)
    agent = held_up(elaunch, job, "--max-restarts=0", words="die=1.2")
    agent.wait_for_line("still writing out the save of step 2", checkpointing.DEADLINE, "stderr")
    (elaunch.directory / "go").touch()
    assert agent.wait(checkpointing.DEADLINE).returncode == 137
    assert [found.name for found in job.listed()] == ["step-00000002.r0"]


@pytest.mark.trial
def test_a_node_is_lost_while_a_save_is_written(
    elaunch: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its neighbour goes on alone, from the memory of both, and writes both parts."""
    expected = checkpointing.undisturbed(tmp_path_factory, 2)
    job = Job(elaunch, "job", "aside", steps=4, nodes=2, nproc=1, min_nodes=1, rate=6e3)
    job.flags = ["--checkpoint-replicas=1"]
    elaunch.env["LOGLEVEL"] = "DEBUG"
    agents = [job.start(node, "time=0.01") for node in (0, 1)]
    copied = "memory has a copy of rank 1's shard of step-00000002"
    agents[0].wait_for_line(copied, checkpointing.DEADLINE, "stderr")
    checkpoint_fault.kill(["node 1"], job.directory)
    wait_until(lambda: any(n["round"] for _, n in job.noted("loaded")), checkpointing.DEADLINE)
    ((_, note),) = job.noted("loaded")
    assert (note["step"], note["name"], job.listed()) == (2, "step-00000002.r0", [])
    expected.check(0, note)
    assert agents[0].wait(checkpointing.DEADLINE).returncode == 0, agents[0].output("stderr")
    job.check_nothing_lost()
    assert [found.name for found in job.listed()] == ["step-00000002.r0", "step-00000004.r1"]
