"""Cables, switches and clocks between machines fail: nobody hangs, nobody trains twice."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster, Node
from tests.integration.jobs import ACT
from tests.integration.nodes import (
    DEADLINE,
    Build,
    Job,
    complaints,
    end,
    first_failures,
    over,
    rounds,
    wait_for_worker,
)
from tests.launching import Running

pytestmark = pytest.mark.slow

STRETCHED = ["--nnodes=1:2", "--max-restarts=0"]
FIXED = ["--nnodes=2", "--max-restarts=0"]


def store_of(job: Job) -> Node:
    """Return the node where the agents' store is."""
    return job.machines[3 if job.etcd else 1]


def comes_back(job: Job, one: Running, two: Running) -> None:
    """The job had lost node 2, which is healed now: see it return, and the job end well."""
    wait_for_worker(two, 1, 2)
    wait_for_worker(one, 0, 2)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == [(0, 2), (1, 1), (2, 2)]
    assert rounds(two) == [(0, 2), (2, 2)]
    assert first_failures(one) == []


def goes_on_alone(job: Job, one: Running) -> None:
    """See the survivor go on, and that the other node's worker had ended before."""
    wait_for_worker(one, 0, 1)
    assert job.at("seen", 0, 1) < job.at("began", 1, 0)


@pytest.mark.parametrize(
    ("backend", "number"),
    [("etcd", 1), pytest.param("etcd", 2, marks=pytest.mark.trial), ("c10d", 2)],
)
def test_a_node_loses_its_power(cluster: Build, backend: str, number: int) -> None:
    """Also the one that has rank 0, and coordinates perhaps."""
    job = Job(cluster, backend, 2)
    agents = job.pair(STRETCHED)
    job.machines.power_off(job.machines[number])
    survivor = agents[2 - number]
    wait_for_worker(survivor, 0, 1)
    assert end(job, survivor) == [0]
    assert rounds(survivor) == [(0, 2), (1, 1)]


def test_a_node_comes_back_without_its_name_service(cluster: Build) -> None:
    """It knows the address at which the store answered before."""
    job = Job(cluster, "c10d", 2)
    one, two = job.pair(STRETCHED)
    node = job.machines[2]
    job.machines.link_down(node)
    two.wait_for_line(r"cut off", DEADLINE, "stderr")
    node.run(["sh", "-c", "echo 127.0.0.1 localhost > /etc/hosts"])
    goes_on_alone(job, one)
    job.machines.link_up(node)
    comes_back(job, one, two)


@over("c10d", "etcd")
def test_a_link_is_down_for_a_while(cluster: Build, backend: str) -> None:
    """Who is cut off kills its workers in time, and rejoins."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(STRETCHED)
    job.machines.link_down(job.machines[2])
    goes_on_alone(job, one)
    job.machines.link_up(job.machines[2])
    comes_back(job, one, two)


@over("etcd", "c10d")
def test_all_packets_are_lost_for_a_while(cluster: Build, backend: str) -> None:
    """The link looks well meanwhile."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(STRETCHED)
    job.machines.lose(job.machines[2], 100)
    goes_on_alone(job, one)
    job.machines.heal()
    comes_back(job, one, two)


def to_the_store(machines: Cluster, node: Node, store: Node) -> None:
    """Lose what the node says."""
    machines.drop(node, store)


def from_the_store(machines: Cluster, node: Node, store: Node) -> None:
    """Lose what the node should hear."""
    machines.drop(store, node)


@pytest.mark.parametrize(
    ("backend", "cut"),
    [
        ("c10d", from_the_store),
        ("etcd", to_the_store),
        pytest.param("c10d", to_the_store, marks=pytest.mark.trial),
        pytest.param("etcd", from_the_store, marks=pytest.mark.trial),
    ],
)
def test_a_partition_has_one_direction(cluster: Build, backend: str, cut: object) -> None:
    """Half a connection is none."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(STRETCHED)
    assert callable(cut)
    cut(job.machines, job.machines[2], store_of(job))
    goes_on_alone(job, one)
    job.machines.heal()
    comes_back(job, one, two)


@pytest.mark.trial
@over("etcd", "c10d")
def test_one_packet_of_five_is_lost(cluster: Build, backend: str) -> None:
    """Nodes meet and train; with a patient timeout no restart comes of it."""
    job = Job(cluster, backend, 2)
    job.conf["heartbeat_timeout"] = 10
    job.machines.lose(job.machines[2], 20)
    one, two = job.pair(FIXED)
    for rank in range(2):
        job.goes_on(0, rank, 2.0)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2)]


def test_large_frames_are_lost(cluster: Build) -> None:
    """The hosts' MTU is larger than the switch's: what agents send over c10d is not held up."""
    job = Job(cluster, "c10d", 2)
    job.machines.narrow(1500)
    words = ["say=up", f"1:until={job.share}/fail", f"1:err={'alas ' * 1000}", "1:exit=9", "wait"]
    agents = [job.start(number, FIXED, words, script=ACT) for number in (1, 2)]
    for rank, agent in enumerate(agents):
        agent.wait_for_line(rf"^up rank={rank}", DEADLINE)
    (job.share / "fail").touch()
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [9, 9]
    assert "alas" in agents[0].output("stderr")


@over("c10d", "etcd")
def test_the_way_is_long(cluster: Build, backend: str) -> None:
    """200 ms to the other node and back: they meet, restart after a failure, and end."""
    job = Job(cluster, backend, 2)
    job.machines.delay(job.machines[2], 0.1)
    one, two = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"])
    job.goes_on(0, 1, 3.5)
    (job.share / "fail.0").touch()
    for rank, agent in enumerate((one, two)):
        wait_for_worker(agent, rank, 1)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2), (1, 2)]


@pytest.mark.trial
@over("etcd", "c10d")
def test_clocks_are_set_apart(cluster: Build, backend: str) -> None:
    """By two hours: nobody is thought dead."""
    job, (one, two) = apart(cluster, backend)
    assert [complaints(agent) for agent in (one, two)] == [[], []]
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2)]


@pytest.mark.trial
@over("etcd", "c10d")
def test_failures_have_their_order_by_clocks_apart(cluster: Build, backend: str) -> None:
    """Both nodes tell one as the first of the job."""
    job, (one, two) = apart(cluster, backend)
    (job.share / "fail.0").touch()
    for rank, agent in enumerate((one, two)):
        wait_for_worker(agent, rank, 1)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2), (1, 2)]
    assert first_failures(one)[-1] == first_failures(two)[-1]


def apart(cluster: Build, backend: str) -> tuple[Job, list[Running]]:
    """Start a job whose nodes' clocks are two hours apart, and let it train for a while."""
    job = Job(cluster, backend, 2)
    flags, words = ["--nnodes=2", "--max-restarts=1"], ["fail=0r0,1r0"]
    clocks = ("+1h", "-1h")
    agents = [job.start(k, flags, words, clock=clock) for k, clock in enumerate(clocks, 1)]
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 0)
    # Longer than a heartbeat may be late.
    for rank, agent in enumerate(agents):
        agent.wait_for_line(rf"^step 175 rank {rank}", DEADLINE)
    return job, agents
