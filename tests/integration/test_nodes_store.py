"""The store in which the agents meet is hurt while a job trains."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.etcdnodes import LITTLE_SPACE
from tests.integration.nodes import (
    DEADLINE,
    Build,
    Job,
    end,
    rounds,
    said,
    wait_for_worker,
    wait_until_said,
)
from tests.launching import freeze, thaw, wait_until

pytestmark = pytest.mark.slow

LONGER_THAN_A_LEASE = 4.0


# What a client sees of each is tried in tests/store/etcd/test_client.py.
@pytest.mark.parametrize(
    ("who", "how"),
    [
        ("leader", "killed"),
        *(
            pytest.param(who, how, marks=pytest.mark.trial)
            for who, how in (("follower", "killed"), ("follower", "frozen"))
        ),
    ],
)
def test_a_member_of_etcd_fails(cluster: Build, who: str, how: str) -> None:
    """No restart, no step lost; and the job still notices its end."""
    job = Job(cluster, "etcd", 2, members=3)
    assert job.etcd is not None
    one, two = job.pair(["--nnodes=2", "--max-restarts=0"])
    member = job.etcd.leader() if who == "leader" else job.etcd.follower()
    if how == "killed":
        job.etcd.kill(member)
    else:
        job.etcd.freeze(member)
    for rank in range(2):
        job.goes_on(0, rank, LONGER_THAN_A_LEASE)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2)]
    if how == "frozen":
        thaw(member.running.pid)


@pytest.mark.trial
def test_the_leader_of_etcd_is_frozen(cluster: Build) -> None:
    """The job goes on, after a free restart where the others elect another leader too late."""
    job = Job(cluster, "etcd", 2, members=3)
    assert job.etcd is not None
    one, two = job.pair(["--nnodes=2", "--max-restarts=0"])
    leader = job.etcd.leader()
    job.etcd.freeze(leader)
    for rank in range(2):
        job.goes_on("*", rank, LONGER_THAN_A_LEASE)
    assert end(job, one, two) == [0, 0]
    assert {world for _, world in [*rounds(one), *rounds(two)]} == {2}
    thaw(leader.running.pid)


@contextmanager
def moving(job: Job) -> Iterator[None]:
    """Move etcd's leader every second."""
    assert job.etcd is not None
    etcd, stopped = job.etcd, threading.Event()

    def move() -> None:
        while not stopped.wait(1.0):
            etcd.move_leader()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        yield
    finally:
        stopped.set()
        mover.join()


@pytest.mark.parametrize(
    "lost",
    [pytest.param(1, id="another", marks=pytest.mark.trial), pytest.param(0, id="coordinator")],
)
def test_a_node_is_lost_while_the_leader_of_etcd_moves(cluster: Build, lost: int) -> None:
    """No entry expires then: the report that a node owes is missed, or the coordinator's plan."""
    job = Job(cluster, "etcd", 3, members=3)
    job.conf["heartbeat_timeout"] = 4
    flags = ["--nnodes=2:3", "--max-restarts=0", "--shutdown-timeout=1"]
    agents = [job.start(1, flags, ["fail=2r0"])]
    wait_until_said(agents[0], r"waiting: 1 of at least 2 nodes")  # it is first in line
    agents += [job.start(number, flags, ["fail=2r0"]) for number in (2, 3)]
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 0)
    with moving(job):
        for agent in agents:
            wait_until_said(agent, "has changed its leader 3 times")
        dead = agents.pop(lost)
        os.kill(dead.pid, signal.SIGKILL)
        (job.share / "fail.0").touch()
        for rank, agent in enumerate(agents):
            wait_for_worker(agent, rank, 1)
        assert end(job, *agents) == [0, 0]
    for agent in agents:
        assert rounds(agent) == [(0, 3), (1, 2)]
        assert not any("cut off" in line for line in said(agent))
    what = r"node2 .*did not end round 0 in \d+ s" if lost else "has published nothing for long"
    assert sum(bool(re.search(f"{what}: evicted", line)) for a in agents for line in said(a)) == 1


@pytest.mark.trial
def test_the_leader_dies_during_a_round_change(cluster: Build) -> None:
    """The next round comes all the same, and is one restart."""
    job = Job(cluster, "etcd", 2, members=3)
    assert job.etcd is not None
    one, two = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"])
    leader = job.etcd.leader()
    (job.share / "fail.0").touch()
    job.etcd.kill(leader)
    for rank, agent in enumerate((one, two)):
        wait_for_worker(agent, rank, 1)
    job.etcd.restart(leader)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2), (1, 2)]


@pytest.mark.trial
def test_etcd_has_no_majority_for_a_while(cluster: Build) -> None:
    """Nobody can decide anything then, so the workers may go on."""
    job = Job(cluster, "etcd", 2, members=3)
    assert job.etcd is not None
    one, two = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"])
    dead = job.etcd.members[:2]
    for member in dead:
        job.etcd.kill(member)
    for rank in range(2):
        job.goes_on(0, rank, LONGER_THAN_A_LEASE)
    for member in dead:
        job.etcd.restart(member)
    job.etcd.leader()
    (job.share / "fail.0").touch()
    for rank, agent in enumerate((one, two)):
        wait_for_worker(agent, rank, 1)
    assert end(job, one, two) == [0, 0]
    assert rounds(one) == rounds(two) == [(0, 2), (1, 2)]


def test_etcd_is_gone_for_good(cluster: Build) -> None:
    """The agents end in bounded time, and say what they have lost."""
    job = Job(cluster, "etcd", 2)
    job.conf["store_timeout"] = 5
    assert job.etcd is not None
    agents = job.pair(["--nnodes=2", "--max-restarts=0"])
    job.etcd.kill(job.etcd.members[0])
    for agent in agents:
        assert agent.wait(DEADLINE).returncode == 69
        assert job.etcd.endpoint in agent.output("stderr")


def test_the_host_of_the_tcpstore_is_killed(cluster: Build) -> None:
    """The other node ends in bounded time, and says what it has lost and what would survive."""
    job = Job(cluster, "c10d", 2)
    job.conf["store_timeout"] = 5
    one, two = job.pair(["--nnodes=1:2", "--max-restarts=0"])
    os.kill(one.pid, signal.SIGKILL)
    assert two.wait(DEADLINE).returncode == 69
    results = [line for line in said(two) if line.startswith("result: FAILED")]
    assert len(results) == 1 and two.output("stderr").count("the last attempt") == 1
    assert re.search(r"lost the store, TCPStore at node1:29400.*etcd", results[0])


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_the_host_of_the_tcpstore_comes_back(cluster: Build, backend: str) -> None:
    """The job goes on where it was: in the next round, not in its first."""
    job = Job(cluster, backend, 2)
    one, two = job.pair(["--nnodes=2", "--max-restarts=0"])
    os.kill(one.pid, signal.SIGKILL)
    again = job.start(1, ["--nnodes=2", "--max-restarts=0"])
    running = {0: again, 1: two}
    ranks = {
        int(a.wait_for_line(r"^up rank=(\d) round=1", DEADLINE)[1]): a for a in running.values()
    }
    assert sorted(ranks) == [0, 1]
    for rank, agent in ranks.items():
        wait_for_worker(agent, rank, 1)
    assert end(job, again, two) == [0, 0]
    assert rounds(again) == [(1, 2)]


@pytest.mark.trial
def test_a_host_that_is_back_at_once_waits_for_the_fences(cluster: Build) -> None:
    """It could begin alone; the other node's workers may run for most of a long heartbeat."""
    job = Job(cluster, "c10d", 2)
    job.conf |= {"settle": 2, "heartbeat_timeout": 9}
    flags = ["--nnodes=1:2", "--max-restarts=0"]
    one, two = job.pair(flags)
    os.kill(one.pid, signal.SIGKILL)
    again = job.start(1, flags)
    wait_until_said(two, r"cut off|could not renew")
    for rank in range(2):
        job.goes_on(1, rank)
    began = min(job.at("began", 1, rank) for rank in range(2))
    assert began > job.at("seen", 0, 1)
    assert end(job, again, two) == [0, 0]
    assert rounds(again) == [(1, 2)]
    assert rounds(two) == [(0, 2), (1, 2)]


def test_the_host_of_the_tcpstore_is_frozen(cluster: Build) -> None:
    """The other node cannot know that nobody decides: its workers are dead before it says so."""
    job = Job(cluster, "c10d", 2)
    job.conf["store_timeout"] = 5
    one, two = job.pair(["--nnodes=1:2", "--max-restarts=0"])
    os.kill(one.pid, signal.SIGSTOP)
    wait_until_said(two, r"cut off|could not renew")
    assert two.wait(DEADLINE).returncode == 69
    wait_until_said(two, r"node1.*29400")
    os.kill(one.pid, signal.SIGCONT)
    job.stop()
    assert one.wait(DEADLINE).returncode == 0


def test_the_host_of_the_tcpstore_is_told_to_leave(cluster: Build) -> None:
    """The job ends everywhere at once, with the signal's code and the way out."""
    job = Job(cluster, "c10d", 2)
    one, two = job.pair(["--nnodes=1:2", "--max-restarts=3"])
    one.send_signal(signal.SIGTERM)
    assert [agent.wait(DEADLINE).returncode for agent in (one, two)] == [143, 143]
    wait_until_said(two, r"node1.*stopped by SIGTERM.*the store.*etcd")


@pytest.mark.trial
def test_all_agents_are_killed_and_none_knows_the_job(cluster: Build) -> None:
    """A TCPStore ends with its host: restarts are counted anew, and both nodes say so."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--max-restarts=1"]
    for agent in job.pair(flags):
        os.kill(agent.pid, signal.SIGKILL)
    again = [job.start(number, flags) for number in (1, 2)]
    for agent in again:
        wait_until_said(agent, r"was killed here in round 0: this one goes on with round 1, and")
        agent.wait_for_line(r"^up rank=\d round=1", DEADLINE)
    assert end(job, *again) == [0, 0]


def test_the_host_is_killed_while_who_knows_the_job_is_frozen(cluster: Build) -> None:
    """No number of a round is given twice while an agent lives that has seen it."""
    job = Job(cluster, "c10d", 2)
    job.conf["settle"] = 1
    one, two = job.pair(["--nnodes=1:2", "--max-restarts=1"])
    os.kill(two.pid, signal.SIGSTOP)
    os.kill(one.pid, signal.SIGKILL)
    again = job.start(1, ["--nnodes=1:2", "--max-restarts=1"])
    wait_for_worker(again, 0, 1)
    os.kill(two.pid, signal.SIGCONT)
    wait_for_worker(two, 1, 2)
    assert end(job, again, two) == [0, 0]


@pytest.mark.trial
def test_all_agents_are_told_to_leave_at_once(cluster: Build) -> None:
    """The job is over: what is started with its run id then is another one."""
    job = Job(cluster, "etcd", 3, members=3)
    flags = ["--nnodes=2:3", "--max-restarts=1"]
    agents = [job.start(number, flags) for number in (1, 2, 3)]
    for rank, agent in enumerate(agents):
        agent.wait_for_line(r"^up rank=\d round=0", DEADLINE)
        job.goes_on(0, rank)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [143] * 3
    again = [job.start(number, flags) for number in (1, 2, 3)]
    for agent in again:
        agent.wait_for_line(r"^up rank=\d round=0", DEADLINE)
    assert end(job, *again) == [0] * 3


def test_all_agents_are_killed_and_the_job_is_started_again(cluster: Build) -> None:
    """What they left in etcd is the same job's: it goes on in the next round, with its budget."""
    job = Job(cluster, "etcd", 2)
    flags = ["--nnodes=2", "--max-restarts=1"]
    for agent in job.pair(flags):
        os.kill(agent.pid, signal.SIGKILL)
    again = [job.start(number, flags) for number in (1, 2)]
    for rank, agent in enumerate(again):
        wait_for_worker(agent, rank, 1)
    assert end(job, *again) == [0, 0]


def test_all_agents_are_frozen_for_longer_than_a_lease(cluster: Build) -> None:
    """A suspended job goes on: whoever led and leads again hears all that is there."""
    job = Job(cluster, "etcd", 2)
    etcd = job.etcd
    assert etcd is not None
    agents = job.pair(["--nnodes=2", "--max-restarts=0"])
    for agent in agents:
        freeze(agent.pid)
    wait_until(lambda: "/agents/" not in " ".join(etcd.keys()), what="the leases end")
    for agent in agents:
        thaw(agent.pid)
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 1)
    assert end(job, *agents) == [0, 0]


@pytest.mark.parametrize("how", ["wiped", pytest.param("restored", marks=pytest.mark.trial)])
def test_etcd_loses_its_memory(cluster: Build, how: str) -> None:
    """The job goes on, in the round after the last, with the restarts that it has used."""
    job = Job(cluster, "etcd", 2)
    etcd = job.etcd
    assert etcd is not None
    snapshot = job.machines.directory / "snapshot"
    agents = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"])
    etcd.save(snapshot)
    (job.share / "fail.0").touch()
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 1)
    etcd.lose(snapshot if how == "restored" else None)
    for agent in agents:
        wait_until_said(agent, "cut off: etcd at .* has lost its memory: its revision is .* was it")
        wait_until_said(agent, "the store lost its memory; going on with 2 nodes")
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 2)
    assert end(job, *agents) == [0, 0]
    assert [rounds(agent) for agent in agents] == [[(0, 2), (1, 2), (2, 2)]] * 2


@pytest.mark.trial
def test_etcd_is_full(cluster: Build) -> None:
    """Training goes on; once something has to be written, the agents name it, and end in time."""
    job = Job(cluster, "etcd", 2, options=LITTLE_SPACE)
    job.conf["store_timeout"] = 4
    assert job.etcd is not None
    agents = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"])
    job.etcd.fill()
    for rank in range(2):
        job.goes_on(0, rank, LONGER_THAN_A_LEASE)
    (job.share / "fail.0").touch()
    for agent in agents:
        assert agent.wait(DEADLINE).returncode == 69
        full = [line for line in said(agent) if "takes no more writes" in line]
        assert "alarm NOSPACE" in full[0] and "the job goes on until" in full[0]
        assert "has taken no write of this agent for 4 s" in full[1]
        assert sum("the job goes on until" in line for line in full) == 1


USER = {"ELAUNCH_ETCD_USER": "trainer", "ELAUNCH_ETCD_PASSWORD": "s3cret"}


def test_a_password_is_changed_while_the_job_trains(cluster: Build) -> None:
    """Each agent says so soon; the training goes on, and what has finished ends with 0."""
    job = Job(cluster, "etcd", 2)
    job.conf["store_timeout"] = 2 * LONGER_THAN_A_LEASE  # of a slow etcd, too
    assert job.etcd is not None
    job.etcd.add_user("trainer", "s3cret")
    agents = job.pair(["--nnodes=2", "--max-restarts=0"], env=USER)
    job.etcd.set_password("trainer", "another")
    for agent in agents:
        denied = wait_until_said(agent, "does not know the user 'trainer' .*the job goes on")
        assert job.etcd.endpoint in denied.string
    for rank in range(2):  # for longer than the store may be lost, or a lease lives
        job.goes_on(0, rank, 3 * LONGER_THAN_A_LEASE)
    assert end(job, *agents) == [0, 0]
    for agent in agents:
        assert rounds(agent) == [(0, 2)]
        assert sum("the job goes on until" in line for line in said(agent)) == 1


@pytest.mark.trial
def test_a_password_is_changed_and_a_rank_fails(cluster: Build) -> None:
    """Nobody can agree on what follows: all end in time, the one whose worker still runs too."""
    job = Job(cluster, "etcd", 2)
    job.conf["store_timeout"] = 4
    assert job.etcd is not None
    job.etcd.add_user("trainer", "s3cret")
    agents = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"], env=USER)
    job.etcd.set_password("trainer", "another")
    (job.share / "fail.0").touch()
    for agent in agents:
        assert agent.wait(DEADLINE).returncode == 69
        assert "has taken no write of this agent for 4 s" in said(agent)[-1]


@pytest.mark.trial
def test_a_password_is_changed_and_set_back(cluster: Build) -> None:
    """The agents go on to write, and agree on the next round."""
    job = Job(cluster, "etcd", 2)
    assert job.etcd is not None
    job.etcd.add_user("trainer", "s3cret")
    agents = job.pair(["--nnodes=2", "--max-restarts=1"], ["fail=1r0"], env=USER)
    job.etcd.set_password("trainer", "another")
    for agent in agents:
        wait_until_said(agent, "does not know the user 'trainer' .*the job goes on")
    (job.share / "fail.0").touch()
    wait_until_said(agents[1], r"rank 1 exited with code 7")
    job.etcd.set_password("trainer", "s3cret")
    for rank, agent in enumerate(agents):
        wait_for_worker(agent, rank, 1)
    assert end(job, *agents) == [0, 0]


def test_a_hand_changes_what_is_in_etcd(cluster: Build) -> None:
    """Garbage, another version, too much, nothing: the agents write it again, and the job goes on.

    Each time a rank fails afterwards: all that a round needs is read, and written.
    """
    job = Job(cluster, "etcd", 2)
    etcd = job.etcd
    assert etcd is not None
    hands: list[dict[str, str | None]] = [
        {"/board": "by hand", "/board/nodes": "[]"},
        {"/board": None, "/agents/.*": "[1]"},
        {"/board": "999999\n{}", "/lead/.*": None},
        {"/board": "1\n" + "x" * 500_000, "/board/nodes": None},
    ]
    fails = ",".join(f"1r{number}" for number in range(len(hands)))
    one, two = job.pair(["--nnodes=2", f"--max-restarts={len(hands)}"], [f"fail={fails}"])
    for number, hand in enumerate(hands):
        for part, value in hand.items():
            for key in filter(re.compile(rf"/elaunch/job{part}").fullmatch, etcd.keys()):
                etcd.put(key, value) if value is not None else etcd.ctl("del", key)
        (job.share / f"fail.{number}").touch()
        for rank, agent in enumerate((one, two)):
            wait_for_worker(agent, rank, number + 1)
    assert end(job, one, two) == [0, 0]
    assert "the record of the coordinator (the key /elaunch/job/board) is refused" in one.output(
        "stderr"
    )


def test_what_is_not_elaunchs_is_at_the_key_of_the_plan(cluster: Build) -> None:
    """Before the job begins: the key is named, and nobody waits."""
    job = Job(cluster, "etcd", 2)
    assert job.etcd is not None
    job.etcd.put("/elaunch/job/board", "by hand")
    agents = [job.start(number, ["--nnodes=2"]) for number in (1, 2)]
    for agent in agents:
        assert agent.wait(DEADLINE).returncode == 69
        assert "(the key /elaunch/job/board) is refused" in said(agent)[-1]
