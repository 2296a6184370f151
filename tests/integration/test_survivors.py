"""Ranks that die in ``ctx.train.steps``: the others keep their processes, and no bit changes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import FORK
from tests.launching import Launcher, Running, freeze, thaw, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]

JOB = Path(__file__).parent / "jobs" / "surviving.py"
SIZE = 4
ENV = {"OMP_NUM_THREADS": "1"}


class Job:
    """A job of four ranks; what its processes have noted, and where they are."""

    def __init__(self, elaunch: Launcher, *words: str, flags: tuple[str, ...] = ()) -> None:
        self.elaunch = elaunch
        self.beside = elaunch.directory / "beside"
        self.beside.mkdir(exist_ok=True)
        if "--max-restarts" not in "".join(flags):
            flags = ("--max-restarts=200", *flags)
        command = ["run", f"--nproc-per-node={SIZE}", "--rdzv-id=it", *FORK, *flags, JOB, *words]
        self.running: Running = elaunch.start(command, env={**ENV, "BESIDE": str(self.beside)})

    def status(self) -> dict[str, Any]:
        """Return the record as it is shown."""
        found: dict[str, Any] = json.loads(self.elaunch.run(["status", "it", "--json"]).stdout)
        return found

    def files(self, rank: int) -> list[Path]:
        """Return what the processes of a rank have written, in their order."""
        found = self.beside.glob(f"applied-{rank}-*")
        return sorted(found, key=lambda path: path.stat().st_ctime_ns)

    def pid(self, rank: int) -> int:
        """Return the process of a rank that has applied a step last."""
        written = [path for path in self.files(rank) if path.stat().st_size]
        return int(written[-1].name.rpartition("-")[2])

    def pids(self) -> list[int]:
        """Return them of all ranks."""
        return [self.pid(rank) for rank in range(SIZE)]

    def done(self, rank: int) -> int:
        """Return the last step that any process of a rank has applied."""
        return max((int(step) for path in self.files(rank) for step, _ in notes(path)), default=0)

    def await_step(self, number: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Wait until all of these ranks have applied a step."""
        for rank in ranks:
            wait_until(lambda rank=rank: self.done(rank) >= number, what=f"{rank} at {number}")

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """End a process that has applied a step."""
        os.kill(self.pid(rank), signum)

    def await_newcomer(self, rank: int, pid: int) -> None:
        """Wait until another process of a rank has applied a step."""
        wait_until(lambda: self.pid(rank) != pid, what=f"rank {rank} is back")

    def end(self, code: int = 0) -> str:
        """Wait for the end; return the output."""
        done = self.running.wait(300)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def losses(self) -> dict[int, str]:
        """Return loss and weights after each step; each process has applied each once."""
        found: dict[int, str] = {}
        for rank in range(SIZE):
            for path in self.files(rank):
                steps = list(notes(path))
                numbers = [step for step, _ in steps]
                first = numbers[0] if numbers else 0
                assert numbers == list(range(first, first + len(numbers))), (path.name, numbers)
                for step, what in steps:
                    assert found.setdefault(step, what) == what, (step, path.name)
        return found


def notes(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the whole lines of a file: step, and what it came to."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            step, _, what = line.strip().partition(" ")
            yield int(step), what


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Keep what undisturbed runs came to, by their arguments."""
    return {}


def expected(elaunch: Launcher, known: dict[str, dict[int, str]], *words: str) -> dict[int, str]:
    """Return what one rank alone comes to."""
    key = " ".join(words)
    if key not in known:
        beside = elaunch.directory / "alone"
        beside.mkdir()
        command = ["run", "--nproc-per-node=1", *FORK, JOB, *words]
        done = elaunch.run(command, env={**ENV, "BESIDE": str(beside)})
        assert done.returncode == 0, done.stderr
        (path,) = beside.glob("applied-*")
        known[key] = dict(notes(path))
    return known[key]


def rows(elaunch: Launcher, group: str = "training") -> list[int]:
    """Return the steps of which the run has metrics of a group, in order."""
    return steps_in(elaunch.run(["metrics", "it", "--json"]).stdout, group)


def steps_in(shown: str, group: str = "training") -> list[int]:
    """Return the steps of a group's rows that are shown, in order."""
    found = re.findall(rf'"group": ?"{group}", ?"steps_completed": ?(\d+)', shown)
    return sorted(map(int, found))


@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_go_on_in_their_processes(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]], rank: int
) -> None:
    """A rank is killed: no step is lost or done twice, no metric is missing, and it comes back."""
    wanted = expected(elaunch, undisturbed, "until=60")
    job = Job(elaunch, "until=60", "ms=40")
    job.await_step(5)
    pids = job.pids()
    job.kill(rank)
    job.await_newcomer(rank, pids[rank])
    others = [other for other in range(SIZE) if other != rank]
    assert [job.pid(other) for other in others] == [pids[other] for other in others]
    output = job.end()
    assert job.losses() == wanted
    assert output.count(f"ends after 60 {wanted[60].split()[1]}") == SIZE
    assert all(len(job.files(other)) == 1 for other in others)
    assert rows(elaunch) == list(range(1, 61))
    assert job.status()["history"][1]["kept"] == others


def test_no_metrics_are_lost_with_rank_0(elaunch: Launcher) -> None:
    """Neither those of steps that it could not report any more, nor any of another group."""
    job = Job(elaunch, "until=20", "first=10")
    job.end()
    assert [len(job.files(rank)) for rank in range(SIZE)] == [2, 1, 1, 1]
    assert rows(elaunch) == list(range(1, 21))
    assert rows(elaunch, "validation") == [0, 0, 5, 10, 15, 20]


def test_an_exception_of_one_rank_ends_that_one_alone(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """The script of rank 2 raises."""
    wanted = expected(elaunch, undisturbed, "until=30")
    job = Job(elaunch, "until=30", "ms=20", "raise=4")
    output = job.end()
    assert job.losses() == wanted
    assert output.count("ends after 30") == SIZE
    assert [len(job.files(rank)) for rank in range(SIZE)] == [1, 1, 2, 1]


@pytest.mark.parametrize("every", ["1", "auto"])
def test_ranks_that_are_a_step_behind_catch_up(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]], every: str
) -> None:
    """Rank 0 has the sums of the step in which rank 3 dies; the others compute it among them.

    It may be about to save that step: they do not, since it is past that.
    """
    wanted = expected(elaunch, undisturbed, "until=30")
    place = elaunch.directory / "ckpts"
    words = ("until=30", "ms=20", "torn=6", f"every={every}")
    job = Job(elaunch, *words, flags=(f"--checkpoint-dir={place}",))
    job.end()
    said = "round 1 goes on: step 7 on rank 0, step 6 on ranks 1, 2$"
    job.running.wait_for_line(said, stream="stderr")
    assert job.losses() == wanted
    assert [len(job.files(rank)) for rank in range(SIZE)] == [1, 1, 1, 2]


def test_a_newcomer_waits_where_not_all_know_of_it(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """A rank dies in the step behind which it was to be admitted: only rank 0 has seen it."""
    wanted = expected(elaunch, undisturbed, "until=12")
    job = Job(elaunch, "until=12", "ms=500", "dies=2", "admits", "setup=0.5")
    said = r"round 2 goes on: step \d+ on rank 0, step \d+ on rank 1$"
    job.running.wait_for_line(said, stream="stderr")
    job.end()
    assert job.losses() == wanted
    assert [len(job.files(rank)) for rank in range(SIZE)] == [1, 1, 3, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_several_die_at_once_and_while_they_come_back(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]], workers: int
) -> None:
    """Three of four, so that one computes all; then it while the others come back."""
    wanted = expected(elaunch, undisturbed, "until=60")
    job = Job(elaunch, "until=60", "ms=40", f"workers={workers}", "setup=0.5")
    job.await_step(4)
    pids = job.pids()
    for rank in (0, 2, 3):
        os.kill(pids[rank], signal.SIGKILL)
    job.await_step(job.done(1) + 3, (1,))
    assert job.pid(1) == pids[1]
    job.await_newcomer(0, pids[0])
    os.kill(pids[1], signal.SIGKILL)
    job.end()
    found = job.losses()
    assert {step: found[step] for step in found} == {step: wanted[step] for step in found}
    assert found[60] == wanted[60]


def test_ranks_die_one_soon_after_the_other(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """A second one while the others re-form; and the newcomer, before it was admitted."""
    wanted = expected(elaunch, undisturbed, "until=80")
    job = Job(elaunch, "until=80", "ms=30", "setup=0.3")
    job.await_step(4)
    pids = job.pids()
    for first, second, pause in ((0, 1, 0.0), (2, 3, 0.03), (3, 0, 0.1)):
        now = job.pids()
        os.kill(now[first], signal.SIGKILL)
        time.sleep(pause)
        os.kill(now[second], signal.SIGKILL)
        job.await_newcomer(first, now[first])
        job.await_newcomer(second, now[second])
    assert len({*pids, *job.pids()}) >= SIZE
    job.end()
    assert job.losses() == wanted


@pytest.mark.parametrize("every", ["1", "auto"])
def test_a_rank_dies_while_all_save(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]], every: str
) -> None:
    """Whatever became of the save, later ones are whole, and can be loaded by any world."""
    wanted = expected(elaunch, undisturbed, "until=60")
    place = elaunch.directory / "ckpts"
    job = Job(elaunch, "until=60", "ms=20", f"every={every}", flags=(f"--checkpoint-dir={place}",))
    pids: list[int] = []
    for rank, step in ((3, 4), (0, 20), (1, 36)):
        job.await_step(step)
        pids = job.pids()
        os.kill(pids[rank], signal.SIGKILL)
        job.await_newcomer(rank, pids[rank])
    job.end()
    assert job.losses() == wanted
    assert [len(job.files(rank)) for rank in range(SIZE)] == [2, 2, 1, 2]
    shown = elaunch.run(["checkpoints", "ls", place]).stdout
    assert "step-00000060" in shown


def test_a_frozen_rank_is_replaced_too(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """It does not answer that it goes on; the others do, in one more round."""
    wanted = expected(elaunch, undisturbed, "until=60")
    job = Job(elaunch, "until=60", "ms=40")
    job.await_step(5)
    pids = job.pids()
    freeze(pids[1])
    os.kill(pids[2], signal.SIGKILL)
    job.await_newcomer(1, pids[1])
    assert [job.pid(rank) for rank in (0, 3)] == [pids[0], pids[3]]
    job.end()
    assert job.losses() == wanted


@pytest.mark.trial
def test_an_agent_that_is_held_up_costs_no_process(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """As on a busy machine: the next round begins only 15 s after a death."""
    wanted = expected(elaunch, undisturbed, "until=30")
    job = Job(elaunch, "until=30", "ms=20")
    job.await_step(5)
    pids = job.pids()
    freeze(job.running.pid)
    os.kill(pids[2], signal.SIGKILL)
    time.sleep(15)
    thaw(job.running.pid)
    job.end()
    assert job.losses() == wanted
    assert [len(job.files(rank)) for rank in range(SIZE)] == [1, 1, 2, 1]


def test_the_job_can_end_while_a_rank_is_missing(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """Those that are there save and end; the next start goes on with all."""
    wanted = expected(elaunch, undisturbed, "until=40")
    place = elaunch.directory / "ckpts"
    flags = (f"--checkpoint-dir={place}",)
    job = Job(elaunch, "until=40", "ms=40", "every=1000", "setup=120", flags=flags)
    job.await_step(5)
    pids = job.pids()
    job.kill(2)
    others = (0, 1, 3)
    wait_until(lambda: job.status()["round"] == 1, what="the others go on")
    job.await_step(job.done(0) + 3, others)
    assert elaunch.run(["preempt", "it"]).returncode == 0
    job.end(75)
    assert [job.pid(rank) for rank in others] == [pids[rank] for rank in others]
    saved = job.done(0)
    assert f"step-{saved:08d}" in elaunch.run(["checkpoints", "ls", place]).stdout
    again = Job(elaunch, "until=40", "every=1000", flags=flags)
    again.end()
    assert again.losses() == wanted


def test_no_more_restarts_than_allowed(elaunch: Launcher) -> None:
    """One is used; then the job ends with the second death."""
    job = Job(elaunch, "until=1000", "ms=20", flags=("--max-restarts=1",))
    job.await_step(3)
    pids = job.pids()
    job.kill(1)
    job.await_newcomer(1, pids[1])
    job.kill(3)
    job.end(128 + signal.SIGKILL)


def test_a_script_that_calls_all_ranks_before_begins_anew(elaunch: Launcher) -> None:
    """A newcomer would be alone in that call: so all restart, as where no loop is."""
    job = Job(elaunch, "until=20", "ms=40", "call")
    job.await_step(5)
    pids = job.pids()
    job.kill(1)
    job.end()
    assert all(job.pid(rank) != pids[rank] for rank in range(SIZE))


def test_a_rank_dies_in_the_second_of_two_loops(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """The newcomer is through with the first at once."""
    wanted = expected(elaunch, undisturbed, "until=20", "loops")
    job = Job(elaunch, "until=20", "ms=40", "loops")
    job.await_step(24)
    pids = job.pids()
    job.kill(3)
    job.await_newcomer(3, pids[3])
    job.end()
    assert job.losses() == wanted
    assert [len(job.files(rank)) for rank in range(SIZE)] == [1, 1, 1, 2]


def test_a_rank_dies_in_the_last_step(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """The others wait for it at the loop's end: behind the loop all are there."""
    wanted = expected(elaunch, undisturbed, "until=10")
    job = Job(elaunch, "until=10", "dies=10", "setup=1")
    output = job.end()
    assert output.count("ends after 10") == SIZE
    assert job.losses() == wanted


def test_ranks_die_while_others_are_missing_at_the_loops_end(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """One of those that wait, then rank 0: all are back behind the loop."""
    wanted = expected(elaunch, undisturbed, "until=10")
    place = elaunch.directory / "ckpts"
    words = ("until=10", "dies=10", "setup=2", "every=3")
    job = Job(elaunch, *words, flags=(f"--checkpoint-dir={place}",))
    for number, rank in ((1, 3), (2, 0)):
        job.running.wait_for_line(f"round {number} goes on: step 11 on ranks ", stream="stderr")
        job.kill(rank)
    output = job.end()
    assert output.count("ends after 10") == SIZE
    assert job.losses() == wanted
    assert "step-00000010" in elaunch.run(["checkpoints", "ls", place]).stdout


def test_a_wait_at_the_loops_end_is_no_hang(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """The setup of the rank that is missing takes longer than --hang-timeout."""
    wanted = expected(elaunch, undisturbed, "until=10")
    job = Job(elaunch, "until=10", "dies=10", "setup=8", flags=("--hang-timeout=3",))
    output = job.end()
    assert output.count("ends after 10") == SIZE
    assert job.losses() == wanted
    assert [len(job.files(rank)) for rank in range(SIZE)] == [1, 1, 2, 1]


def test_the_job_can_end_while_ranks_are_missing_at_the_loops_end(elaunch: Launcher) -> None:
    """It is asked to end meanwhile, and all that are there do: their last step is saved."""
    place = elaunch.directory / "ckpts"
    words = ("until=10", "dies=10", "setup=120", "every=1000")
    job = Job(elaunch, *words, flags=(f"--checkpoint-dir={place}",))
    job.running.wait_for_line("round 1 goes on: step 11 on ranks 0, 1, 3", stream="stderr")
    assert elaunch.run(["preempt", "it"]).returncode == 0
    job.end(75)
    assert "step-00000010" in elaunch.run(["checkpoints", "ls", place]).stdout


def test_a_loop_that_is_left_has_no_newcomers(elaunch: Launcher) -> None:
    """They end as well: nobody would ever admit them."""
    job = Job(elaunch, "until=100", "ms=40", "setup=3", "break=20")
    job.await_step(5)
    job.kill(3)
    job.end()
    assert len(job.losses()) == 20


@pytest.mark.trial
@pytest.mark.timeout(3600)
def test_a_hundred_kills_at_random_moments(
    elaunch: Launcher, undisturbed: dict[str, dict[int, str]]
) -> None:
    """No survivor has another process, no step is lost or applied twice, and no bit differs."""
    place = elaunch.directory / "ckpts"
    flags = (f"--checkpoint-dir={place}",)
    job = Job(elaunch, "until=100000", "bad=70.5", "ms=15", "every=auto", flags=flags)
    job.await_step(5)
    chosen = random.Random(1)
    for number in range(100):
        pids, rank = job.pids(), chosen.randrange(SIZE)
        time.sleep(chosen.uniform(0.0, 0.2))
        os.kill(pids[rank], signal.SIGKILL)
        job.await_newcomer(rank, pids[rank])
        others = [other for other in range(SIZE) if other != rank]
        assert [job.pid(o) for o in others] == [pids[o] for o in others], number
    assert elaunch.run(["preempt", "it"]).returncode == 0
    job.end(75)
    found = job.losses()
    assert found == expected(elaunch, undisturbed, f"until={max(found)}", "bad=70.5")
