"""Workers that stay when another one of their node fails: processes that speak the protocol."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import FORK
from tests.integration.watching import agent_lines
from tests.launching import Launcher, Running, freeze, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOB = Path(__file__).parent / "jobs" / "standing.py"


class Job:
    """A job of four workers, and where they are."""

    def __init__(self, elaunch: Launcher, *words: str, flags: tuple[str, ...] = ()) -> None:
        self.elaunch = elaunch
        limits = () if "--max-restarts" in "".join(flags) else ("--max-restarts=9",)
        flags = ("--nproc-per-node=4", "--run-id=stay", *FORK, *limits, *flags)
        self.running: Running = elaunch.start(["run", *flags, JOB, *words])
        self.pids = [self.pid(rank, 0) for rank in range(4)]

    def pid(self, rank: int, number: int, stands: bool = True) -> int:
        """Wait until a worker is in a round, and stands there; return its process."""
        line = rf"^rank {rank} round {number} pid (\d+)"
        if stands:
            self.running.wait_for_line(rf"{line} (stands|with)")
        return int(self.running.wait_for_line(line)[1])

    def kill(self, *ranks: int, signum: int = signal.SIGKILL) -> None:
        """Have workers end so."""
        for rank in ranks:
            os.kill(self.pids[rank], signum)

    def reform(self, number: int, *new: int) -> None:
        """Wait for a round in which those are new, and the others have their processes."""
        pids = [self.pid(rank, number) for rank in range(4)]
        for rank in range(4):
            assert (pids[rank] == self.pids[rank]) == (rank not in new), (rank, pids, self.pids)
        self.pids = pids

    def state(self) -> dict[str, Any]:
        """Return the record."""
        path = self.elaunch.state / "elaunch" / "runs" / "stay" / "state.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def stop(self) -> str:
        """Have all end with 0; return the agent's lines."""
        (self.elaunch.directory / "STOP").touch()
        done = self.running.wait()
        assert done.returncode == 0, done.stderr
        return "\n".join(agent_lines(done.stderr))

    def kept(self) -> list[list[int] | None]:
        """Return which ranks each round has kept."""
        return [each.get("kept") for each in self.state()["history"]]


def alive(pid: int) -> bool:
    """Return whether a process lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_others_keep_their_processes(elaunch: Launcher) -> None:
    """Two deaths one after the other: pids, logs, record, report, the store's port."""
    job = Job(elaunch, flags=("--checkpoint-dir=ck",))
    job.kill(2)
    job.reform(1, 2)
    assert job.running.wait_for_line(r"^rank 2 round 1 .* beside \[(.*)\]")[1] == "0,1,3"
    assert job.running.wait_for_line(r"^rank 0 round 1 .* with (.*)$")[1] == "[0, 1, 3]"
    job.kill(0)
    job.reform(2, 0)
    said = job.stop()
    assert "rank 2 was killed by SIGKILL; ranks 0, 1, 3 stay for the next round" in said
    assert "rank 0 was killed by SIGKILL; ranks 1-3 stay for the next round" in said
    assert "restart 2 of 9 since the last progress, the other workers go on" in said
    record = job.state()
    assert job.kept() == [None, [0, 1, 3], [1, 2, 3]]
    assert [worker["pid"] for worker in record["workers"]] == job.pids
    assert [worker["state"] for worker in record["workers"]] == ["SUCCEEDED"] * 4
    assert record["restarts"]["used"] == 2
    assert record["failure"]["first"]["rank"] == 0 and record["failure"]["round"] == 1
    shown = elaunch.run(["logs", "stay", "--rank", "1", "--round", "2"]).stdout
    assert re.search(r"rank 1 round 2 pid \d+ with", shown) and "round 1" not in shown
    stated = elaunch.run(["status", "stay"]).stdout
    assert "round 2 by ranks 1-3, which go on" in stated
    why = elaunch.run(["why", "stay", "--round", "1"]).stdout
    assert "Round 2 loses no step: ranks 1-3 stay in their processes" in why


def test_two_die_at_once(elaunch: Launcher) -> None:
    """Whether the second is seen before or after the round has begun."""
    job = Job(elaunch)
    job.kill(1, 2)
    wait_until(lambda: job.kept()[-1] == [0, 3], what="the others go on alone")
    job.reform(job.state()["round"], 1, 2)
    job.stop()


def test_only_what_the_dead_one_has_started_is_ended(elaunch: Launcher) -> None:
    """The processes of those that stay go on."""
    job = Job(elaunch, "child")
    lines = (job.running.wait_for_line(rf"^child {k} pid (\d+)") for k in range(4))
    children = [int(line[1]) for line in lines]
    job.kill(2)
    job.reform(1, 2)
    assert [alive(pid) for pid in children] == [True, True, False, True]
    job.stop()


def test_one_that_is_frozen_is_started_anew(elaunch: Launcher) -> None:
    """After ten seconds; those that answer stay."""
    job = Job(elaunch, "late=1")
    freeze(job.pids[1])
    job.kill(2)
    job.running.wait_for_line("rank 1 does not answer as round 1 begins", stream="stderr")
    job.reform(2, 1, 2)
    assert "killing 2 workers; ranks 0, 3 stay for the next round" in job.stop()


def test_a_newcomer_that_is_killed(elaunch: Launcher) -> None:
    """The next one takes its place; one that ends by itself has all started anew."""
    job = Job(elaunch, "late=1", "fails=3")
    job.kill(2)
    job.pids[2] = job.pid(2, 1, stands=False)
    job.kill(2)
    job.reform(2, 2)
    job.kill(2)
    job.running.wait_for_line("rank 2 exited with code 5; stopping the other 3", stream="stderr")
    job.reform(4, 0, 1, 2, 3)
    job.stop()
    assert job.kept() == [None, [0, 1, 3], [0, 1, 3], [0, 1, 3], None]


def test_sigterm_while_they_wait(elaunch: Launcher) -> None:
    """In a backoff: nothing is left, and the code is that of the failure."""
    job = Job(elaunch, "late=1")
    job.kill(2)
    job.pids[2] = job.pid(2, 1, stands=False)
    job.kill(2)
    job.running.wait_for_line("after a backoff of up to 0.5 s", stream="stderr")
    job.running.send_signal(signal.SIGTERM)
    done = job.running.wait()
    assert done.returncode in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
    assert not any(map(alive, job.pids))


def test_the_restarts_are_used_up(elaunch: Launcher) -> None:
    """The last failure ends the job, and those that would have stayed."""
    job = Job(elaunch, flags=("--max-restarts=1",))
    job.kill(2)
    job.reform(1, 2)
    job.kill(0)
    done = job.running.wait()
    assert done.returncode == 128 + signal.SIGKILL
    assert "stopping the other 3 workers, grace 5 s" in done.stderr
    assert job.kept() == [None, [0, 1, 3]]


@pytest.mark.parametrize("word", ["leaves=0", "ends=0"])
def test_one_that_is_elsewhere_has_all_started_anew(elaunch: Launcher, word: str) -> None:
    """The others could not go on without it. Both rounds cost one restart."""
    job = Job(elaunch, word)
    job.kill(2)
    job.reform(2, 0, 1, 2, 3)
    said = job.stop()
    assert "rank 0 has left the loop before round 1 began; killing" in said
    assert job.kept() == [None, [0, 1, 3], None]
    assert job.state()["restarts"]["used"] == 1


def test_a_port_that_was_given_stays(elaunch: Launcher, free_port: int) -> None:
    """No worker of the next round meets the store of the last on it."""
    job = Job(elaunch, flags=(f"--master-port={free_port}",))
    job.kill(3)
    job.reform(1, 3)
    job.stop()
