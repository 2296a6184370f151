"""A job on the machines of a cluster: start its agents, see its rounds, end it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cluster import Cluster, Word
from tests.etcdnodes import Etcd
from tests.integration.jobs import FORK
from tests.integration.watching import agent_lines
from tests.launching import Running, wait_until

STEPS = Path(__file__).with_name("jobs") / "steps.py"
DEADLINE = 90.0
"""Seconds for what takes a few: the machine may be busy. A worker that waits does for longer."""

LOST = "(was lost: no heartbeat for 3 s|is gone: it has left, or was lost with the coordinator)"
"""How a node that was killed is told of; the second by who has taken over from it."""

Build = Callable[[int], Cluster]


def over(backend: str, *others: str) -> pytest.MarkDecorator:
    """Run a test of nodes over one store, and over the others among the trials.

    All stores pass the same contract suite (tests/store/test_contract.py); what a node does over
    them is the same. The tests take one or the other in turns.
    """
    trials = [pytest.param(other, marks=pytest.mark.trial) for other in others]
    return pytest.mark.parametrize("backend", [backend, *trials])


class Job:
    """A job and where it meets: at node 1, or through etcd on nodes behind those of the job.

    Args:
        build: makes the machines.
        backend: etcd, c10d or static.
        count: nodes for agents.
        members: of etcd.
        options: of each of them.

    ``conf`` is --rdzv-conf. Where MAX nodes come they begin at once; the long ``settle`` is for a
    busy machine, where the second agent of ``--nnodes 1:2`` may need its time.
    """

    def __init__(
        self,
        build: Build,
        backend: str,
        count: int,
        members: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        self.backend = backend
        self.machines = build(count + (members if backend == "etcd" else 0))
        self.share = self.machines.directory / "share"
        self.share.mkdir()
        self.conf: dict[str, object] = {"settle": 20}
        self.etcd: Etcd | None = None
        endpoint = "node1:29400"
        if backend == "etcd":
            self.etcd = Etcd(self.machines.nodes[count:], options)
            endpoint = self.etcd.endpoint
        self.meeting = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}"]
        if backend == "static":
            self.meeting = ["--master-addr=node1"]

    def start(
        self,
        number: int,
        flags: Sequence[Word],
        words: Sequence[Word] = (),
        *,
        env: Mapping[str, str] | None = None,
        clock: str | None = None,
        method: Sequence[str] = FORK,
        script: Path = STEPS,
    ) -> Running:
        """Start the agent of node ``number``; ``words`` are for the script, STEPS by default."""
        conf = ",".join(f"{key}={value}" for key, value in self.conf.items())
        rank = [f"--node-rank={number - 1}"] if self.backend == "static" else []
        options = ["run", "--rdzv-id=job", *self.meeting, *rank, f"--rdzv-conf={conf}", *method]
        argv: list[Word] = [*options, *flags, script]
        argv += [*([self.share] if script is STEPS else []), *words]
        return self.machines[number].elaunch(argv, env, clock=clock)

    def stop(self) -> None:
        """Let all workers end with 0."""
        (self.share / "stop").touch()

    def at(self, what: str, round: int, rank: int) -> float:
        """Return when a worker ``began``, or was last ``seen``, in seconds of the wall clock."""
        return float((self.share / f"{what}.{round}.{rank}").read_text())

    def goes_on(self, round: int | str, rank: int, seconds: float = 0.0) -> None:
        """Wait until a worker has done a step that long after now; ``*``: of any round."""
        until = time.time() + seconds

        def look() -> bool:
            seen = self.share.glob(f"seen.{round}.{rank}")
            return any(float(path.read_text()) > until for path in seen)

        wait_until(look, seconds + DEADLINE, f"steps of rank {rank} in round {round}")

    def pair(
        self,
        flags: Sequence[Word],
        words: Sequence[Word] = (),
        env: Mapping[str, str] | None = None,
    ) -> list[Running]:
        """Start the agents of nodes 1 and 2, wait until both train; return them by rank."""
        agents = [self.start(number, flags, words, env=env) for number in (1, 2)]
        for rank, agent in enumerate(agents):
            wait_for_worker(agent, rank, 0)
        return agents


def wait_for_worker(running: Running, rank: int, round: int) -> int:
    """Wait for the first step of a worker in a round; return its pid."""
    running.wait_for_line(rf"^step \d+ rank {rank} world \d+ round {round}$", DEADLINE)
    return int(running.wait_for_line(rf"^up rank={rank} round={round} pid=(\d+)$", DEADLINE)[1])


def rounds(running: Running) -> list[tuple[int, int]]:
    """Return round and world size of the rounds that this agent's workers made steps in."""
    found = re.findall(r"^step \d+ rank \d+ world (\d+) round (\d+)$", running.output(), re.M)
    return sorted({(int(number), int(world)) for world, number in found})


def said(running: Running) -> list[str]:
    """Return the agent's own lines so far, without their times."""
    return agent_lines(running.output("stderr"))


def complaints(running: Running) -> list[str]:
    """Return the agent's own lines so far; that it waits, as on a busy machine, is no complaint.

    Nor is that its store is open, as it is without --rdzv-secret-file.
    """
    usual = ("waiting", "the store of this job's agents is open")
    return [line for line in said(running) if not line.startswith(usual)]


def wait_until_said(running: Running, pattern: str) -> re.Match[str]:
    """Wait for a line of the agent."""
    return running.wait_for_line(pattern, DEADLINE, "stderr")


def first_failures(running: Running) -> list[str]:
    """Return the failures of the job that an agent has told: who, and how it ended."""
    pattern = r"^rank (\d+) \(local_rank \d+, pid (\d+)\) on host (\S+) ([^,]*),"
    return [" ".join(found) for found in re.findall(pattern, running.output("stderr"), re.M)]


def end(job: Job, *agents: Running) -> list[int]:
    """Let the job end, and return the exit codes of its agents."""
    job.stop()
    return [agent.wait(DEADLINE).returncode for agent in agents]
