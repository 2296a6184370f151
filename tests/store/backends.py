"""The backends that tests/store/test_contract.py holds to the contract, by name.

A backend is a cluster: a place where one job's agents meet, with a real store in it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elaunch.store.protocol import Store
from elaunch.store.tcp import client
from tests.store.etcd_backend import EtcdCluster
from tests.store.memory import MemoryHub


class Cluster(Protocol):
    """A place where agents meet.

    ``ttl``: the shortest, in seconds, that entries can have there. ``hand_over``: another agent can
    take the leadership; else the first store that was opened leads or nobody does.
    ``several_jobs``: jobs with other run ids can meet at the same place.
    ``close`` closes every store that was opened.
    """

    ttl: float
    hand_over: bool
    several_jobs: bool

    def open(self, run_id: str = "job") -> Store:
        """Return the store of one more agent of the job ``run_id``."""

    def close(self) -> None:
        """Close every store that is open and what runs for them."""


class MemoryCluster:
    """Agents in one process."""

    ttl, hand_over, several_jobs = 0.4, True, True

    def __init__(self, _: Path) -> None:
        self._hubs: dict[str, MemoryHub] = {}
        self._stores: list[Store] = []

    def open(self, run_id: str = "job") -> Store:
        """Return one more store."""
        self._stores.append(self._hubs.setdefault(run_id, MemoryHub()).store())
        return self._stores[-1]

    def close(self) -> None:
        """Close them all."""
        for store in self._stores:
            store.close()


class TcpCluster:
    """Agents around a TCPStore on loopback; the first one that opens hosts it."""

    ttl, hand_over, several_jobs = 0.6, False, False

    def __init__(self, _: Path) -> None:
        self._stores: list[Store] = []
        self.port = 0

    def open(self, run_id: str = "job") -> Store:
        """Host the store, or connect to it."""
        if self._stores:
            store = client.connect("127.0.0.1", self.port, run_id, deadline=60.0, timeout=20.0)
        else:
            listening = socket.create_server(("127.0.0.1", 0))
            self.port = listening.getsockname()[1]
            store = client.host(listening, run_id)
        self._stores.append(store)
        return store

    def host_anew(self, run_id: str, key: bytes) -> Store:
        """Host the store at the same port, for those who know ``key``."""
        self.close()
        listening = socket.create_server(("127.0.0.1", self.port))
        self._stores = [client.host(listening, run_id, key=key)]
        return self._stores[0]

    def close(self) -> None:
        """Close them all, the host last."""
        for store in reversed(self._stores):
            store.close()


BACKENDS: dict[str, Callable[[Path], Cluster]] = {
    "etcd": EtcdCluster,
    "memory": MemoryCluster,
    "tcp": TcpCluster,
}
