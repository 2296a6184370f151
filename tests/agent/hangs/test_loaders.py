"""How busy the processes of a DataLoader are, read from real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elaunch import proc
from elaunch.agent.hangs.loaders import LoaderActivity
from tests.launching import wait_until

WORKER = """
import signal, sys
from torch.utils.data import DataLoader, Dataset

class Endless(Dataset):
    def __len__(self):
        return 1 << 40
    def __getitem__(self, index):
        while sys.argv[1] == "computes":
            pass
        return index

batches = iter(DataLoader(Endless(), num_workers=2, prefetch_factor=1))
if sys.argv[1] == "waits":
    next(batches)
print("begun", flush=True)
signal.pause()
"""


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield the pid of a process whose DataLoader computes, or waits for it."""
    argv = [sys.executable, "-c", WORKER, request.param]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["computes"], indirect=True)
def test_processes_that_compute(worker: int) -> None:
    """They have processor time without a pause, as far as this machine gives it to them."""
    activity = LoaderActivity()

    def computed() -> float:
        activity.look([worker])
        return activity._computed

    wait_until(lambda: computed() > 2.0, what="they compute")
    found = activity.record(slots=1)
    assert found is not None and found["processes"] == 2
    assert 0.0 < found["busy"] <= 1.0 and found["seconds"] >= activity._computed
    before = found["seconds"]
    activity.look([])  # the worker has ended, and so have they
    again = activity.record(slots=1)
    assert again is not None and again["seconds"] == before


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["waits"], indirect=True)
def test_processes_whose_queue_is_full(worker: int) -> None:
    """Time passes in which they do not compute."""
    activity = LoaderActivity()

    def busy() -> float:
        activity.look([worker])
        found = activity.record(slots=1)
        return 1.0 if found is None else found["busy"]

    wait_until(lambda: busy() < 0.3, what="they wait")


def test_a_worker_without_a_dataloader() -> None:
    """Nothing is said of it, whatever else it has started."""
    activity = LoaderActivity()
    with subprocess.Popen(["sh", "-c", "sleep 60; true"], start_new_session=True) as worker:
        wait_until(lambda: proc.children(worker.pid), what="its child")
        activity.look([worker.pid])
        os.killpg(worker.pid, signal.SIGKILL)
    assert activity.record(slots=1) is None
