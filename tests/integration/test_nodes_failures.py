"""A worker or an agent fails on one of several machines: what all of them make of it."""

from __future__ import annotations

import os
import signal

import pytest

from elaunch.runs.directory import RunDir
from elaunch.views import failures
from elaunch.views.read import read
from tests.integration.jobs import ACT
from tests.integration.nodes import (
    DEADLINE,
    LOST,
    Build,
    Job,
    end,
    first_failures,
    over,
    rounds,
    said,
    wait_for_worker,
    wait_until_said,
)
from tests.integration.watching import server_of
from tests.launching import freeze, thaw

pytestmark = pytest.mark.slow

STRETCHED = ["--nnodes=1:2", "--max-restarts=0"]


@over("etcd", "c10d")
def test_one_failure_ends_the_round_on_all_nodes(cluster: Build, backend: str) -> None:
    """The others are stopped at once; all tell the same failure and end with its code."""
    job = Job(cluster, backend, 3)
    words = ["say=up", f"1:until={job.share}/fail", "1:err=alas", "1:kill=SIGSEGV", "wait"]
    flags = ["--nnodes=3", "--max-restarts=0", "--sibling-grace=300"]
    agents = [job.start(number, flags, words, script=ACT) for number in (1, 2, 3)]
    for rank, agent in enumerate(agents):
        agent.wait_for_line(rf"^up rank={rank}", DEADLINE)
    (job.share / "fail").touch()
    # A worker that was not told waits for longer; one that was ends without its grace.
    codes = [agent.wait(DEADLINE).returncode for agent in agents]
    assert codes == [128 + signal.SIGSEGV] * 3
    told = [first_failures(agent) for agent in agents]
    assert len(told[0]) == 1 and told[0] == told[1] == told[2]
    assert told[0][0].startswith("1 ") and "on" not in told[0][0]
    assert "node2 was killed by SIGSEGV" in told[0][0]


@pytest.mark.trial
def test_a_node_never_starts_its_workers(cluster: Build) -> None:
    """Its server imports for ever: both agents name it, and end in bounded time."""
    job = Job(cluster, "c10d", 2)
    job.conf["join_timeout"] = 20
    (job.share / "sleepy.py").write_text("import time\ntime.sleep(600)\n")
    flags = ["--nnodes=2", "--max-restarts=0", "--shutdown-timeout=1"]
    one = job.start(1, flags)
    environ = {"PYTHONPATH": str(job.share)}
    two = job.start(2, [*flags, "--preload=sleepy"], env=environ, method=[])
    for agent in (one, two):
        assert agent.wait(DEADLINE).returncode == 69
        wait_until_said(agent, r"node2 \(\S+\) did not start round 0 in \d+ s")


@pytest.mark.trial
@over("c10d", "static")
def test_the_server_of_an_agent_that_waits_is_killed(cluster: Build, backend: str) -> None:
    """The job begins when the other node comes; no restart is used."""
    job = Job(cluster, backend, 2)
    flags = ["--nnodes=2", "--max-restarts=0"]
    one = job.start(1, flags)
    wait_until_said(one, r"waiting: 1 of 2 nodes")
    os.kill(server_of(one), signal.SIGKILL)
    wait_until_said(one, r"the server that starts the workers was killed by SIGKILL")
    two = job.start(2, flags)
    for rank, agent in enumerate((one, two)):
        agent.wait_for_line(r"^up rank=\d round=0", DEADLINE)
        job.goes_on(0, rank)
    assert end(job, one, two) == [0, 0]


@over("c10d", "etcd")
def test_there_is_one_budget_for_the_job(cluster: Build, backend: str) -> None:
    """One restart: it is used up by node 1, and the failure on node 2 is the last."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=0r0,1r1"])
    (job.share / "fail.0").touch()
    for rank, agent in enumerate((one, two)):
        wait_for_worker(agent, rank, 1)
    (job.share / "fail.1").touch()
    assert [agent.wait(DEADLINE).returncode for agent in (one, two)] == [7, 7]
    assert rounds(one) == rounds(two) == [(0, 2), (1, 2)]
    told = [first_failures(agent) for agent in (one, two)]
    assert told[0] == told[1] and len(told[0]) == 2
    for agent in (one, two):
        assert any("rank 1 on node2 exited with code 7; 1 restart" in line for line in said(agent))


def test_the_same_failure_ends_the_job(cluster: Build) -> None:
    """On whatever node it happens: both end with 78, and name the rounds."""
    job = Job(cluster, "etcd", 2)
    flags = ["--nnodes=2", "--max-restarts=9", "--max-same-failures=2"]
    one, two = job.pair(flags, ["fail=0r0,1r1"])
    (job.share / "fail.0").touch()
    for rank, agent in enumerate((one, two)):
        wait_for_worker(agent, rank, 1)
    (job.share / "fail.1").touch()
    assert [agent.wait(DEADLINE).returncode for agent in (one, two)] == [78, 78]
    why = "rank 1 on node2 exited with code 7; the same failure in rounds 0, 1 without progress"
    for agent in (one, two):
        assert any(why in line for line in said(agent))
    # Each node's directory says why: node 1 had the failure before, the last was elsewhere.
    runs = [RunDir(job.machines[number].state / "elaunch" / "runs" / "job") for number in (1, 2)]
    here, there = (failures.read_cards(read(run)) for run in runs)
    assert here.card is not None and (here.card.round, there.elsewhere) == (0, None)
    assert here.elsewhere is not None and here.elsewhere["round"] == 1
    shown = "\n".join(failures.lines(here))
    assert shown.index("another node:\nrank 1 (local_rank 0") < shown.index("rank 0 (local_rank 0")
    follows = here.card.document and here.card.document["follows"]
    assert follows == {"round": 1, "resumed_step": None, "checkpoint": None}


@over("etcd", "c10d")
def test_a_killed_agent_is_missed_and_welcome_again(cluster: Build, backend: str) -> None:
    """The survivor goes on alone, uncounted; the next agent on that node gets its place."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(STRETCHED)
    os.kill(two.pid, signal.SIGKILL)
    wait_for_worker(one, 0, 1)
    assert job.at("seen", 0, 1) < job.at("began", 1, 0)
    wait_until_said(one, rf"node node2 \(10\.20\.0\.2\) {LOST}")
    again = job.start(2, STRETCHED)
    wait_for_worker(again, 1, 2)
    wait_for_worker(one, 0, 2)
    assert end(job, one, again) == [0, 0]
    assert rounds(one) == [(0, 2), (1, 1), (2, 2)]
    assert first_failures(one) == []


@over("etcd")
def test_a_node_that_is_lost_again_and_again(cluster: Build, backend: str) -> None:
    """Three rounds in a row end for it; then it only stands by, and the other goes on."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(STRETCHED)
    for number in range(3):
        os.kill(two.pid, signal.SIGKILL)
        wait_for_worker(one, 0, 2 * number + 1)
        two = job.start(2, STRETCHED)
        if number < 2:
            wait_for_worker(two, 1, 2 * number + 2)
            wait_for_worker(one, 0, 2 * number + 2)
    lost = "node2 was lost in rounds 0, 2, 4"
    wait_until_said(one, rf"going on with 1 node, 1 worker \({lost}: it stands by\)")
    wait_until_said(two, f"standing by: {lost}; the others go on without it")
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == [(0, 2), (1, 1), (2, 2), (3, 1), (4, 2), (5, 1)]


@over("c10d", "etcd")
def test_a_frozen_agent_is_fenced(cluster: Build, backend: str) -> None:
    """Its workers are dead before the others' next round; it comes back when it is thawed."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(STRETCHED)
    freeze(two.pid)
    wait_for_worker(one, 0, 1)
    assert job.at("seen", 0, 1) < job.at("began", 1, 0)
    job.goes_on(1, 0)
    thaw(two.pid)
    wait_for_worker(two, 1, 2)
    wait_for_worker(one, 0, 2)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == [(0, 2), (1, 1), (2, 2)]
    assert rounds(two) == [(0, 2), (2, 2)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_is_told_to_go_leaves(cluster: Build, number: signal.Signals) -> None:
    """It ends with the signal's code at once; the other goes on without waiting for a timeout."""
    job = Job(cluster, "etcd", 2)
    one, two = job.pair(STRETCHED)
    two.send_signal(number)
    assert two.wait(DEADLINE).returncode == 128 + number
    wait_for_worker(one, 0, 1)
    assert any("has left" in line or "leaves" in line for line in said(one))
    assert not any("no heartbeat" in line for line in said(one))  # it has not waited for the lease
    assert end(job, one) == [0]


def test_restarts_are_coordinated_with_the_static_backend(cluster: Build) -> None:
    """All nodes begin the next round, and the ranks are the given ones."""
    job = Job(cluster, "static", 2)
    one, two = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"])
    (job.share / "fail.0").touch()
    for rank, agent in enumerate((one, two)):
        wait_for_worker(agent, rank, 1)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2), (1, 2)]


def test_all_ranks_resume_from_the_newest_checkpoint(cluster: Build) -> None:
    """On both nodes the same, though only one of them has looked."""
    job = Job(cluster, "etcd", 2)
    flags = ["--nnodes=2", "--max-restarts=1", f"--checkpoint-dir={job.share}"]
    agents = job.pair([*flags, "--checkpoint-glob=step_*.pt"], ["fail=1r0", "save=10"])
    job.goes_on(0, 0, 0.5)
    (job.share / "fail.0").touch()
    steps = set()
    for rank, agent in enumerate(agents):
        line = agent.wait_for_line(rf"^resume rank={rank} round=1 from=(\d+)$", DEADLINE)
        steps.add(int(line[1]))
    assert len(steps) == 1 and steps.pop() >= 10
    assert end(job, *agents) == [0, 0]
