"""should_preempt() on ranks that are processes: random moments, long C calls, ranks that die."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import warm
from tests.training.preemptrig import LONG, StoreHost

WORKER = Path(__file__).with_name("preemptworker.py")
ROOT = Path(__file__).parent.parent.parent
TRIALS = int(os.environ.get("ELAUNCH_PREEMPT_TRIALS", "5"))


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """The port of a store that outlives its ranks, as torchrun's does."""
    host = StoreHost()
    yield host.port
    host.close()


def line(worker: subprocess.Popen[str]) -> str:
    """Return the next line that a rank says."""
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


@contextmanager
def workers(size: int, store: int, job: str, way: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of a job as torchrun does, and wait until they are ready; end them all."""
    started = []
    try:
        for rank in range(size):
            environ = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store),
                "TORCHELASTIC_RUN_ID": job,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            started.append(
                warm.Popen(
                    [sys.executable, str(WORKER), way], environ, stdout=subprocess.PIPE, text=True
                )
            )
        assert [line(worker) for worker in started] == ["ready"] * size
        yield started
    finally:
        for worker in started:
            worker.kill()
            worker.communicate(timeout=LONG)


def stops_at(size: int, store: int, trial: int) -> None:
    """Run one job, preempt it at a random moment, and look where its ranks end."""
    chance = random.Random(trial)
    way = ("coupled", "free")[trial % 2]
    with workers(size, store, f"{size}-{trial}", way) as started:
        time.sleep(chance.random())
        for rank in chance.sample(range(size), chance.randrange(1, 4)):
            started[rank].send_signal(signal.SIGUSR1)
        said = [line(worker) for worker in started]
        codes = [worker.wait(LONG) for worker in started]
    assert len(set(said)) == 1, said
    call, _, reason = said[0].partition(" ")
    assert int(call) >= 1
    assert reason.startswith("SIGUSR1 to rank ")
    assert codes == [0] * size


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(2))
def test_skewed_processes_stop_at_the_same_call(store: int, trial: int) -> None:
    """Also while main threads are inside of C."""
    stops_at(4, store, trial)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
def test_preemptions_at_random_moments_stop_at_the_same_call(store: int, trial: int) -> None:
    """Eight ranks, of which the last is 350 ms behind the first."""
    stops_at(8, store, trial)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "told"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "is stopped")]
)
def test_a_rank_that_is_gone_is_named(store: int, signum: signal.Signals, told: str) -> None:
    """Whether it was killed or stopped before it heard of the notice."""
    with workers(3, store, f"gone-{signum}", "silent") as started:
        started[2].send_signal(signum)
        # On a busy machine one of its threads may go on for a while.
        os.waitid(os.P_PID, started[2].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        started[1].send_signal(signal.SIGUSR1)
        said = line(started[0])
    assert "rank 2 has not answered the notice to end for 3 s" in said
    assert "rank 2 (host " in said
    assert told in said


@pytest.mark.slow
def test_ranks_that_do_not_ask_are_named_with_their_host_and_process(store: int) -> None:
    """When rank 0 alone asks."""
    with workers(3, store, "silent", "silent") as started:
        started[2].send_signal(signal.SIGUSR1)
        said = line(started[0])
        pids = [worker.pid for worker in started]
    assert "ranks 1, 2 have not called should_preempt(#" in said
    assert f"pid {pids[1]}" in said
    assert f"pid {pids[2]}" in said
