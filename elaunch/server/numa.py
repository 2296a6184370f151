"""``--numa-binding``: the CPUs that each worker may use, near its device.

============  ====================================================================================
node          all CPUs of the NUMA node of the device
socket        those of all NUMA nodes of that node's socket
exclusive     a share of the node's physical cores, which its devices divide among them
core-complex  CPUs of the node that share one last-level cache: each of the node's devices gets
              another of them while there are enough, the largest first
============  ====================================================================================

The device is the one whose index is the worker's local rank. These are torchrun's modes (torch
2.15, ``torch/numa/binding.py``); of a set only those CPUs count that this process may use. A device
without a NUMA node is at node 0. Unlike there, a NUMA node that is not online, or of which no CPU
may be used, is no part of its socket instead of an error, and no program (numactl) is needed.

Torch tells where the devices are (``elaunch.server.devices``), sysfs all else.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from elaunch import env
from elaunch.server import devices

SYSFS = Path("/sys")


class Binding(NamedTuple):
    """The CPUs of one worker, and how many physical cores they are."""

    cpus: frozenset[int]
    cores: int


def bindings(mode: str, nproc: int, interpreter: str) -> tuple[tuple[Binding, ...], str | None]:
    """Return the binding of each local rank, or why there is none as a sentence for the user.

    ``nproc`` is 0 where there are as many workers as devices.
    """
    problem: str | None
    try:
        addresses, problem = devices.addresses_in_fork(interpreter)
        if addresses and len(addresses) < nproc:
            problem = f"{nproc} workers need a device each, and torch finds {len(addresses)}"
        if not problem:
            return plan(mode, addresses, os.sched_getaffinity(0), sysfs=SYSFS, nproc=nproc), None
    except (OSError, ValueError) as error:
        problem = str(error)
    return (), f"--numa-binding {mode}: {problem}; leave it out to start without it"


def bind(binding: Binding) -> None:
    """Bind this process, which has one thread, and what it will start."""
    try:
        os.sched_setaffinity(0, binding.cpus)
    except OSError as error:
        os.write(2, f"elaunch: --numa-binding: {sorted(binding.cpus)}: {error}\n".encode())
        os._exit(1)
    torch = sys.modules.get("torch")
    if torch is not None and env.OMP_NUM_THREADS not in os.environ:
        # It has counted the cores in the server; where it is imported here it counts by itself.
        torch.set_num_threads(min(torch.get_num_threads(), binding.cores))


def plan(
    mode: str, addresses: Sequence[str], allowed: Set[int], *, sysfs: Path, nproc: int = 0
) -> tuple[Binding, ...]:
    """Return the binding for each device, or for the first ``nproc``.

    Args:
        mode: one of the table.
        addresses: PCI addresses of the devices, ``0000:dc:00.0``, by their index.
        allowed: CPUs that may be used.
        sysfs: where it is mounted.

    Raises:
        OSError: sysfs does not say what is needed.
        ValueError: no CPU is left for a device; the end of a sentence.
    """
    topology = _Topology(sysfs, allowed)
    nodes = [topology.node_of_device(address) for address in addresses]
    chosen = []
    for index, node in enumerate(nodes[: nproc or None]):
        cpus = topology.cpus(node)
        if not cpus:
            raise ValueError(f"device {index} is at NUMA node {node}, of which no CPU may be used")
        nth, count = nodes[:index].count(node), nodes.count(node)
        if mode == "socket":
            cpus = topology.cpus_of_socket(node)
        elif mode == "exclusive":
            cpus = _share(topology.cores(cpus), nth, count, node)
        elif mode == "core-complex":
            caches = topology.groups(cpus, topology.sharing_cache)
            caches.sort(key=lambda group: -len(group))  # the lower first among equal ones
            cpus = caches[nth % len(caches)]
        chosen.append(Binding(frozenset(cpus), len(topology.cores(cpus))))
    return tuple(chosen)


def _share(cores: list[set[int]], nth: int, count: int, node: int) -> set[int]:
    """Return the CPUs of one of ``count`` devices; the first ones get the cores that are left."""
    each, left = divmod(len(cores), count)
    if each < 1:
        raise ValueError(f"NUMA node {node} has {len(cores)} physical cores for {count} devices")
    start = nth * each + min(nth, left)
    return set().union(*cores[start : start + each + (nth < left)])


class _Topology:
    """The CPUs of this machine as sysfs shows them; ``allowed`` are those that may be used."""

    def __init__(self, sysfs: Path, allowed: Set[int]) -> None:
        self._pci = sysfs / "bus/pci/devices"
        self._nodes = sysfs / "devices/system/node"
        self._cpus = sysfs / "devices/system/cpu"
        self._allowed = allowed

    def node_of_device(self, address: str) -> int:
        """Return the NUMA node of a device; a machine with one node often says -1."""
        return max(int((self._pci / address / "numa_node").read_text()), 0)

    def cpus(self, node: int) -> set[int]:
        """Return the CPUs of a node that may be used."""
        return _numbers((self._nodes / f"node{node}/cpulist").read_text()) & self._allowed

    def cpus_of_socket(self, node: int) -> set[int]:
        """Return the CPUs of all nodes of the socket that a node is in."""
        found: set[int] = set()
        socket = self._socket(self.cpus(node))
        for other in _numbers((self._nodes / "online").read_text()):
            cpus = self.cpus(other)
            if cpus and self._socket(cpus) == socket:
                found |= cpus
        return found

    def _socket(self, cpus: set[int]) -> int:
        return int((self._cpus / f"cpu{min(cpus)}/topology/physical_package_id").read_text())

    def cores(self, cpus: set[int]) -> list[set[int]]:
        """Return CPUs by the physical core."""
        return self.groups(cpus, self._sharing_core)

    def groups(self, cpus: Iterable[int], sharing: Callable[[int], set[int]]) -> list[set[int]]:
        """Return CPUs in groups that share something, in the order of each group's first CPU."""
        found: defaultdict[int, set[int]] = defaultdict(set)
        for cpu in cpus:
            found[min(sharing(cpu))].add(cpu)
        return [group for _, group in sorted(found.items())]

    def _sharing_core(self, cpu: int) -> set[int]:
        return _numbers((self._cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text())

    def sharing_cache(self, cpu: int) -> set[int]:
        """Return the CPUs that share the last-level cache of one; ValueError where it has none."""
        levels = {}
        for index in (self._cpus / f"cpu{cpu}/cache").glob("index[0-9]*"):
            if (index / "type").read_text().strip() in ("Unified", "Data"):
                levels[int((index / "level").read_text())] = index
        if not levels:
            raise ValueError(f"nothing is known of the caches of CPU {cpu}")
        return _numbers((levels[max(levels)] / "shared_cpu_list").read_text())


def _numbers(text: str) -> set[int]:
    """Return the numbers of ``0-2,4``, as files of sysfs have them."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
