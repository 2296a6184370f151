"""The ports on which the agents meet are shut; the store and the workers are reached as before."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from elaunch.checkpoint.formats import own
from tests.integration.nodes import Build, Job, end, wait_for_worker
from tests.launching import Running, wait_until

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).with_name("jobs") / "checkpoint_train.py"
REPORTED = 150.0
"""Seconds for a save to be given up: its agent tries for 30 s to report it, on a busy machine."""


def start(job: Job, flags: Iterable[str], words: Iterable[str]) -> list[Running]:
    """Start a training of two nodes that saves in the background; see it save."""
    given = [job.share, "aside", "100000", "5", "keep=0", "time=0.05", *words]
    agents = [job.start(k, ["--nnodes=2", *flags], given, script=TRAIN) for k in (1, 2)]
    wait_until(lambda: "saved" in kinds(job, 1), REPORTED, "the first save")
    return agents


def shut(job: Job, *numbers: int) -> list[int]:
    """Shut the agents' own ports on these nodes; return them."""
    assert job.etcd is not None
    known = job.etcd.agent_ports()
    ports = [known[f"node{number}"] for number in numbers]
    job.machines.shut(ports)
    return ports


def notes(job: Job, rank: int) -> list[dict[str, object]]:
    """Return what a rank has noted so far."""
    path = job.share / f"notes.{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kinds(job: Job, rank: int) -> list[object]:
    """Return what kinds of notes a rank has made."""
    return [note["what"] for note in notes(job, rank)]


def goes_on(job: Job, what: str, seconds: float) -> None:
    """Wait until both ranks have made another note of this kind."""
    before = [kinds(job, rank).count(what) for rank in range(2)]

    def more() -> bool:
        return all(kinds(job, rank).count(what) > before[rank] for rank in range(2))

    wait_until(more, seconds, f"another {what}")


def committed(job: Job) -> set[str]:
    """Return the names of the checkpoints that are there."""
    return {path.name for path in (job.share / "ck").glob("step-*")}


@pytest.mark.parametrize("way", ["wait", pytest.param("skip", marks=pytest.mark.trial)])
def test_saving_goes_on_after_the_agents_could_not_reach_each_other(
    cluster: Build, way: str
) -> None:
    """Nobody waits for a shard that was given up on another node, then or after the heal."""
    job = Job(cluster, "etcd", 2)
    start(job, [f"--checkpoint-dir={job.share / 'ck'}"], ["calm", f"busy={way}"])
    (port,) = shut(job, 1)
    for _ in range(2):
        goes_on(job, "refused", REPORTED)
    refused = [note for rank in range(2) for note in notes(job, rank) if note["what"] == "refused"]
    assert all(f":{port})" in str(note["error"]) for note in refused)
    goes_on(job, "trained", REPORTED)
    job.machines.heal()
    before = committed(job)
    wait_until(lambda: committed(job) > before, REPORTED, "another checkpoint")
    for path in (job.share / "ck").glob("step-*"):
        own.verify(path, "job")


def test_a_restart_waits_until_the_agents_reach_each_other(cluster: Build) -> None:
    """With a checkpoint directory on each node: as every other cut is waited for."""
    job = Job(cluster, "etcd", 2)
    flags = ["--nnodes=2", "--max-restarts=1", "--checkpoint-local"]
    agents = []
    for number in (1, 2):
        root = job.machines[number].state / "ck"
        root.mkdir(parents=True)
        agents.append(job.start(number, [*flags, f"--checkpoint-dir={root}"], ["fail=1r0"]))
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 0)
    shut(job, 1, 2)
    (job.share / "fail.0").touch()
    wait_until(
        lambda: any(
            "waiting for its checkpoints, up to 600 s" in one.output("stderr") for one in agents
        ),
        REPORTED,
        "a search that reaches nobody",
    )
    cut_at = time.monotonic()  # two more searches, each of which tries for 7 s
    wait_until(lambda: time.monotonic() > cut_at + 15 or agents[0].process.poll() is not None)
    job.machines.heal()
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 1)
    assert end(job, *agents) == [0, 0]
