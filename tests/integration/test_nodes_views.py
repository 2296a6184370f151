"""A job is looked at from a machine that has nothing of it, and reaches its store and nodes."""

from __future__ import annotations

import json

import pytest

from tests.integration.nodes import DEADLINE, Build, Job, over
from tests.launching import Running, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
from pathlib import Path

rank, share = int(os.environ["RANK"]), Path(sys.argv[1])
if os.environ["ELAUNCH_ROUND"] == "0" and rank == 1:
    raise ValueError("bad batch 7")

def waits():
    while not (share / "stop").exists():
        time.sleep(0.05), sum(range(300_000))  # or the profile would have nothing

print(f"rank {rank} waits now", flush=True)
waits()
"""


@over("c10d", "etcd")
def test_a_job_is_seen_from_another_machine(cluster: Build, backend: str) -> None:
    """Why a round has failed, where its workers are, and what they write."""
    job = Job(cluster, backend, 3)
    script = job.machines.directory / "waits.py"
    script.write_text(SCRIPT)
    flags = ["--nnodes=2", "--max-restarts=1", "-r", "3"]

    def agent(number: int) -> Running:
        return job.start(number, flags, [job.share], script=script)

    def view(name: str, *words: str) -> tuple[int, str, str]:
        line = [name, "--rdzv-id=job", *job.meeting, *words]
        done = job.machines[3].elaunch(line).wait(DEADLINE)
        return done.returncode, done.stdout, done.stderr

    agents = [agent(1)]
    early = "job job has no logs yet: its nodes have not met"
    wait_until(lambda: early in view("logs")[2], DEADLINE)
    agents.append(agent(2))
    wait_until(lambda: view("logs", "--round=1")[1].count("waits now") == 2, DEADLINE)
    assert view("logs", "--rank=1")[:2] == (0, "rank 1 waits now\n")
    code, text, _ = view("why")
    assert code == 0 and text.startswith("job: RUNNING: "), text
    assert "rank 1 failed at waits.py:7: ValueError: bad batch 7" in text
    found = json.loads(view("why", "--json")[1])
    assert (found["round"], found["card"]["code"], found["silent"]) == (0, None, [])
    (group,) = json.loads(view("stacks", "--json")[1])["groups"]
    assert group["ranks"] == [0, 1] and group["main"][0].endswith("in waits")
    assert view("profile", "1s", "--rank=1", "-o", str(script.with_suffix(".svg")))[0] == 0
    assert "<svg" in script.with_suffix(".svg").read_text()
    assert "--rank 2: job job has 2 ranks in its round" in view("profile", "--rank=2")[2]
    assert "no agent of job job has a report of that round" in view("why", "--round=1")[2]
    assert "job job has node 0 (node1), 1 (node2)" in view("logs", "--node=9")[2]
    job.stop()
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [0, 0]
    if backend == "etcd":  # else the store has ended with the job
        assert "Its agents are gone" in view("why")[1]
        assert "is over, and its agents are gone" in view("stacks")[2]
    assert not list(job.machines.directory.rglob("node3/**/state.json"))
