"""Nodes come late, stand by, or do not come: who takes part, and what is said of who does not."""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.nodes import (
    DEADLINE,
    LOST,
    Build,
    Job,
    end,
    over,
    rounds,
    said,
    wait_for_worker,
    wait_until_said,
)

pytestmark = pytest.mark.slow


@over("etcd", "c10d")
def test_a_spare_takes_over(cluster: Build, backend: str) -> None:
    """It stands by, replaces the dead node, and ends with 0; as does one that was not needed."""
    job = Job(cluster, backend, 4)
    flags = ["--nnodes=2", "--max-restarts=0"]
    one, two = job.pair(flags)
    spares = []
    for number in (3, 4):  # who has waited longest replaces first
        spares.append(job.start(number, flags))
        wait_until_said(spares[-1], "stand.* by|spare")
    os.kill(two.pid, signal.SIGKILL)
    wait_for_worker(one, 0, 1)
    wait_for_worker(spares[0], 1, 1)
    assert end(job, one, *spares) == [0, 0, 0]
    assert rounds(one) == [(0, 2), (1, 2)]
    assert [rounds(spare) for spare in spares] == [[(1, 2)], []]


@over("c10d", "etcd")
def test_several_newcomers_cost_one_restart(cluster: Build, backend: str) -> None:
    """One node trains; three come; they all train in the next round."""
    job = Job(cluster, backend, 4)
    job.conf |= {"settle": 0.5, "debounce": 8}
    flags = ["--nnodes=1:4", "--max-restarts=0"]
    one = job.start(1, flags)
    wait_for_worker(one, 0, 0)
    others = [job.start(number, flags) for number in (4, 3, 2)]
    agents = [one, *reversed(others)]
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 1)
    assert end(job, *agents) == [0, 0, 0, 0]
    assert rounds(one) == [(0, 1), (1, 4)]
    assert all(rounds(agent) == [(1, 4)] for agent in others)
    assert any("3 nodes join" in line for line in said(one))


def test_newcomers_may_have_to_wait(cluster: Build) -> None:
    """With --on-join never they take part from the next round on, whatever begins it."""
    job = Job(cluster, "etcd", 2)
    job.conf["settle"] = 0.5
    flags = ["--nnodes=1:2", "--max-restarts=1", "--on-join=never"]
    one = job.start(1, flags, ["fail=0r0"])
    wait_for_worker(one, 0, 0)
    two = job.start(2, flags, ["fail=0r0"])
    job.goes_on(0, 0, 3.0)
    (job.share / "fail.0").touch()
    wait_for_worker(one, 0, 1)
    wait_for_worker(two, 1, 1)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == [(0, 1), (1, 2)]


@over("etcd", "c10d")
def test_too_few_come(cluster: Build, backend: str) -> None:
    """The error names who is there and how many are missing."""
    job = Job(cluster, backend, 2)
    job.conf["join_timeout"] = 12
    agents = [job.start(number, ["--nnodes=3"]) for number in (1, 2)]
    for agent in agents:
        done = agent.wait(DEADLINE)
        assert done.returncode == 72
        there = r"node1 (10.20.0.1), node2 (10.20.0.2)"
        assert f"2 of 3 nodes after 12 s: {there}; 1 more is needed" in done.stderr


@pytest.mark.trial
@over("c10d", "etcd")
def test_too_few_are_left(cluster: Build, backend: str) -> None:
    """The error names who went, why, and since when."""
    job = Job(cluster, backend, 2)
    job.conf["join_timeout"] = 12
    one, two = job.pair(["--nnodes=2", "--max-restarts=0"])
    os.kill(two.pid, signal.SIGKILL)
    done = one.wait(DEADLINE)
    assert done.returncode == 72
    wait_until_said(one, r"1 of 2 nodes after 12 s: node1 \(10\.20\.0\.1\); 1 more is needed")
    wait_until_said(one, rf"node node2 \(10\.20\.0\.2\) {LOST}, \d+ s ago")


def test_nodes_that_run_different_things_are_told(cluster: Build) -> None:
    """A warning, and with --strict-symmetry the end."""
    job = Job(cluster, "etcd", 2)
    agents = [job.start(n, ["--nnodes=2"], [f"time=0.0{n}"]) for n in (1, 2)]
    for agent in agents:
        wait_until_said(agent, r"node1.*node2|node2.*node1")
    assert end(job, *agents) == [0, 0]
    (job.share / "stop").unlink()
    flags = ["--nnodes=2", "--strict-symmetry"]
    agents = [job.start(n, flags, [f"time=0.0{n}"]) for n in (1, 2)]
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [76, 76]
