"""A node dies with what it had in memory: its neighbour has a copy and writes it out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from elaunch.checkpoint.formats import own
from tests.integration.nodes import DEADLINE, Build, Job

pytestmark = pytest.mark.slow

JOBS = Path(__file__).with_name("jobs")


@pytest.mark.parametrize(
    ("backend", "victim"), [("c10d", 1), pytest.param("etcd", 0, marks=pytest.mark.trial)]
)
def test_a_node_that_dies_before_its_part_is_on_the_disk(
    cluster: Build, backend: str, victim: int
) -> None:
    """Its disk hangs, its power goes: the other goes on from that very save, rank 0 or not."""
    job = Job(cluster, backend, 2)
    place = job.share / "ck"
    flags = ["--nnodes=1:2", f"--checkpoint-dir={place}", "--checkpoint-replicas=1"]
    script, *words = JOBS / "localsave.py", job.share, "async"
    options = ["run", "--rdzv-id=job", *job.meeting, "--rdzv-conf=settle=20", *flags, script]
    stuck = [sys.executable, JOBS / "stuckdisk.py", "/ck/", *options, *words]
    agents = []
    for rank in (0, 1):
        if rank == victim:
            agents.append(job.machines[rank + 1].popen(stuck))
        else:
            loud = {"LOGLEVEL": "DEBUG"}
            agents.append(job.start(rank + 1, flags, words, env=loud, method=(), script=script))
    agents[victim].wait_for_line(rf"^saved 1 rank {victim}", DEADLINE)
    survivor = agents[1 - victim]
    copied = rf"memory has a copy of rank {victim}'s shard of step-00000001"
    survivor.wait_for_line(copied, DEADLINE, "stderr")
    assert not list(place.glob("step-*"))
    job.machines.power_off(job.machines[victim + 1])
    assert survivor.wait(DEADLINE).returncode == 0
    assert re.findall(r"^from rank=0 round=1 step=(\d+) ", survivor.output(), re.M) == ["1"]
    own.verify(place / "step-00000001.r0", "job")
