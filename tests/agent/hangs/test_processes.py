"""What hinders a rank, as its machine shows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch import proc
from elaunch.agent.hangs import processes
from elaunch.agent.hangs.processes import Hindrances, LoaderActivity
from tests import warm
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
    with warm.Popen(argv, os.environ, stdout=subprocess.PIPE) as process:
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

    wait_until(lambda: computed() > 0.5, what="they compute")
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


def test_this_machine_shows_its_processor_time() -> None:
    """Nothing is named of a moment in which nothing was counted."""
    first = processes.hindrances()
    assert first.ticks > 0 and first.stolen <= first.ticks
    assert "stolen" not in first.since(first, os.getpid())


def test_what_is_little_is_not_named() -> None:
    """Steal of 12 %, a limit that held it up for 12 s of 60."""
    before = Hindrances(0.0, 100, 1000, 1.0)
    pid = os.getpid()
    assert Hindrances(60.0, 101, 2000, 1.5).since(before, pid) == ""
    assert Hindrances(60.0, 220, 2000, 13.0).since(before, pid) == (
        "12 % of its node's processor time was stolen by other machines, "
        "its cgroup's CPU limit has held it up for 12 s of 1m 00s"
    )


@pytest.mark.parametrize(
    ("group", "mount", "text"),
    [
        ("4:cpu,cpuacct:/job", "cgroup cgroup rw,cpu,cpuacct", "throttled_time 2500000000"),
        ("0::/job", "cgroup2 cgroup2 rw", "usage_usec 9\nthrottled_usec 2500000"),
    ],
    ids=["v1", "v2"],
)
def test_the_time_of_a_cgroups_limit(tmp_path: Path, group: str, mount: str, text: str) -> None:
    """Version 1 counts nanoseconds, version 2 microseconds."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.stat").write_text(f"nr_periods 4\n{text}\n")
    (tmp_path / "cgroup").write_text(f"{group}\n")
    (tmp_path / "mountinfo").write_text(f"30 25 0:26 / {tmp_path} rw shared:9 - {mount}\n")
    assert processes._throttled(tmp_path) == 2.5
    assert processes._throttled(tmp_path / "none") == 0.0


def test_the_share_that_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that is gone nothing is known."""
    fields = {"VmSwap": "  300 kB", "VmRSS": "  700 kB"}
    monkeypatch.setattr("elaunch.proc.status", lambda pid: fields if pid else {})
    now = processes.hindrances()
    assert now.since(now, 1) == "30 % of its memory is swapped out"
    assert now.since(now, 0) == ""
