"""Which CPUs a worker is bound to, on made-up machines; what is bound is in tests/integration."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elaunch.server import numa

TWO_SOCKETS = {
    "online": "0-3",
    "nodes": {0: "0-7,32-39", 1: "8-15,40-47", 2: "16-23,48-55", 3: "24-31,56-63"},
    "threads": 32,
    "socket": 16,
    "cache": 4,
}
"""Two sockets with two nodes each; cores of two threads, n and n + 32; four cores to a cache."""
GPUS = {"0000:07:00.0": 0, "0000:0b:00.0": 0, "0000:48:00.0": 1, "0001:c8:00.0": 3}
MANY = {f"0000:0{number}:01.0": 2 for number in range(5)}
"""Devices of one node, more than it has caches."""


def machine(root: Path, shape: dict, devices: dict[str, int]) -> Path:
    """Write what sysfs shows of a machine; ``threads`` is the distance of a core's two CPUs."""
    half = shape["threads"]
    made: set[str] = set()

    def write(path: str, text: str) -> None:
        file = f"{root}/{path}"  # there are a thousand: paths as text, no look at what is there
        if (folder := os.path.dirname(file)) not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        with open(file, "w") as opened:
            opened.write(f"{text}\n")

    write("devices/system/node/online", shape["online"])
    write("devices/system/node/possible", "0-7")
    for node, cpus in shape["nodes"].items():
        write(f"devices/system/node/node{node}/cpulist", cpus)
    for cpu in range(2 * half):
        core, here = cpu % half, f"devices/system/cpu/cpu{cpu}"
        write(f"{here}/topology/thread_siblings_list", f"{core},{core + half}")
        write(f"{here}/topology/physical_package_id", str(core // shape["socket"]))
        first = core // shape["cache"] * shape["cache"]
        last = first + shape["cache"] - 1
        caches = {0: ("Data", 1, str(core)), 1: ("Instruction", 4, "0-63")}
        caches[3] = ("Unified", 3, f"{first}-{last},{first + half}-{last + half}")
        for index, values in caches.items():
            for name, value in zip(("type", "level", "shared_cpu_list"), values, strict=True):
                write(f"{here}/cache/index{index}/{name}", str(value))
        write(f"{here}/cache/uevent", "")
    for address, node in devices.items():
        write(f"bus/pci/devices/{address}/numa_node", str(node))
    return root


@pytest.fixture(scope="module")
def sysfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what is shown of the machine of two sockets: a thousand files."""
    return machine(tmp_path_factory.mktemp("sys"), TWO_SOCKETS, GPUS | MANY)


def cpus(text: str) -> set[int]:
    """Return the CPUs of a list as sysfs has them."""
    return numa._numbers(text)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", ["0-7,32-39", "0-7,32-39", "8-15,40-47", "24-31,56-63"]),
        ("socket", ["0-15,32-47", "0-15,32-47", "0-15,32-47", "16-31,48-63"]),
        ("exclusive", ["0-3,32-35", "4-7,36-39", "8-15,40-47", "24-31,56-63"]),
        ("core-complex", ["0-3,32-35", "4-7,36-39", "8-11,40-43", "24-27,56-59"]),
    ],
)
def test_the_modes(sysfs: Path, mode: str, expected: list[str]) -> None:
    """Two devices at node 0, one each at nodes 1 and 3, none at node 2."""
    found = numa.plan(mode, list(GPUS), set(range(64)), sysfs=sysfs)
    assert [binding.cpus for binding in found] == [cpus(text) for text in expected]
    assert [2 * binding.cores for binding in found] == [len(binding.cpus) for binding in found]


def test_only_what_this_process_may_use(sysfs: Path) -> None:
    """Cores count with what is left of them, and the cache with most CPUs comes first."""
    allowed = cpus("3-7,36,8-9,20-23,24-31")

    def found(mode: str) -> list[frozenset[int]]:
        return [binding.cpus for binding in numa.plan(mode, list(GPUS), allowed, sysfs=sysfs)]

    assert found("node")[0] == cpus("3-7,36")
    assert found("socket") == [cpus("3-9,36")] * 3 + [cpus("20-31")]
    assert found("exclusive")[:2] == [cpus("3-5,36"), cpus("6-7")]
    assert found("core-complex")[:2] == [cpus("4-7,36"), {3}]


def test_more_devices_than_caches_share_them(sysfs: Path) -> None:
    """In turn; a core is not divided among devices."""
    found = numa.plan("core-complex", list(MANY), set(range(64)), sysfs=sysfs)
    assert [min(binding.cpus) for binding in found] == [16, 20, 16, 20, 16]
    shares = numa.plan("exclusive", list(MANY), set(range(64)), sysfs=sysfs)
    assert [binding.cores for binding in shares] == [2, 2, 2, 1, 1]
    assert set().union(*(binding.cpus for binding in shares)) == cpus("16-23,48-55")
    with pytest.raises(ValueError, match="NUMA node 2 has 4 physical cores for 5 devices"):
        numa.plan("exclusive", list(MANY), cpus("16-19"), sysfs=sysfs)


def test_a_machine_with_one_node(tmp_path: Path) -> None:
    """Its devices say -1."""
    shape = {"online": "0", "nodes": {0: "0-7"}, "threads": 4, "socket": 4, "cache": 4}
    sysfs = machine(tmp_path, shape, {"0000:01:00.0": -1})
    for mode in ("node", "socket", "exclusive", "core-complex"):
        (binding,) = numa.plan(mode, ["0000:01:00.0"], set(range(8)), sysfs=sysfs)
        assert binding == numa.Binding(frozenset(range(8)), 4)


def test_what_cannot_be_bound(sysfs: Path, tmp_path: Path) -> None:
    """A node without a CPU for this process; a device or a node that sysfs does not know."""
    with pytest.raises(ValueError, match="device 2 is at NUMA node 1, of which no CPU may be used"):
        numa.plan("node", list(GPUS), cpus("0-7,16-63") - cpus("40-47"), sysfs=sysfs)
    found = numa.plan("node", list(GPUS), cpus("0-7"), sysfs=sysfs, nproc=2)
    assert [binding.cpus for binding in found] == [cpus("0-7")] * 2  # of no more than the workers'
    with pytest.raises(FileNotFoundError, match="numa_node"):
        numa.plan("node", ["0000:ff:00.0"], set(range(64)), sysfs=sysfs)
    nodes = "devices/system/node"
    shutil.copytree(sysfs / nodes, tmp_path / nodes)
    (tmp_path / nodes / "node3/cpulist").unlink()
    for shown in ("bus", "devices/system/cpu"):
        (tmp_path / shown).symlink_to(sysfs / shown)
    with pytest.raises(FileNotFoundError, match="node3"):
        numa.plan("node", list(GPUS), set(range(64)), sysfs=tmp_path)
