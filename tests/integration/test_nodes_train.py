"""Jobs on several machines that go well: they meet, in order, and end; and so does the next one."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.integration.jobs import ACT, FORK
from tests.integration.nodes import (
    DEADLINE,
    Build,
    Job,
    complaints,
    end,
    over,
    rounds,
    wait_for_worker,
)
from tests.launching import Running

pytestmark = pytest.mark.slow

TWO = ["--nnodes=2"]


def shown(running: Running) -> dict[int, dict[str, str]]:
    """Return what workers of round 0 printed by ``show``: rank → name → value."""
    found: dict[int, dict[str, str]] = {}
    for rank, name, value in re.findall(r"^(\d+)\.0 (\w+)=(.*)$", running.output(), re.M):
        found.setdefault(int(rank), {})[name] = value
    return found


@over("etcd", "c10d", "static")
def test_two_nodes_train(cluster: Build, backend: str) -> None:
    """With collectives over gloo; both end with 0 and have nothing to say."""
    job = Job(cluster, backend, 2)
    agents = [job.start(number, TWO, ["gloo"], method=FORK) for number in (1, 2)]
    ranks = [int(agent.wait_for_line(r"^up rank=(\d)", DEADLINE)[1]) for agent in agents]
    assert sorted(ranks) == [0, 1]
    for rank, agent in zip(ranks, agents, strict=True):
        wait_for_worker(agent, rank, 0)
    assert end(job, *agents) == [0, 0]
    for agent in agents:
        assert rounds(agent) == [(0, 2)]
        assert complaints(agent) == []
    if job.etcd is not None:
        assert_nothing_stays(job)


def assert_nothing_stays(job: Job) -> None:
    """What a finished job wrote into etcd is gone, or goes with a lease."""
    assert job.etcd is not None
    node = job.etcd.members[0].node
    endpoint = f"--endpoints=http://{job.etcd.endpoint}"
    argv = ["env", "ETCDCTL_API=3", "etcdctl", endpoint, "get", "", "--from-key", "-w", "json"]
    found = json.loads(node.run(argv).stdout).get("kvs", [])
    assert all(kv.get("lease") for kv in found), found


@over("c10d", "etcd")
def test_ranks_go_node_by_node(cluster: Build, backend: str) -> None:
    """In natural order of the hosts' names, with as many ranks as a node has slots."""
    job = Job(cluster, backend, 3)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME "
    names += "ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT ELAUNCH_NODE_ADDRS"
    words = [f"show={','.join(names.split())}"]
    slots, roles = (2, 1, 3), ("actor", "learner", "actor")
    agents = [
        job.start(
            number,
            ["--nnodes=3", f"--nproc-per-node={slots[number - 1]}", f"--role={roles[number - 1]}"],
            words,
            script=ACT,
        )
        for number in (3, 1, 2)
    ]
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [0, 0, 0]
    told = {rank: values for agent in agents for rank, values in shown(agent).items()}
    addresses = [node.address for node in job.machines.nodes[:3]]
    assert sorted(told) == list(range(6))
    assert {values["ELAUNCH_NODE_ADDRS"] for values in told.values()} == {",".join(addresses)}
    assert {values["MASTER_ADDR"] for values in told.values()} == {addresses[0]}
    assert len({values["MASTER_PORT"] for values in told.values()}) == 1
    assert {values["WORLD_SIZE"] for values in told.values()} == {"6"}
    assert {values["GROUP_WORLD_SIZE"] for values in told.values()} == {"3"}
    columns = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
    assert [" ".join(told[rank][name] for name in columns) for rank in range(6)] == [
        "0 0 2 0 5",
        "0 1 2 1 5",
        "1 0 1 0 1",
        "2 0 3 2 5",
        "2 1 3 3 5",
        "2 2 3 4 5",
    ]


def test_over_ipv6(cluster: Build) -> None:
    """The endpoint, the nodes' addresses, the workers' store and gloo."""
    job = Job(cluster, "c10d", 2)
    one, two = job.machines[1], job.machines[2]
    job.meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=[{one.address6}]:29400"]
    agents = []
    for number, node in ((1, one), (2, two)):
        flags = [*TWO, f"--local-addr={node.address6}"]
        agents.append(job.start(number, flags, ["gloo"], method=FORK))
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 0)
    assert end(job, *agents) == [0, 0]
    again = [
        job.start(number, [*TWO, f"--local-addr={node.address6}"], SHOW, script=ACT)
        for number, node in ((1, one), (2, two))
    ]
    assert [agent.wait(DEADLINE).returncode for agent in again] == [0, 0]
    assert shown(again[1])[1] == {
        "MASTER_ADDR": one.address6,
        "ELAUNCH_NODE_ADDRS": f"{one.address6},{two.address6}",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }


SHOW = ["show=MASTER_ADDR,ELAUNCH_NODE_ADDRS,GLOO_SOCKET_IFNAME,NCCL_SOCKET_IFNAME"]


@over("etcd", "c10d")
def test_a_run_id_is_used_again(cluster: Build, backend: str) -> None:
    """As a requeued job does: the next one begins with round 0."""
    job = Job(cluster, backend, 2)
    for _ in range(2):
        agents = [job.start(number, TWO, ["say=up"], script=ACT) for number in (1, 2)]
        for agent in agents:
            done = agent.wait(DEADLINE)
            assert done.returncode == 0, done
            assert re.fullmatch(r"up rank=\d round=0 pid=\d+\n", done.stdout)


@pytest.mark.trial
def test_two_jobs_on_one_etcd(cluster: Build) -> None:
    """The end of one, and its failures, do not touch the other."""
    job = Job(cluster, "etcd", 2)
    flags = [*TWO, "--max-restarts=0"]
    mine = [job.start(number, flags) for number in (1, 2)]
    other = [
        job.start(number, [*flags, "--rdzv-id=other"], ["say=up", "1:exit=9", "wait"], script=ACT)
        for number in (1, 2)
    ]
    assert [agent.wait(DEADLINE).returncode for agent in other] == [9, 9]
    for agent in mine:
        rank = int(agent.wait_for_line(r"^up rank=(\d)", DEADLINE)[1])
        job.goes_on(0, rank)
    assert end(job, *mine) == [0, 0]
    assert all(rounds(agent) == [(0, 2)] and complaints(agent) == [] for agent in mine)


@over("c10d", "etcd")
def test_who_has_finished_early_still_listens(cluster: Build, backend: str) -> None:
    """To a restart that another node needs, and to SIGTERM."""
    job = Job(cluster, backend, 2)
    flags = [*TWO, "--max-restarts=1"]
    words = ["say=up", f"1r0:until={job.share}/fail", "1r0:exit=3", f"1r1:until={job.share}/no"]
    one, two = (job.start(number, flags, words, script=ACT) for number in (1, 2))
    first, second = (one, two) if one.wait_for_line(r"rank=(\d)")[1] == "0" else (two, one)
    wait_for_finish(job, first, 0)
    (job.share / "fail").touch()
    first.wait_for_line(r"^up rank=0 round=1", DEADLINE)
    second.wait_for_line(r"^up rank=1 round=1", DEADLINE)
    wait_for_finish(job, first, 1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE).returncode == 128 + signal.SIGTERM
    second.send_signal(signal.SIGTERM)
    assert second.wait(DEADLINE).returncode == 128 + signal.SIGTERM


def wait_for_finish(job: Job, agent: Running, round: int) -> None:
    """Wait until the one worker of an agent has ended: its pid is gone."""
    from tests.launching import wait_until

    pid = int(agent.wait_for_line(rf"^up rank=0 round={round} pid=(\d+)$", DEADLINE)[1])
    node = next(n for n in job.machines.nodes if agent.pid in n.processes())
    wait_until(lambda: pid not in node.processes(), DEADLINE, "the worker has ended")
