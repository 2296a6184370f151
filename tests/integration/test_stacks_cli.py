"""``elaunch stacks`` of running jobs, and the logs of nodes that share no home."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.jobs import FORK, SPAWN
from tests.integration.nodes import DEADLINE, Build, Job, end
from tests.integration.watching import act, wait_for_workers
from tests.launching import Launcher, freeze

pytestmark = pytest.mark.slow

# A rank has printed on the line where it stands then, so it stands there once the line was seen.
SCRIPT = """
import os, sys, time
def loads():
    own = os.environ["RANK"]
    print("up", own, flush=True), time.sleep(600)
def waits():
    print("up", flush=True), time.sleep(600)
loads() if os.environ["RANK"] == "2" else waits()
"""


def test_the_rank_at_another_place_comes_first(elaunch: Launcher, tmp_path: Path) -> None:
    """Written by the workers themselves, twice; with variables by py-spy; the job goes on."""
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    flags = ["--rdzv-id=st", "--nproc-per-node=4", "--hang-timeout=600", *FORK]
    running = elaunch.start(["run", *flags, script])
    for _ in range(4):
        running.wait_for_line("up")
    for _ in range(2):
        shown = elaunch.run(["stacks", "st"])
        assert shown.returncode == 0, shown
        odd, others = shown.stdout.split("ranks ")
        assert odd.startswith("rank 2:\n") and "in loads" in odd
        assert others.startswith("0, 1, 3:\n") and "in waits" in others
    found = json.loads(elaunch.run(["stacks", "st", "--locals", "--json"]).stdout)
    first = found["groups"][0]
    assert first["ranks"] == [2] and found["problems"] == []
    assert any('own: "2"' in values for values in first["values"].values())
    assert elaunch.run(["stop", "st"]).returncode == 0
    ended = elaunch.run(["stacks", "st"])
    assert ended.returncode == 2 and "RUN st does not run" in ended.stderr


@pytest.mark.parametrize("how", ["signal", "freezer"])
def test_a_suspended_agent_is_named_at_once(
    elaunch: Launcher, how: str, request: pytest.FixtureRequest
) -> None:
    """Nothing waits in silence for an answer that cannot come; `stop` says why it waits."""
    running = elaunch.start(act(SPAWN, "say=up", "wait", flags=["--run-id=st"]))
    wait_for_workers(running)
    if how == "signal":
        freeze(running.pid)
    else:
        freezer = request.getfixturevalue("freezer")
        (freezer / "cgroup.procs").write_text(str(running.pid))
        (freezer / "freezer.state").write_text("FROZEN")
    try:
        shown = elaunch.run(["stacks", "st"])
        assert shown.returncode == 2 and "cannot answer now: its agent is suspended" in shown.stderr
        assert "agent is suspended" in elaunch.run(["status", "st"]).stdout
        stopped = elaunch.run(["stop", "st", "--timeout=0"])
        assert "it is received later, for its agent is suspended" in stopped.stderr, stopped
    finally:
        os.kill(running.pid, signal.SIGCONT)
        if how == "freezer":
            (freezer / "freezer.state").write_text("THAWED")
    assert running.wait().returncode == 143


def test_all_nodes_are_seen_from_one(cluster: Build) -> None:
    """Their stacks, and the logs of one whose files only its agent can read."""
    job = Job(cluster, "c10d", 2)
    agents = job.pair(["--nnodes=2"])
    shown = job.machines[1].elaunch(["stacks", "job", "--json"]).wait(DEADLINE)
    found = json.loads(shown.stdout)
    assert sorted(rank for group in found["groups"] for rank in group["ranks"]) == [0, 1], shown
    assert found["silent"] == found["problems"] == []
    shown = job.machines[1].elaunch(["top", "job", "--json"]).wait(DEADLINE)
    top = json.loads(shown.stdout)
    (rank,) = (rank for node in top["nodes"] for rank in node["ranks"] if not node["here"])
    assert (rank["rank"], rank["state"]) == (1, "RUNNING") and rank["pid"] and rank["rss_bytes"]
    status = job.machines[1].elaunch(["status", "job"]).wait(DEADLINE)
    for row in (r"^ *0 +0 +\d+ +RUNNING ", rf"^ *1 +0 +{rank['pid']} +RUNNING +\d+ .*B "):
        assert re.search(row, status.stdout, re.M), status.stdout
    graph = job.share / "1.svg"
    asked = ["profile", "job", "1s", "--rank=1", "-o", graph]
    shown = job.machines[1].elaunch(asked).wait(DEADLINE)
    up = agents[1].wait_for_line(r"^up rank=1 round=0 pid=(\d+)$", DEADLINE)
    assert shown.stdout.endswith(f"1.svg: 1 s of pid {up[1]}\n"), shown
    assert "<svg" in graph.read_text()
    for flags in (["--rank=1", "--stream=stdout"], ["--node=1", "--grep=^up "]):
        logs = job.machines[1].elaunch(["logs", "job", *flags]).wait(DEADLINE)
        assert logs.returncode == 0 and "up rank=1 round=0" in logs.stdout, logs
        assert "rank=0" not in logs.stdout
    assert end(job, *agents) == [0, 0]
