"""The example of elastic training: resized in mid-epoch, each sample counts once per epoch.

Every rank writes after each step which samples it has trained on. What a round did beyond the
checkpoint that the next one resumed from is undone with the model, and does not count.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from tests.integration.nodes import Build, Job
from tests.launching import TORCHRUN, Launcher, Running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.trial, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic_ddp.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SAMPLES, BATCH, SAVE_EVERY = 1440, 60, 7
EPOCH = SAMPLES // BATCH
DEADLINE = 180.0


@dataclass(frozen=True)
class Step:
    """One step of one rank, as it was written down."""

    round: int
    rank: int
    world: int
    epoch: int
    step: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """The directory that the ranks of all rounds write to."""

    directory: Path

    def steps(self) -> list[Step]:
        """Return all whole lines so far; a rank that was killed may have left part of one."""
        found = []
        for path in self.directory.iterdir():
            round, rank = map(int, path.name.split("."))
            for line in path.read_text().split("\n")[:-1]:
                one = json.loads(line)
                numbers = tuple(one.pop("numbers"))
                found.append(Step(round, rank, numbers=numbers, **one))
        return found

    def last(self) -> Step | None:
        """Return the newest step that all ranks of the newest round have written."""
        steps = self.steps()
        newest = [s for s in steps if s.round == max(s.round for s in steps)]
        counts = Counter(s.step for s in newest)
        whole = [s for s in newest if counts[s.step] == s.world]
        return max(whole, key=lambda s: s.step, default=None)

    def wait_for(self, world: int, more: int = SAVE_EVERY) -> Step:
        """Wait for a step of so many ranks that is in mid-epoch and between two checkpoints.

        Args:
            world: number of ranks.
            more: steps that they must have made before: by default they have saved one.
        """
        found: list[Step] = []

        def look() -> bool:
            last = self.last()
            if last is None or last.world != world:
                return False
            first = min(s.step for s in self.steps() if s.round == last.round)
            middle = 4 <= last.step % EPOCH <= EPOCH - 4 and 2 <= last.step % SAVE_EVERY <= 3
            found[:] = [last]
            return middle and last.step >= first + more

        wait_until(look, DEADLINE, f"steps of {world} ranks; last: {self.last()}")
        return found[0]


def counted(steps: Sequence[Step]) -> tuple[list[Step], dict[int, int]]:
    """Return the steps that were not undone, and how many were in each round."""
    kept: list[Step] = []
    undone = {}
    by_round = defaultdict(list)
    for step in steps:
        by_round[step.round].append(step)
    resumed = sys.maxsize
    for round in sorted(by_round, reverse=True):
        done = by_round[round]
        kept += [s for s in done if s.step <= resumed]
        undone[round] = max(max(s.step for s in done) - resumed, 0)
        resumed = min(resumed, min(s.step for s in done) - 1)
    return kept, undone


def assert_exact(kept: Sequence[Step], epochs: int) -> None:
    """Each sample once in each of the epochs, each step by all ranks and once."""
    for epoch in range(epochs):
        numbers = Counter(n for step in kept if step.epoch == epoch for n in step.numbers)
        assert sorted(numbers) == list(range(SAMPLES)), f"epoch {epoch} has lost samples"
        assert set(numbers.values()) == {1}, f"epoch {epoch} has repeated samples"
    by_step = defaultdict(list)
    for step in kept:
        by_step[step.step].append(step)
    for number in range(1, epochs * EPOCH + 1):
        parts = by_step[number]
        assert sorted(s.rank for s in parts) == list(range(parts[0].world))
        assert sum(len(s.numbers) for s in parts) == BATCH


@pytest.mark.parametrize("backend", ["etcd"])  # c10d would take as long again
def test_resized_in_mid_epoch_by_killing_and_adding_nodes(cluster: Build, backend: str) -> None:
    """4 nodes, 3, 5, 2: each kill comes between two checkpoints; also rank 0's, with etcd."""
    job = Job(cluster, backend, 5)
    job.conf |= {"settle": 4}
    seen = Seen(job.share / "seen")
    seen.directory.mkdir()
    flags = ["--nnodes=2:5", "--max-restarts=0", f"--checkpoint-dir={job.share / 'checkpoints'}"]
    flags += ["--checkpoint-glob=step_*.pt"]
    words = ["--epochs=100000", f"--save-every={SAVE_EVERY}", "--step-seconds=0.15"]
    words += ["--seen", str(seen.directory)]

    def start(number: int) -> Running:
        return job.start(number, flags, words, env=ONE_THREAD, method=(), script=SCRIPT)

    def kill(*numbers: int) -> None:
        for number in numbers:
            os.kill(agents.pop(number).pid, signal.SIGKILL)

    agents = {number: start(number) for number in (1, 2, 3, 4)}
    seen.wait_for(world=4, more=EPOCH)
    kill(1 if backend == "etcd" else 3)
    seen.wait_for(world=3)
    gone = ({1, 2, 3, 4} - set(agents)).pop()
    agents |= {number: start(number) for number in (gone, 5)}
    seen.wait_for(world=5)
    kill(2, 4, 5)
    last = seen.wait_for(world=2)
    goal = last.epoch + 2
    wait_until(lambda: (s := seen.last()) and s.epoch >= goal, DEADLINE, f"epoch {goal}")
    steps = seen.steps()
    for agent in agents.values():
        agent.send_signal(signal.SIGTERM)
    for agent in agents.values():
        agent.wait(DEADLINE)
    kept, undone = counted(steps)
    assert_exact(kept, goal)
    # Where the machine is slow, nodes come one by one, and 4 of them train for a while again.
    worlds = [s.world for s in sorted(kept, key=lambda s: (s.step, s.rank))]
    order = [world for world, _ in groupby(worlds)]
    at = [order.index(world) for world in (3, 5, 2)]
    assert 4 in order[: at[0]] and at == sorted(at), order
    assert sum(lost > 0 for lost in undone.values()) >= 2, undone


def test_trained_to_the_goal_over_launchers_and_sizes(elaunch: Launcher, tmp_path: Path) -> None:
    """Two workers of torchrun are killed, three of elaunch go on; one of theirs is killed too."""
    seen = [Seen(tmp_path / name) for name in ("first", "second")]
    for one in seen:
        one.directory.mkdir()
    directory = f"--checkpoint-dir={tmp_path / 'checkpoints'}"
    words = ["--epochs=13", f"--save-every={SAVE_EVERY}", "--step-seconds=0.02", "--seen"]
    argv = [*TORCHRUN, "--nproc-per-node=2", SCRIPT, directory, *words, seen[0].directory]
    torchrun = elaunch.start_command(argv, env=ONE_THREAD)
    seen[0].wait_for(world=2, more=EPOCH)
    torchrun.send_signal(signal.SIGTERM)
    assert torchrun.wait().returncode != 0
    flags = ["--nproc-per-node=3", "--max-restarts=1", "--rdzv-id=job", directory]
    flags += ["--checkpoint-glob=step_*.pt"]
    script = [SCRIPT, *words, seen[1].directory, "--loader-workers=1"]
    job = elaunch.start(["run", *flags, *script], env=ONE_THREAD)
    seen[1].wait_for(world=3, more=EPOCH)
    workers = json.loads(elaunch.run(["status", "--json", "job"]).stdout)["workers"]
    seen[1].wait_for(world=3)
    os.kill(next(worker["pid"] for worker in workers if worker["rank"] == 1), signal.SIGKILL)
    done = job.wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    first, second = (one.steps() for one in seen)
    after = [Step(s.round + 1, s.rank, s.world, s.epoch, s.step, s.numbers) for s in second]
    kept, undone = counted([*first, *after])
    assert_exact(kept, 13)
    assert max(step.step for step in kept) == 13 * EPOCH
    assert sum(lost > 0 for lost in undone.values()) >= 1, undone
    match = re.search(r"^finished: step 312 test accuracy ([\d.]+)%$", done.stdout, re.MULTILINE)
    assert match and float(match[1]) > 95, done.stdout
