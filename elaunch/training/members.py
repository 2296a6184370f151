"""The records of a job's ranks, and whether all of them fit.

Where the launcher gives the job no key, ranks that one user has on one machine have one in a
memfd of rank 0, which nobody else can open.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from elaunch import proc
from elaunch.errors import PlacementError
from elaunch.hosts import is_loopback

KEY: Final = "elaunch-key"
"""The name of the memfd."""


@dataclass(frozen=True)
class RankRecord:
    """One rank as it stands in the round's store.

    ``machine`` is equal for ranks that share a network namespace, ``space`` for those that see each
    other's processes; ``process`` is its name there (elaunch.proc). ``store`` is the address by
    which it reaches the store. ``key`` is the descriptor with the key of the job, on rank 0 and
    where the launcher gives none; else -1.
    """

    rank: int
    node: int
    local: int
    local_size: int
    host: str
    pid: int
    machine: str
    space: str
    process: str
    addr: str
    store: str
    key: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    def packed(self) -> bytes:
        """Return the record as it is stored."""
        return json.dumps(asdict(self)).encode()

    def state(self, me: RankRecord) -> str:
        """Return the state of the process (proc(5)); "gone", or "" where ``me`` does not see it."""
        if (self.machine, self.space) != (me.machine, me.space) or not self.process:
            return ""
        found = proc.read_process(self.pid)
        if found is None or f"{found.pid}.{found.start}" != self.process or not found.living:
            return "gone"
        return found.state


def read_record(raw: bytes, rank: int) -> RankRecord:
    """Return a stored record; PlacementError for one that is none."""
    try:
        record = RankRecord(**json.loads(raw))
    except (ValueError, TypeError, RecursionError):
        raise PlacementError(f"the record of rank {rank} cannot be read: {raw[:80]!r}") from None
    if record.rank != rank:
        raise PlacementError(f"rank {record.rank} has written the record of rank {rank}")
    return record


def identities() -> tuple[str, str]:
    """Return what is equal for processes of one network namespace, and of one pid namespace."""
    try:
        boot = proc.boot_id()
        net, pids = os.stat("/proc/self/ns/net"), os.stat("/proc/self/ns/pid")
    except OSError:
        return f"host {socket.gethostname()}", ""
    return f"{boot} {net.st_dev}:{net.st_ino}", f"{boot} {pids.st_dev}:{pids.st_ino}"


def in_nodes(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Return the ranks by node, chiefs first; PlacementError where they contradict each other."""
    by_node: dict[int, list[RankRecord]] = {}
    for record in records:
        by_node.setdefault(record.node, []).append(record)
    for node in by_node.values():
        # With --virtual-local-rank all are 0; the order of the ranks is theirs then.
        node.sort(key=lambda one: (one.local, one.rank))
        _check(node)
    nodes = sorted(by_node.values(), key=lambda node: node[0].rank)
    if nodes[0][0].rank != 0:
        raise PlacementError("rank 0 is not the first of its node: its local_rank has to be 0")
    return nodes


def _check(node: list[RankRecord]) -> None:
    first = node[0]
    for one in node:
        if one.local_size != len(node):
            raise PlacementError(
                f"{one} says that {one.local_size} ranks are on its node, cross_rank "
                f"{one.node}, but {len(node)} of the job are"
            )
        if one.machine != first.machine:
            raise PlacementError(
                f"{first} and {one} both say that they are on node {one.node} (cross_rank), "
                "but they are on different machines, or in different network namespaces"
            )


def outer_addr(chief: RankRecord, records: Sequence[RankRecord]) -> str:
    """Return a node's address, as other machines see it where it knows a loopback one only."""
    seen = (one.store for one in records if one.machine != chief.machine)
    return chief.addr if not is_loopback(chief.addr) else next(seen, chief.addr)


def key_of(lead: RankRecord, me: RankRecord) -> bytes | None:
    """Return the key that rank 0 has in its memory, if this machine and user are the same.

    Anybody may have written the record, so the descriptor has to be one that only this module
    makes, in a process of this user.
    """
    if (lead.machine, lead.space) != (me.machine, me.space):
        return None
    path = f"/proc/{lead.pid}/fd/{lead.key}"
    try:
        if proc.user(lead.pid) != os.geteuid() or not os.readlink(path).startswith(
            f"/memfd:{KEY} "
        ):
            return None
        with open(path, "rb") as file:
            return os.pread(file.fileno(), 32, 0) or None
    except (OSError, ValueError):
        return None
