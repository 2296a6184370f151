"""Several nodes are asked to save: one leaves, all leave, one joins; real agents, real workers."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.nodes import DEADLINE, Build, Job, said, wait_until_said
from tests.launching import Running

pytestmark = pytest.mark.slow

ASKS = Path(__file__).with_name("jobs") / "asks.py"


def start(job: Job, number: int, nodes: str, *words: str, more: Sequence[str] = ()) -> Running:
    """Start an agent with two workers that ask should_preempt()."""
    save = [f"--checkpoint-dir={job.share}", "--checkpoint-glob=step_*.json"]
    flags = [f"--nnodes={nodes}", "--nproc-per-node=2", "--max-restarts=0", *save, *more]
    info = {"LOGLEVEL": "INFO"}
    return job.start(number, flags, [str(job.share), *words], script=ASKS, env=info)


def wait_for_steps(agent: Running, rank: int, round: int) -> int:
    """Wait until a rank trains; return the step from which it went on."""
    agent.wait_for_line(rf"^steps rank={rank} round={round} ", DEADLINE)
    found = agent.wait_for_line(rf"^up rank={rank} round={round} pid=\d+ from=(\d+)$", DEADLINE)
    return int(found[1])


def ends(job: Job, round: int) -> dict[int, int]:
    """Return the steps at which the ranks of a round were told, by rank."""
    found = job.share.glob(f"end.{round}.*")
    return {int(path.suffix[1:]): int(path.read_text()) for path in found}


@pytest.mark.parametrize("backend", ["etcd"])
def test_one_node_leaves(cluster: Build, backend: str) -> None:
    """All four ranks save at one step; the other node goes on from there, uncounted."""
    job = Job(cluster, backend, 2)
    job.conf["settle"] = 20
    one, two = (start(job, number, "1:2", "gloo", "skew=0.01") for number in (1, 2))
    for rank, agent in enumerate((one, one, two, two)):
        wait_for_steps(agent, rank, 0)
    two.send_signal(signal.SIGTERM)
    assert two.wait(DEADLINE).returncode == 75
    (step,) = set(ends(job, 0).values())
    assert sorted(ends(job, 0)) == [0, 1, 2, 3]
    assert wait_for_steps(one, 0, 1) == step
    one.send_signal(signal.SIGUSR1)
    assert one.wait(DEADLINE).returncode == 75
    assert "round 1: preempted: SIGUSR1 received; to be continued" in said(one)


@pytest.mark.trial
def test_the_machine_of_one_node_is_taken(cluster: Build) -> None:
    """--notice-command on one of them: its ranks and the others know how long there is."""
    job = Job(cluster, "c10d", 2)
    taken = job.share / "taken"
    command = f"until [ -e {taken} ]; do sleep 0.1; done; echo preempt +90s spot"
    one = start(job, 1, "1:2", "gloo", "left")
    two = start(job, 2, "1:2", "gloo", "left", more=[f"--notice-command={command}"])
    for rank, agent in enumerate((one, one, two, two)):
        wait_for_steps(agent, rank, 0)
    taken.touch()
    assert two.wait(DEADLINE).returncode == 75
    (step,) = set(ends(job, 0).values())
    assert sorted(ends(job, 0)) == [0, 1, 2, 3]
    assert wait_for_steps(one, 0, 1) == step
    for agent in (one, two):
        left = re.findall(r"^left rank=\d (.*)$", agent.output(), re.M)
        assert len(left) == 2 and all(60.0 < float(seconds) <= 85.0 for seconds in left)
    wait_until_said(two, "spot: the workers are asked to save and to end")


@pytest.mark.parametrize("backend", ["c10d"])
def test_all_nodes_are_told_to_leave(cluster: Build, backend: str) -> None:
    """As Slurm does it: SIGTERM to each agent; all end with 75."""
    job = Job(cluster, backend, 2)
    agents = [start(job, number, "2", "gloo") for number in (1, 2)]
    for rank, agent in enumerate((agents[0], agents[0], agents[1], agents[1])):
        wait_for_steps(agent, rank, 0)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [75, 75]
    assert len(set(ends(job, 0).values())) == 1 and len(ends(job, 0)) == 4


@pytest.mark.parametrize("backend", ["etcd"])
def test_one_notice_is_enough(cluster: Build, backend: str) -> None:
    """A signal to either agent ends the whole job, to be continued; it is, from that step."""
    job = Job(cluster, backend, 2)
    agents = [start(job, number, "2", "skew=0.02") for number in (1, 2)]
    for rank, agent in enumerate((agents[0], agents[0], agents[1], agents[1])):
        wait_for_steps(agent, rank, 0)
    agents[1].send_signal(signal.SIGUSR2)
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [75, 75]
    (step,) = set(ends(job, 0).values())
    wait_until_said(agents[0], "SIGUSR2 received: the workers are asked to save")
    agents = [start(job, number, "2", f"steps={step + 3}") for number in (1, 2)]
    assert wait_for_steps(agents[0], 0, 0) == step
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [0, 0]


def test_one_node_restarts_all(cluster: Build) -> None:
    """`elaunch restart` on one; workers that cannot save are stopped, and begin again."""
    job = Job(cluster, "c10d", 2)
    agents = [start(job, number, "2", "deaf") for number in (1, 2)]
    for rank, agent in enumerate((agents[0], agents[0], agents[1], agents[1])):
        wait_for_steps(agent, rank, 0)
    done = job.machines[2].elaunch(["restart", "job", "--reason=new data"]).wait(DEADLINE)
    assert done.returncode == 0, done
    for rank, agent in enumerate((agents[0], agents[0], agents[1], agents[1])):
        wait_for_steps(agent, rank, 1)
    wait_until_said(agents[0], "new data; going on with 2 nodes, 4 workers, from the start")
    for agent in agents:
        agent.send_signal(signal.SIGINT)
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [130, 130]


@pytest.mark.trial
@pytest.mark.parametrize("backend", ["etcd"])
def test_a_node_that_is_done_is_asked(cluster: Build, backend: str) -> None:
    """Its workers have ended with 0; those of the other node save, for the job to be continued."""
    job = Job(cluster, backend, 2)
    agents = [start(job, number, "2", "short=2") for number in (1, 2)]
    wait_for_steps(agents[0], 0, 0)
    wait_until_said(agents[1], "all workers of this node ended with 0; waiting for the other")
    agents[1].send_signal(signal.SIGUSR1)
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [75, 75]
    assert len(set(ends(job, 0).values())) == 1 and set(ends(job, 0)) == {0, 1}
    assert said(agents[1])[-1] == "round 0: preempted: SIGUSR1 received; to be continued"


@pytest.mark.trial
@pytest.mark.parametrize("backend", ["c10d"])
def test_a_spare_is_asked(cluster: Build, backend: str) -> None:
    """The nodes that run save and end; all three are to be continued."""
    job = Job(cluster, backend, 3)
    agents = [start(job, number, "2:2") for number in (1, 2)]
    for rank, agent in enumerate((agents[0], agents[0], agents[1], agents[1])):
        wait_for_steps(agent, rank, 0)
    agents.append(start(job, 3, "2:2"))
    wait_until_said(agents[2], "standing by")
    agents[2].send_signal(signal.SIGUSR1)
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [75, 75, 75]
    assert set(ends(job, 0)) == {0, 1, 2, 3} and len(set(ends(job, 0).values())) == 1


@pytest.mark.parametrize("backend", ["c10d"])
def test_workers_do_not_save_and_a_spare_stands_by(cluster: Build, backend: str) -> None:
    """One end, one code: the spare does not say that the job is to be continued."""
    job = Job(cluster, backend, 3)
    grace = ["--shutdown-timeout=2", "--sibling-grace=1"]
    agents = [start(job, number, "2:2", "deaf", more=grace) for number in (1, 2)]
    for rank, agent in enumerate((agents[0], agents[0], agents[1], agents[1])):
        wait_for_steps(agent, rank, 0)
    agents.append(start(job, 3, "2:2", more=grace))
    wait_until_said(agents[2], "standing by")
    agents[1].send_signal(signal.SIGUSR1)
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [137, 137, 137]


@pytest.mark.parametrize("backend", ["c10d"])
def test_a_node_is_lost_just_before_the_request(cluster: Build, backend: str) -> None:
    """Spot machines go together: the others cannot save, and the job is to be continued."""
    job = Job(cluster, backend, 2)
    grace = ["--shutdown-timeout=1", "--sibling-grace=0.5"]
    agents = [start(job, number, "1:2", more=grace) for number in (1, 2)]
    for rank, agent in enumerate((agents[0], agents[0], agents[1], agents[1])):
        wait_for_steps(agent, rank, 0)
    agents[1].send_signal(signal.SIGKILL)
    agents[0].send_signal(signal.SIGUSR1)
    assert agents[0].wait(DEADLINE).returncode == 75


@pytest.mark.parametrize("backend", ["c10d"])
def test_a_node_joins(cluster: Build, backend: str) -> None:
    """The workers save by themselves, and all go on from that step: nothing is done twice."""
    job = Job(cluster, backend, 2)
    job.conf["settle"] = 0.5
    one = start(job, 1, "1:2", "gloo")
    assert wait_for_steps(one, 0, 0) == 0
    two = start(job, 2, "1:2", "gloo")
    assert wait_for_steps(one, 0, 1) == wait_for_steps(two, 2, 1) == ends(job, 0)[0]
    assert set(ends(job, 0)) == {0, 1} and len(set(ends(job, 0).values())) == 1
    assert not any("stopping" in line for line in said(one))
    for agent in (one, two):
        agent.send_signal(signal.SIGTERM)
    assert [agent.wait(DEADLINE).returncode for agent in (one, two)] == [75, 75]


@pytest.mark.trial
def test_a_node_joins_a_job_that_does_not_listen(cluster: Build) -> None:
    """It is ended for the newcomer as any other."""
    job = Job(cluster, "etcd", 2)
    job.conf["settle"] = 0.5
    one = start(job, 1, "1:2", "deaf")
    wait_for_steps(one, 0, 0)
    two = start(job, 2, "1:2", "deaf")
    wait_for_steps(two, 3, 1)
    one.wait_for_line("stopping 2 workers", stream="stderr")
    for agent in (one, two):
        agent.send_signal(signal.SIGINT)
    assert [agent.wait(DEADLINE).returncode for agent in (one, two)] == [130, 130]
