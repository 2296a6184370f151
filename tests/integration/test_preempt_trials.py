"""Preemptions of skewed ranks, at random moments and in random ways: always one step.

``ELAUNCH_PREEMPT_TRIALS=50`` makes fifty of them.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, SIGUSR1

import pytest

from tests.integration.jobs import SPAWN
from tests.launching import Launcher, Running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.trial, pytest.mark.timeout(600)]

SKEWED = Path(__file__).with_name("jobs") / "skewed.py"
TRIALS = int(os.environ.get("ELAUNCH_PREEMPT_TRIALS", "6"))
RANKS, PER_PART = 4, 2
PARTS = -(-TRIALS // PER_PART)
DEADLINE = 120.0


@dataclass(frozen=True)
class Trial:
    """What chance has chosen; the number decides all but what the machine does.

    Attributes:
        number: of the trial, and its run's id.
        way: how the job is asked: the command, a signal, or a rank's own request.
        moment: seconds from when all ranks have asked twice.
        skew: seconds that each rank is slower than the one before it, in each step.
        meet: steps after which the ranks wait for each other; 0: they never do.
    """

    number: int
    way: str
    moment: float
    skew: float
    meet: int

    @classmethod
    def drawn(cls, number: int) -> Trial:
        """Return the trial with this number."""
        chance = random.Random(number)
        way = chance.choice(["command", "SIGTERM", "SIGUSR1", *(f"rank {r}" for r in range(RANKS))])
        # Ranks that never meet run apart, and the last has to come after the first by itself.
        meet = chance.choice([0, 1, 5])
        return cls(number, way, chance.uniform(0, 0.4), 0.05 if meet else 0.004, meet)

    def start(self, elaunch: Launcher) -> Running:
        """Start the job."""
        self.directory(elaunch).mkdir()
        asker = int(self.way[-1]) if self.way.startswith("rank") else -1
        words = [self.directory(elaunch), str(self.skew), str(self.meet), str(asker)]
        flags = [f"--rdzv-id={self.number}", f"--nproc-per-node={RANKS}", *SPAWN]
        return elaunch.start(["run", *flags, SKEWED, *words])

    def ask(self, elaunch: Launcher, running: Running) -> None:
        """Wait for the moment, and ask in this trial's way."""
        directory = self.directory(elaunch)
        wait_until(lambda: len(list(directory.glob("up.*"))) == RANKS, DEADLINE, f"{self} is up")
        time.sleep(self.moment)
        if self.way == "command":
            assert elaunch.run(["preempt", str(self.number)]).returncode == 0
        elif self.way.startswith("rank"):
            (directory / "ask").touch()
        else:
            running.send_signal(SIGTERM if self.way == "SIGTERM" else SIGUSR1)

    def check(self, elaunch: Launcher, running: Running) -> None:
        """See that all ranks were told at one step, and that the run is to be continued."""
        done = running.wait(DEADLINE)
        steps = {path.name: path.read_text() for path in self.directory(elaunch).glob("end.*")}
        assert done.returncode == 75, f"{self} {steps}\n{done.stderr}"
        assert len(steps) == RANKS and len(set(steps.values())) == 1, f"{self} {steps}"

    def directory(self, elaunch: Launcher) -> Path:
        """Return where the ranks write."""
        return elaunch.directory / f"trial{self.number}"


@pytest.mark.parametrize("part", range(PARTS))
def test_skewed_ranks_end_at_one_step(elaunch: Launcher, part: int) -> None:
    """One job at a time is asked; the next one starts meanwhile."""
    trials = [Trial.drawn(part * PER_PART + number) for number in range(PER_PART)]
    before: tuple[Trial, Running] | None = None
    for trial in trials:
        running = trial.start(elaunch)
        if before is not None:
            before[0].check(elaunch, before[1])
        trial.ask(elaunch, running)
        before = trial, running
    assert before is not None
    before[0].check(elaunch, before[1])
    listed = json.loads(elaunch.run(["status", "--json"]).stdout)
    assert [run["state"] for run in listed] == ["PREEMPTED"] * PER_PART
