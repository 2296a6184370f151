"""The etcd backend of the contract: each test gets a real etcd of one member for itself."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from elaunch.store.etcd import client
from elaunch.store.protocol import Store
from tests import etcdserver


class EtcdCluster:
    """Agents around one etcd on a loopback address of its own."""

    # etcd's leases last whole seconds.
    ttl, hand_over, several_jobs = 1.0, True, True

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._server = self._stack.enter_context(etcdserver.etcd(directory / "etcd"))

    def open(self, run_id: str = "job") -> Store:
        """Connect one more agent."""
        # Many tests make a machine slow; what becomes of a call that takes long is tested apart.
        place = self._server.place(call_timeout=10.0)
        store = client.connect(place, run_id, deadline=60.0)
        self._stack.callback(store.close)
        return store

    def close(self) -> None:
        """Close every store, then end etcd."""
        self._stack.close()
