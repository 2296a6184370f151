"""``--numa-binding`` binds real workers; the accelerator is made up, and is at a real PCI address.

Torch imports what an installed package names as a back end for a device. The one here lets torch
count two devices; where they are, and which CPUs are near, the kernel says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import SPAWN
from tests.launching import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.executed]

DEVICES = sorted(path.name for path in Path("/sys/bus/pci/devices").glob("*.0"))
BACKEND = """
import sys
import types

import torch


def load():
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.current_accelerator = lambda: torch.device("cpu")
    torch.get_device_module = lambda device: sys.modules[__name__]


def get_device_properties(index):
    domain, bus, device = "{address}".removesuffix(".0").split(":")
    return types.SimpleNamespace(
        pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(device, 16)
    )
"""
SCRIPT = """
import os

with open("/proc/self/status", encoding="ascii") as status:
    cpus = next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list:"))
import torch
print(os.environ["RANK"], cpus, torch.get_num_threads())
"""


@pytest.fixture
def near(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a machine on which torch finds two devices."""
    if not DEVICES:
        pytest.skip("this machine has no PCI device")
    packages = tmp_path / "packages"
    described = packages / "made_up_backend-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Name: made-up-backend\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[torch.backends]\nx = made_up_backend:load\n")
    (packages / "made_up_backend.py").write_text(BACKEND.replace("{address}", DEVICES[0]))
    (tmp_path / "where.py").write_text(SCRIPT)
    return {"PYTHONPATH": str(packages)}


def cores() -> list[str]:
    """Return a CPU of each physical core that this process may use."""
    cpus = Path("/sys/devices/system/cpu")
    paths = {
        cpu: cpus / f"cpu{cpu}/topology/thread_siblings_list" for cpu in os.sched_getaffinity(0)
    }
    first = {path.read_text(): str(cpu) for cpu, path in sorted(paths.items(), reverse=True)}
    return sorted(first.values(), key=int)


@pytest.mark.skipif(len(cores()) < 2, reason="there is one core to bind to")
@pytest.mark.parametrize(
    ("method", "nproc"),
    [((), 1), pytest.param(SPAWN, 2, marks=pytest.mark.trial)],
    ids=["fork", "spawn"],
)
def test_workers_are_bound_before_the_script_runs(
    elaunch: Launcher, near: dict[str, str], tmp_path: Path, method: tuple[str, ...], nproc: int
) -> None:
    """Two devices divide two cores; a worker has as many threads as it has cores."""
    own = cores()[:2]
    flags = [f"--nproc-per-node={nproc}", "--numa-binding=exclusive", *method]
    words = ["taskset", "-c", ",".join(own), sys.executable, "-m", "elaunch", "run", *flags]
    done = elaunch.start_command([*words, tmp_path / "where.py"], env=near).wait()
    assert done.returncode == 0, done.stderr
    rows = sorted(line.split() for line in done.stdout.splitlines())
    assert rows == [[str(rank), own[rank], "1"] for rank in range(nproc)]


@pytest.mark.trial
def test_what_cannot_be_bound_is_said_before_anything_starts(
    elaunch: Launcher, near: dict[str, str], tmp_path: Path
) -> None:
    """More workers than devices; no device at all."""
    flags = ["--numa-binding=node", *SPAWN, tmp_path / "where.py"]
    done = elaunch.run(["run", "--nproc-per-node=3", *flags], env=near)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--numa-binding node: 3 workers need a device each, and torch finds 2" in done.stderr
    done = elaunch.run(["run", *flags])
    assert (done.returncode, done.stdout) == (2, "")
    assert "--numa-binding node: torch finds no accelerator" in done.stderr
