"""The look at the checkpoint directory before the first worker is started, on one node and two."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.jobs import ACT, FORK
from tests.integration.nodes import DEADLINE, Build, Job, end, wait_for_worker, wait_until_said
from tests.integration.test_restart import shown
from tests.integration.watching import act
from tests.launching import Launcher, Running

pytestmark = pytest.mark.slow

SHARED = "--nnodes=2"


def test_the_directory_is_made(elaunch: Launcher) -> None:
    """A relative one is below the working directory; workers are told the absolute path."""
    words = ["show=ELAUNCH_CHECKPOINT_DIR,ELAUNCH_CHECKPOINT_KEEP,ELAUNCH_CHECKPOINT_LOCAL"]
    flags = [
        "--checkpoint-dir=new/ck",
        "--checkpoint-keep-last=2",
        "--checkpoint-keep-best=acc:max",
    ]
    done = elaunch.run(act(FORK, *words, nproc=1, flags=flags))
    assert (done.returncode, os.listdir(elaunch.directory / "new" / "ck")) == (0, [])
    told = shown(done.stdout)[0, 0]
    assert told["ELAUNCH_CHECKPOINT_DIR"] == str(elaunch.directory / "new" / "ck")
    assert told["ELAUNCH_CHECKPOINT_KEEP"] == '{"last": 2, "best": "acc", "mode": "max"}'
    assert told["ELAUNCH_CHECKPOINT_LOCAL"] == "None"


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--checkpoint-dir=/proc/ck", "--checkpoint-dir /proc/ck cannot be written on"),
        (
            "--nproc-per-node=gpu",
            "--nproc-per-node gpu: no CUDA GPU found; give a number, or cpu",
        ),
    ],
)
def test_what_cannot_be_ends_the_job_before_it_begins(
    elaunch: Launcher, flag: str, problem: str
) -> None:
    """Exit code 2 and the reason, also for what has started elaunch, and no worker.

    /proc takes no directories, not even from root.
    """
    flags = ["--run-id=refused", "--nproc-per-node=1", flag, "--exit-codes=torchrun"]
    error_file = elaunch.directory / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    done = elaunch.run(["run", *FORK, *flags, ACT, "r0:exit=0"], env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"elaunch: error: {problem}" in done.stderr and done.stderr.count(problem) == 1
    record = json.loads(elaunch.run(["status", "--json", "refused"]).stdout)
    assert (record["state"], record["exit_code"]) == ("FAILED", 2)
    for text in (record["reason"], json.loads(error_file.read_text())["message"]["message"]):
        assert text.startswith(f"UsageError: {problem}")
    assert not elaunch.leftovers()


def test_the_dry_run_makes_nothing(elaunch: Launcher) -> None:
    """It says what would be kept."""
    flags = ["--dry-run", "--checkpoint-dir=new/ck", "--checkpoint-keep-last=2"]
    done = elaunch.run(act(FORK, nproc=1, flags=flags))
    assert done.returncode == 0 and not (elaunch.directory / "new").exists()
    assert "the newest 2" in done.stdout


def own_directory(job: Job, number: int, path: Path) -> None:
    """Mount an empty file system at ``path`` on one machine only."""
    machine = job.machines[number].machine
    mount = ["nsenter", f"--target={machine.holder}", "--mount", "--", "mount", "-t", "tmpfs"]
    machine.do([*mount, "tmpfs", str(path)])


def refusal(job: Job, agents: list[Running]) -> str:
    """Wait until all end with 2, no worker begun; return what one of them said."""
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [2, 2]
    assert [agent.output() for agent in agents] == ["", ""]
    said = [agent.output("stderr") for agent in agents]
    told = "--checkpoint-dir is not one directory on all nodes"
    assert all(told in text for text in said), said
    return said[0]


@pytest.mark.trial
def test_two_nodes_that_do_not_share_the_directory(cluster: Build) -> None:
    """Both end with 2 and name both hosts, the directory, and the way out; no worker is started."""
    job = Job(cluster, "static", 2)
    place = job.machines.directory / "ck"
    place.mkdir()
    own_directory(job, 2, place)
    flags = [SHARED, f"--checkpoint-dir={place}"]
    text = refusal(job, [job.start(number, flags) for number in (1, 2)])
    for word in ("not seen on node1", "what node2 (10.20.0.2)", str(place), "--checkpoint-local"):
        assert word in text
    assert os.listdir(place) == []


def test_two_nodes_that_share_it(cluster: Build) -> None:
    """The marks are gone at the end, and the directory was made by the agents."""
    job = Job(cluster, "c10d", 2)
    place = job.share / "new" / "ck"
    agents = job.pair([SHARED, f"--checkpoint-dir={place}"])
    assert len(os.listdir(place / ".probe")) == 2
    assert end(job, *agents) == [0, 0]
    assert os.listdir(place) == []


def test_a_newcomer_that_does_not_share_it_is_left_out(cluster: Build) -> None:
    """It ends with 2; the job goes on without it."""
    job = Job(cluster, "c10d", 2)
    place = job.machines.directory / "ck"
    place.mkdir()
    own_directory(job, 2, place)
    job.conf["settle"] = 0
    flags = ["--nnodes=1:2", f"--checkpoint-dir={place}"]
    one = job.start(1, flags)
    wait_for_worker(one, 0, 0)
    two = job.start(2, flags)
    assert two.wait(DEADLINE).returncode == 2
    wait_until_said(two, "--checkpoint-dir of this node is not that of the job")
    wait_for_worker(one, 0, 1)
    assert end(job, one) == [0]
    assert two.output() == ""
