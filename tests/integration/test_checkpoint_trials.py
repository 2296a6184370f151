"""A random rank, agent or node is killed at any moment of saving: nothing torn, nothing lost.

``ELAUNCH_CHECKPOINT_TRIALS=100`` makes a hundred trials. Each one ends bitwise as if nobody had
been killed, and whatever it loaded on the way was what had been saved.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGKILL

import pytest

from tests.integration import checkpointing
from tests.integration.checkpointing import JOBS, Job, Trajectory
from tests.integration.jobs import checkpoint_fault
from tests.launching import Launcher, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.trial, pytest.mark.timeout(600)]

TRIALS = int(os.environ.get("ELAUNCH_CHECKPOINT_TRIALS", "6"))
FIRST = int(os.environ.get("ELAUNCH_CHECKPOINT_FIRST", "0"))
BLOCKING, EVERY, AT = ("save", "store"), 2, 6
VICTIMS = ("rank", "agent", "node", "rank", "agent", "rank")
"""In turn; a node costs as much as two others."""

PART = ("begin", "create", "write", "sync", "place", "manifest", "sync stage")
COMMIT = ("claim", "metadata", "COMMIT", "sync claimed", "publish", "sync root")
RETENTION = ("retire", "delete", "deleted")
SAID = ("ask", "hand over")
"""Rows of ``checkpoint_fault.STEPS``."""

Moment = tuple[str, str, int, str]
"""Mode, who looks for the moment (``worker``, ``agent``), of which rank or node, and the step."""


def moments() -> list[Moment]:
    """Return every step of every mode, in an order that mixes them."""
    found: list[Moment] = []
    for mode in BLOCKING:
        found += [(mode, "worker", 0, step) for step in (*PART, *COMMIT, "fence", *RETENTION)]
        found += [(mode, "worker", 1, step) for step in PART]
    found += [("aside", "worker", rank, step) for rank in (0, 1) for step in SAID]
    found += 2 * [("aside", "agent", 0, step) for step in (*PART, *COMMIT, *RETENTION)]
    random.Random(1).shuffle(found)
    return found


MOMENTS = moments()


@dataclass(frozen=True)
class Trial:
    """What chance has chosen.

    Attributes:
        number: of the trial.
        victim: a rank, an agent, or a node: an agent and all below it.
        which: rank or node that is killed.
        moment: the step at which, or None for a random time.
        after: whether the step's call is made before.
        flush: (aside, agent) the moment is in what the agent does after a worker's death ("die"),
            or after SIGTERM ("term"), before it goes on.
        step: (random time) when rank 0 has made that step,
        delay: and that many seconds have passed.
    """

    number: int
    mode: str
    victim: str
    which: int
    moment: Moment | None
    after: bool
    flush: str
    step: int
    delay: float

    @classmethod
    def drawn(cls, number: int) -> Trial:
        """Return the trial with this number."""
        chance = random.Random(number)
        victim, after = VICTIMS[number % len(VICTIMS)], chance.random() < 0.5
        forced = number % 4 != 3
        moment = MOMENTS[(number - number // 4) % len(MOMENTS)] if forced else None
        mode = moment[0] if moment else chance.choice([*BLOCKING, "aside", "aside"])
        flush = ""
        if moment and moment[1] == "agent" and moment[3] not in RETENTION and victim != "node":
            flush = chance.choice(["", "die", "term", "die", "term"])
        step, delay = chance.randrange(0, 11), chance.uniform(0, 0.02)
        return cls(number, mode, victim, chance.randrange(2), moment, after, flush, step, delay)

    def job(self, elaunch: Launcher) -> Job:
        """Return the job, not yet started."""
        nodes = 2 if self.victim == "node" else 1
        job = Job(elaunch, f"trial{self.number}", self.mode, nodes=nodes, nproc=2 // nodes)
        job.words = ["time=0.01"]
        if self.moment:
            job.fault = self.fault()
        if self.flush:
            job.words = [*job.words, f"{self.flush}=1.{AT}"]
            job.fault["slow"] = 0.05
        return job

    def fault(self) -> dict[str, object]:
        """Return what is to happen."""
        assert self.moment is not None
        _, where, rank, step = self.moment
        fault: dict[str, object] = {"where": where, "rank": rank, "step": step, "after": self.after}
        fault["victims"] = self.victims()
        if step in SAID or step == "fence":
            # Only the first save surely asks: a later one may know that the save before is over.
            fault["nth"] = 1 if step == "ask" else AT // EVERY
        elif step not in RETENTION:
            fault["within"] = f"step-{AT:08d}"
        if step == "sync root":
            fault["since"] = "publish"
        return fault

    def victims(self) -> list[str]:
        """Return whom it hits: with a flush the rank is dead already."""
        which = 0 if self.victim == "agent" else self.which
        return [f"{self.victim} {which}"]


@pytest.fixture(scope="module")
def trajectory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Trajectory]:
    """Return how a job of so many ranks goes if it is left alone."""
    return lambda world: checkpointing.undisturbed(tmp_path_factory, world)


@pytest.mark.parametrize("number", range(FIRST, FIRST + TRIALS))
def test_whoever_is_killed_whenever(
    elaunch: Launcher, trajectory: Callable[[int], Trajectory], number: int
) -> None:
    """See the module's text."""
    trial = Trial.drawn(number)
    print(trial)
    expected = trajectory(2)
    job = trial.job(elaunch)
    agents = [job.start(node) for node in range(job.nodes)]
    if trial.moment is None:
        job.wait_for("trained", trial.step)
        time.sleep(trial.delay)
        checkpoint_fault.kill(trial.victims(), job.directory)
    every = job.drive({-SIGKILL, 143 if trial.flush == "term" else -SIGKILL}, agents)
    starts = [line["at"] for line in job.notes()[0] if checkpointing.begins(line)]
    print(f"started {len(starts)} times\n{checkpointing.told(every)}")
    assert trial.moment is None or job.struck, "the moment has not come"
    job.check_trained(expected)
    lost_memory = trial.mode == "aside" and trial.victim != "rank"
    job.check_nothing_lost(EVERY if lost_memory else 0)
    job.check_clean()


def test_a_save_is_killed_before_each_of_its_calls(elaunch: Launcher) -> None:
    """Plain torch.save to one name leaves nothing to load; elaunch the old one or the new one.

    All calls of all ways to save with as many trials as there are calls, else each seventh.
    """
    stride = 1 if TRIALS >= 100 else 7
    (elaunch.directory / "each").mkdir()
    ways = ["plain", "store", "save", "aside"]
    words = [JOBS / "checkpoint_each.py", elaunch.directory / "each", str(stride), *ways]
    done = elaunch.start_command([sys.executable, *words], env=checkpointing.ENV).wait(400)
    assert done.returncode == 0, done.stderr
    plain, *contracts = [json.loads(line) for line in done.stdout.splitlines()]
    print(plain, *contracts, sep="\n")
    assert plain["steps"]["-1"] > 0
    assert [found["mode"] for found in contracts] == ways[1:]
    for found in contracts:
        assert found["kills"] >= 28 // stride and found["wrong"] == 0, found
        assert set(found["steps"]) == {"2", "3"}, found
        # What retention removes behind the back of a process may be left by its end.
        assert found["left"] == 0 or found["mode"] == "aside", found


@dataclass(frozen=True)
class SlowTrial:
    """Kills on a storage that takes longer for a save than the training for the steps between two.

    Attributes:
        nodes: how many; a node's shards have a copy on the next one.
        rate: bytes a second that the storage takes from each agent; a save has about 40,000.
        kills: for each kill of a rank its number, and the seconds from the first step of its round.
        last: who is killed after that: nobody, an agent, or a node.
    """

    nodes: int
    rate: float
    kills: tuple[tuple[int, float], ...]
    last: str

    @classmethod
    def drawn(cls, number: int) -> SlowTrial:
        """Return the trial with this number."""
        chance = random.Random(5000 + number)
        nodes = 1 + number % 2
        kills = tuple((chance.randrange(2), chance.uniform(0, 2)) for _ in range(5))
        last = chance.choice(["", "agent 0", "node 0"] if nodes == 1 else ["", "node 0", "node 1"])
        return cls(nodes, chance.choice([2e4, 5e4, 2e5]), kills, last)


@pytest.mark.parametrize("number", range(FIRST, FIRST + TRIALS))
def test_kills_while_the_storage_is_slow(
    elaunch: Launcher, trajectory: Callable[[int], Trajectory], number: int
) -> None:
    """What ranks that are killed have saved is never lost, whether it is on the disk or not."""
    trial = SlowTrial.drawn(number)
    print(trial)
    job = Job(
        elaunch, f"slow{number}", "aside", steps=12, nodes=trial.nodes, nproc=2 // trial.nodes
    )
    job.rate, job.words = trial.rate, ["time=0.1"]
    job.flags = ["--max-restarts=20", f"--checkpoint-replicas={trial.nodes - 1}"]
    agents = [job.start(node) for node in range(job.nodes)]
    struck = 0
    for rank, delay in trial.kills:
        _await_round(job, struck)
        time.sleep(delay)
        if job.noted("done"):
            break
        checkpoint_fault.kill([f"rank {rank}"], job.directory)
        struck += 1
    if trial.last:
        _await_round(job, struck)
        if all(note["step"] < 10 for _, note in job.noted("trained")):  # it does not end meanwhile
            checkpoint_fault.kill([trial.last], job.directory)
    job.check_nothing_lost(EVERY if trial.last else 0)
    every = job.drive({-SIGKILL}, agents)
    print(f"{struck} ranks were killed\n{checkpointing.told(every)}")
    job.check_trained(trajectory(2))
    job.check_nothing_lost(EVERY if trial.last else 0)
    job.check_clean()
    lines = [line for agent in every for line in agent.output("stderr").splitlines()]
    assert trial.last or not [line for line in lines if "lost what was in memory" in line]


def _await_round(job: Job, number: int) -> None:
    """Wait until both ranks make steps in a round, or are done."""

    def trains() -> bool:
        notes = job.noted("trained")
        return len({r for r, n in notes if n["round"] >= number}) == 2 or bool(job.noted("done"))

    wait_until(trains, checkpointing.DEADLINE, f"round {number} of {job.name}")
