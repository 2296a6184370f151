"""Ranks that die in ``ctx.train.steps`` on several nodes: the others keep their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaunch.runs.directory import RunDir
from tests.integration import nodes, test_survivors
from tests.integration.jobs import FORK
from tests.integration.nodes import DEADLINE, Build, over, said
from tests.integration.test_survivors import JOB, SIZE, expected, notes, steps_in
from tests.launching import Launcher, Running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]

DIED = "rank {} on {} was killed by SIGKILL"


class Job(test_survivors.Job):
    """A job of four ranks on several nodes; ``slots`` says how many each has."""

    def __init__(
        self,
        build: Build,
        backend: str,
        slots: Sequence[int],
        *words: str,
        flags: Sequence[str] = (),
        most: str = "",
    ) -> None:
        self.job = nodes.Job(build, backend, len(slots))
        self.beside = self.job.share
        limits = [f"--nnodes={most or len(slots)}", "--max-restarts=200", *flags]
        env = {**test_survivors.ENV, "BESIDE": str(self.beside)}
        self.agents: list[Running] = []
        for number, slot in enumerate(slots, 1):
            here = [*limits, f"--nproc-per-node={slot}"]
            self.agents.append(self.job.start(number, here, words, env=env, script=JOB))
            if number < len(slots):  # node ranks by the order in which they come
                nodes.wait_until_said(self.agents[-1], "waiting: ")

    def history(self, number: int) -> list[dict[str, Any]]:
        """Return the rounds that the record of a node has."""
        found: list[dict[str, Any]] = RunDir(self.state(number)).read_state()["history"]  # type: ignore[assignment]
        return found

    def state(self, number: int) -> Path:
        """Return the run's directory on a node."""
        return self.job.machines[number].state / "elaunch" / "runs" / "job"

    def await_round(self, number: int) -> None:
        """Wait until a round has begun."""
        wait_until(lambda: self.history(1)[-1]["round"] >= number, DEADLINE, f"round {number}")

    def end(self, code: int = 0) -> str:
        """Wait for the end of all agents; return their output."""
        done = [agent.wait(300) for agent in self.agents]
        shown = "".join(one.stdout + one.stderr for one in done)
        assert [one.returncode for one in done] == [code] * len(done), shown
        return "".join(one.stdout for one in done)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[int, str]]:
    """Keep what undisturbed runs came to, by their arguments."""
    return {}


def others(*ranks: int) -> list[int]:
    """Return all ranks but these."""
    return [rank for rank in range(SIZE) if rank not in ranks]


@over("etcd", "c10d")
def test_the_others_go_on_in_their_processes(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]], backend: str
) -> None:
    """A rank of either node is killed: no step is lost or done twice, and no bit differs."""
    wanted = expected(elaunch, undisturbed, "until=80")
    place = f"--checkpoint-dir={elaunch.directory / 'ckpts'}"
    job = Job(cluster, backend, (2, 2), "until=80", "ms=40", "every=auto", flags=[place])
    job.await_step(5)
    for number, rank in enumerate((3, 0), 1):
        pids = job.pids()
        job.kill(rank)
        job.await_newcomer(rank, pids[rank])
        assert [job.pid(other) for other in others(rank)] == [pids[o] for o in others(rank)]
        assert job.history(1)[number]["kept"] == job.history(2)[number]["kept"] == others(rank)
    output = job.end()
    assert job.losses() == wanted
    assert output.count(f"ends after 80 {wanted[80].split()[1]}") == SIZE
    assert [len(job.files(rank)) for rank in range(SIZE)] == [2, 1, 1, 2]
    died = DIED.format(3, "node2")
    for agent in job.agents:
        assert f"{died}; restart 1 of 200 since the last progress, the other workers go on" in (
            "\n".join(said(agent))
        )
    assert f"{died}; ranks 0, 1 stay for the next round" in "\n".join(said(job.agents[0]))


def test_the_only_rank_of_a_node(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]]
) -> None:
    """Others save meanwhile, on fewer nodes; it is the first of all ranks again afterwards."""
    wanted = expected(elaunch, undisturbed, "until=60")
    place = elaunch.directory / "ckpts"
    words = ("until=60", "ms=40", "every=1", "setup=2")
    job = Job(cluster, "etcd", (1, 2, 1), *words, flags=[f"--checkpoint-dir={place}"])
    job.await_step(5)
    pids = job.pids()
    job.kill(0)
    job.await_round(1)
    job.await_step(job.done(1) + 5, (1, 2, 3))
    assert list(place.glob("step-*.r1"))
    job.await_newcomer(0, pids[0])
    assert [job.pid(rank) for rank in (1, 2, 3)] == pids[1:]
    job.end()
    assert job.losses() == wanted
    assert "step-00000060" in elaunch.run(["checkpoints", "ls", place]).stdout
    shown = job.job.machines[1].elaunch(["metrics", "job", "--json"]).wait(DEADLINE).stdout
    assert steps_in(shown) == list(range(1, 61))


def test_the_job_can_end_while_the_only_rank_of_a_node_is_missing(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]]
) -> None:
    """Those that are there save; the next start goes on with all."""
    wanted = expected(elaunch, undisturbed, "until=60")
    place = elaunch.directory / "ckpts"
    flags = [f"--checkpoint-dir={place}", "--shutdown-timeout=5"]
    words = ("until=60", "ms=40", "every=1000")
    job = Job(cluster, "etcd", (1, 2, 1), *words, "setup=300", flags=flags)
    job.await_step(5)
    job.kill(0)
    job.await_round(1)
    job.await_step(job.done(1) + 3, (1, 2, 3))
    job.job.machines[2].elaunch(["preempt", "job"]).wait(DEADLINE)
    job.end(75)
    assert f"step-{job.done(1):08d}" in elaunch.run(["checkpoints", "ls", place]).stdout
    more = [
        "run",
        "--rdzv-id=job",
        "--nproc-per-node=2",
        *FORK,
        f"--checkpoint-dir={place}",
        JOB,
        *words,
    ]
    again = elaunch.run(more, env={**test_survivors.ENV, "BESIDE": str(job.beside)})
    assert again.returncode == 0, again.stderr
    assert job.losses() == wanted


@over("c10d", "etcd")
def test_ranks_of_two_nodes_die_at_once(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]], backend: str
) -> None:
    """In one round, or in two; then the only rank of a node with another one's."""
    wanted = expected(elaunch, undisturbed, "until=80")
    job = Job(cluster, backend, (2, 1, 1), "until=80", "ms=40")
    job.await_step(5)
    for ranks in ((1, 3), (0, 2)):
        pids = job.pids()
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)
        for rank in ranks:
            job.await_newcomer(rank, pids[rank])
        assert [job.pid(other) for other in others(*ranks)] == [pids[o] for o in others(*ranks)]
    job.end()
    assert job.losses() == wanted


def test_a_rank_and_the_agent_that_coordinates(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]]
) -> None:
    """Another agent coordinates; the others go on with the ranks of a smaller job."""
    wanted = expected(elaunch, undisturbed, "until=40")
    flags = [f"--checkpoint-dir={elaunch.directory / 'ckpts'}"]
    words = ("until=40", "ms=40", "every=1")
    job = Job(cluster, "etcd", (1, 1, 2), *words, flags=flags, most="2:3")
    job.await_step(5)
    pids = job.pids()
    os.kill(pids[3], signal.SIGKILL)
    os.kill(job.agents[0].pid, signal.SIGKILL)
    job.agents.pop(0).wait(DEADLINE)
    output = job.end()
    assert output.count(f"ends after 40 {wanted[40].split()[1]}") == 3
    for rank in (1, 2):  # as it was at first: the newcomer has rank 2 now
        *_, (last, _) = notes(job.beside / f"applied-{rank}-{pids[rank]}")
        assert last == 40
    assert job.losses() == wanted


@over("etcd", "c10d")
def test_a_node_is_lost(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]], backend: str
) -> None:
    """Without a word: the ranks of the others go on, and one of these may die afterwards."""
    wanted = expected(elaunch, undisturbed, "until=60")
    job = Job(cluster, backend, (2, 1, 1), "until=60", "ms=40", most="2:3")
    job.await_step(5)
    pids = job.pids()
    job.job.machines.power_off(job.job.machines[3])
    job.agents.pop()
    job.await_round(1)
    job.await_step(job.done(0) + 5, (0, 1, 2))
    assert [job.pid(rank) for rank in (0, 1, 2)] == pids[:3]
    assert job.history(2)[1]["kept"] == [0, 1, 2]
    job.kill(2)
    job.await_newcomer(2, pids[2])
    output = job.end()
    assert output.count(f"ends after 60 {wanted[60].split()[1]}") == 3
    assert [len(job.files(rank)) for rank in range(3)] == [1, 1, 2]
    assert job.losses() == wanted


def test_the_node_of_rank_0_is_lost(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]]
) -> None:
    """All others have other ranks, which the records show; one dies afterwards."""
    wanted = expected(elaunch, undisturbed, "until=90")
    flags = [f"--checkpoint-dir={elaunch.directory / 'ckpts'}"]
    job = Job(cluster, "etcd", (1, 1, 2), "until=90", "ms=40", "every=5", flags=flags, most="2:3")
    job.await_step(5)
    pids = job.pids()
    os.kill(job.agents[0].pid, signal.SIGKILL)
    job.agents.pop(0).wait(DEADLINE)
    wait_until(lambda: job.history(2)[-1]["round"] == 1, DEADLINE, "round 1")
    job.await_step(job.done(1) + 5, (1, 2, 3))
    assert [job.pid(rank) for rank in (1, 2, 3)] == pids[1:]
    assert job.history(3)[1]["kept"] == [0, 1, 2]
    workers = RunDir(job.state(3)).read_state()["workers"]
    assert [(one["rank"], one["pid"]) for one in workers] == [(1, pids[2]), (2, pids[3])]
    job.kill(3)
    wait_until(lambda: job.history(2)[-1]["round"] == 2, DEADLINE, "round 2")
    output = job.end()
    assert output.count(f"ends after 90 {wanted[90].split()[1]}") == 3
    assert job.losses() == wanted


def test_a_script_that_calls_all_ranks_before_begins_anew(cluster: Build) -> None:
    """A newcomer would be alone in that call: all restart on all nodes."""
    job = Job(cluster, "c10d", (2, 2), "until=20", "ms=40", "call")
    job.await_step(5)
    pids = job.pids()
    job.kill(3)
    job.end()
    assert all(job.pid(rank) != pids[rank] for rank in range(SIZE))


def test_a_newcomer_that_cannot_join_has_all_started_anew(
    elaunch: Launcher, cluster: Build, undisturbed: dict[str, dict[int, str]]
) -> None:
    """It ends by itself on one node; the workers that went on on the other are stopped first."""
    wanted = expected(elaunch, undisturbed, "until=30")
    flags = [f"--checkpoint-dir={elaunch.directory / 'ckpts'}"]
    words = ("until=30", "ms=40", "every=1", "setup=1", "fails=1")
    job = Job(cluster, "etcd", (2, 2), *words, flags=flags)
    job.await_step(5)
    pids = job.pids()
    job.kill(3)
    output = job.end()
    assert output.count(f"ends after 30 {wanted[30].split()[1]}") == SIZE
    assert all(job.pid(rank) != pids[rank] for rank in range(SIZE))
    stopped = "all workers are started anew; stopping 2 workers, grace 5 s"
    assert any(stopped in line for line in said(job.agents[0]))


def test_the_last_restart_is_used_up(cluster: Build) -> None:
    """Those that would have stayed are stopped on all nodes."""
    job = Job(cluster, "etcd", (2, 2), "until=1000", "ms=20", flags=["--max-restarts=1"])
    job.await_step(3)
    pids = job.pids()
    job.kill(1)
    job.await_newcomer(1, pids[1])
    job.kill(3)
    job.end(128 + signal.SIGKILL)
