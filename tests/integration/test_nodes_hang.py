"""A worker hangs on one of several machines: all nodes tell it, with stacks of every worker."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.jobs import PROGRESS, UNUSUAL, WAITING
from tests.integration.nodes import DEADLINE, Build, Job, over, wait_until_said
from tests.launching import wait_until

pytestmark = pytest.mark.slow


@over("etcd", "c10d")
def test_a_hang_ends_the_round_on_all_nodes(cluster: Build, backend: str) -> None:
    """One restart, in which it does not hang; each node shows what its own workers were doing."""
    job = Job(cluster, backend, 2)
    flags = ["--nnodes=2", "--nproc-per-node=2", "--hang-timeout=4", "--max-restarts=1", "-r", "3"]
    words = [f"meet={job.share}", "steps=5", "3r0:hang", "steps=1", "r0:note=barrier", "r0:hang"]
    agents = [job.start(number, flags, [*words, "steps=20"], script=PROGRESS) for number in (1, 2)]
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [0, 0]
    told = [agent.output("stderr") for agent in agents]
    for text in told:
        assert re.search(r"on node\d\); restart 1 of 1", text), text
        assert len(re.findall(r"restart 1 of 1", text)) == 1
    # Which node finds it first is a matter of moments; both say what their workers did.
    for text, ranks in zip(told, ((0, 1), (2, 3)), strict=True):
        for rank in ranks:
            assert re.search(rf"rank {rank}: step [56], ", text), text
        assert re.search(r"File .*progress\.py\", line \d+ in hang", text), text
    assert "rank 3: step 5, silent for " in told[1]


def test_the_job_ends_with_the_code_of_a_hang(cluster: Build) -> None:
    """On all nodes."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--hang-timeout=3", "-r", "3"]
    words = [f"meet={job.share}", "steps=5", "hang"]
    agents = [job.start(number, flags, words, script=PROGRESS) for number in (1, 2)]
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [77, 77]
    records = job.machines.directory.rglob("state.json")
    failures = [json.loads(path.read_text()).get("failure") for path in records]
    assert any(found and found["hang"]["source"] == "script" for found in failures)


WORDS = {
    "awaited": "rank 2 has not entered all_reduce #31; ranks 0, 1 have been waiting there for",
    "collective": "rank 2 has entered broadcast #31, ranks 0, 1, 3 have entered all_reduce #31",
}


@pytest.mark.parametrize("what", ["awaited", pytest.param("collective", marks=pytest.mark.trial)])
def test_the_culprit_is_found_among_all_nodes_ranks(cluster: Build, what: str) -> None:
    """An unchanged script: the agents ask each other which collectives their ranks have entered.

    No rank of the second node waits in one: rank 3 receives from rank 2, which stands still.
    """
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--nproc-per-node=2", "--hang-timeout=4", "-r", "3"]
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    agents = [
        job.start(n, flags, [what, "2", "30", "60"], method=(), script=WAITING, env=env)
        for n in (1, 2)
    ]
    done = [agent.wait(DEADLINE) for agent in agents]
    assert [one.returncode for one in done] == [77, 77], done
    assert WORDS[what] in done[0].stderr and WORDS[what] in done[1].stderr
    assert "(seen on node2)" in done[0].stderr or what == "collective"


NODES = {
    "before": "rank 2 has not entered all_reduce #31; ranks 0, 1, 3 have been waiting there for",
    "gil": "rank 2 has not entered all_reduce #31; ranks 0, 1, 3 have been waiting there for",
    "stopped": "rank 2 does not answer (the process is stopped by a signal",
    "size": "rank 2 has entered all_reduce #31 with 8 of Float, ranks 0, 1, 3 have entered",
    "order": "ranks 0, 1, 3 wait in all_reduce #31 for rank 2, rank 2 waits in all_reduce #1 of ",
    "monitored": "rank 2 has not entered monitored_barrier; ranks 0, 1, 3 have been waiting there",
    "ring": "rank 2 has not entered all_reduce #31; rank 0 has been waiting there for",
    "pipeline": "rank 2 waits for no other rank; ranks 0, 1, 3 have been waiting in ",
    "half-barrier": "rank 2 has not entered all_reduce #31; ranks 0, 1 have been waiting there for",
    "halves-apart": "rank 2 has not entered all_reduce #31 of the group of ranks 2, 3; ",
    "backward": "rank 2, whose interpreter ends, has not entered all_reduce #",
    "unsent": "ranks 0-2 wait in all_reduce #31 for rank 3, ",
}


@pytest.mark.trial
@pytest.mark.parametrize("what", NODES)
def test_the_culprit_of_two_nodes(cluster: Build, what: str) -> None:
    """Whatever rank 2 does, both nodes' reports begin with it, and accuse no other rank."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--nproc-per-node=2", "--hang-timeout=4", "-r", "3"]
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    script = WAITING if what in ("before", "gil", "stopped", "size", "order") else UNUSUAL
    agents = [
        job.start(n, flags, [what, "2", "30", "200"], method=(), script=script, env=env)
        for n in (1, 2)
    ]
    done = [agent.wait(2 * DEADLINE) for agent in agents]
    assert [one.returncode for one in done] in ([77, 77], [1, 1]), done
    reports = [
        json.loads(path.read_text()) for path in job.machines.directory.rglob("failure-0.json")
    ]
    accused = {rank for found in reports if found["culprit"] for rank in found["culprit_ranks"]}
    assert accused <= {2}, reports
    assert done[0].returncode == 1 or all(NODES[what] in one.stderr for one in done), done


def test_a_rank_of_another_node_has_ended(cluster: Build) -> None:
    """With 0, while the others go on: whichever of them fails first, that one is named."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--nproc-per-node=2", "-r", "3"]
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    agents = [
        job.start(n, flags, ["leaves", "2", "30", "200"], method=(), script=UNUSUAL, env=env)
        for n in (1, 2)
    ]
    done = [agent.wait(DEADLINE) for agent in agents]
    assert [one.returncode for one in done] == [1, 1], done
    gone_on = r"(the others have lost it|ranks? [0-9, ]+ ha(ve|s) gone on)"
    said = f"rank 2 has ended (before all_reduce #|with 0, and {gone_on})"
    assert all(re.search(f"^{said}", one.stderr, re.M) for one in done), done
    record = job.machines.directory.rglob("state.json")
    reasons = [json.loads(path.read_text())["reason"] for path in record]
    assert all(re.match(said, reason) for reason in reasons), reasons


@pytest.mark.parametrize("begins", [0, pytest.param(1, marks=pytest.mark.trial)])
def test_a_rank_of_another_node_does_not_come_to_init_process_group(
    cluster: Build, begins: int
) -> None:
    """Its own node sees nothing of it at all."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--hang-timeout=1", "-r", "3", f"--max-restarts={begins}"]
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    words = ["absent", "1", str(begins), "60"]
    agents = [job.start(n, flags, words, method=(), script=UNUSUAL, env=env) for n in (1, 2)]
    done = [agent.wait(DEADLINE) for agent in agents]
    assert [one.returncode for one in done] == [77, 77], done
    said = "rank 1 has not entered init_process_group; rank 0 has been waiting there for "
    assert all(said in one.stderr for one in done), done


def test_nodes_that_do_not_reach_each_other(cluster: Build) -> None:
    """Their ranks wait for each other for ever, while the job's first node reaches both."""
    job = Job(cluster, "c10d", 3)
    _, second, third = job.machines.nodes[:3]
    job.machines.partition([second], [third])
    flags = ["--nnodes=3", "--hang-timeout=1", "-r", "3"]
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    words = ["absent", "0", "9", "60"]
    agents = [job.start(n, flags, words, method=(), script=UNUSUAL, env=env) for n in (1, 2, 3)]
    done = [agent.wait(2 * DEADLINE) for agent in agents]
    assert [one.returncode for one in done] == [77, 77, 77], done
    assert all(re.search(r"waits? in init_process_group", one.stderr) for one in done), done


def test_the_slow_rank_of_another_node_is_shown(cluster: Build) -> None:
    """On the job's page while it runs, and in node 0's verdict, which is on both nodes' time."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--nproc-per-node=2"]
    env = {"GLOO_SOCKET_IFNAME": "eth0", "LOGLEVEL": "INFO", "STOP": str(job.share / "stop")}
    words = ["slow", "3", "50", "5000"]
    first, other = [job.start(n, flags, words, method=(), script=WAITING, env=env) for n in (1, 2)]
    asks = ["status", "--rdzv-id=job", *job.meeting]
    page = ""
    for agent in (first, other):
        wait_until_said(agent, "OMP_NUM_THREADS")  # before, there is no store to ask

    def named() -> bool:
        nonlocal page
        page = job.machines[1].elaunch(asks).wait(DEADLINE).stdout
        return "attention: " in page

    wait_until(named, DEADLINE, "the slow rank on the job's page")
    assert re.search(r"attention: rank 3 on \S+ arrived last in \d+ of \d+ collectives, ", page), (
        page
    )
    assert re.search(r"goodput +not known: the script does not report its steps", page), page
    job.stop()
    told = first.wait(DEADLINE).stderr
    assert "goodput: not known: the script does not report its steps" in told
    assert re.search(r"slowest rank: rank 3 on \S+ arrived last in \d+ of \d+ collectives", told), (
        told
    )
    assert other.wait(DEADLINE).returncode == 0
    (found,) = [
        json.loads(path.read_text())
        for path in job.machines.directory.rglob("state.json")
        if json.loads(path.read_text())["node_rank"] == 0
    ]
    timing = found["job_timing"]
    assert sum(timing["seconds"].values()) == pytest.approx(timing["wall_s"], rel=1e-3)
