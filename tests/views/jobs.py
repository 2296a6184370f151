"""Jobs that are played in real stores: members, and a coordinator that posts plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from msgspec import structs

from elaunch.config.rendezvous import RendezvousSettings
from elaunch.rendezvous.plan import Node, NodeStatus, Plan
from elaunch.rendezvous.records import encode, encode_nodes, encode_plan, key_of
from elaunch.store.protocol import Store
from tests.etcdserver import etcd
from tests.launching import wait_until
from tests.store.backends import TcpCluster

TTL = 60.0
"""Seconds: no played agent renews its entry."""


class Meetings(Protocol):
    """A real store in which jobs meet, and how a reader reaches it."""

    settings: RendezvousSettings
    flags: list[str]

    def open(self, run_id: str, key: bytes | None = None) -> Store:
        """Return the store of one more agent of a job."""

    def forget(self, run_id: str) -> None:
        """Remove everything of a job."""

    def close(self) -> None:
        """End the store."""


class _Closing:
    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open; at most once."""


class TcpMeetings(_Closing):
    """A TCPStore on loopback that this process hosts, for the one job ``train-1``."""

    def __init__(self, directory: Path) -> None:
        self._cluster = TcpCluster(directory)
        self._first: Store | None = self._cluster.open("train-1")
        self.settings = RendezvousSettings("c10d", (("127.0.0.1", self._cluster.port),))
        self.flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._cluster.port}"]

    def open(self, run_id: str, key: bytes | None = None) -> Store:
        """Return the host's own store first: only it can lead."""
        store, self._first = self._first, None
        if store is not None and key is not None:
            store = self._cluster.host_anew(run_id, key)
        return store or self._cluster.open(run_id)

    def forget(self, run_id: str) -> None:
        """Never: a TCPStore goes with its job."""
        raise NotImplementedError

    def close(self) -> None:
        """End the store."""
        self._cluster.close()


class EtcdMeetings(_Closing):
    """An etcd of one member."""

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._server = self._stack.enter_context(etcd(directory / "etcd"))
        host, port = self._server.members[0].endpoint
        self.settings = RendezvousSettings("etcd", ((host, port),))
        self.flags = ["--rdzv-backend=etcd", f"--rdzv-endpoint={host}:{port}"]

    def open(self, run_id: str, key: bytes | None = None) -> Store:
        """Connect one more agent."""
        from elaunch.store.etcd import client as backend

        store = backend.connect(self._server.place(), run_id, deadline=60.0)
        self._stack.callback(store.close)
        return store

    def forget(self, run_id: str) -> None:
        """Delete every key."""
        from elaunch.store.etcd import imports

        rpc = imports.load().rpc
        self._server.call("KV", "DeleteRange", rpc.DeleteRangeRequest(key=b"\0", range_end=b"\0"))

    def close(self) -> None:
        """End it."""
        self._stack.close()


BACKENDS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "c10d": TcpMeetings,
    "etcd": EtcdMeetings,
}


def record(number: int, **changes: Any) -> NodeStatus:
    """Return the record of an agent with two workers in round 0."""
    changes = {"slots": 2, "state": "running", "round": 0} | changes
    return NodeStatus(f"node{number}", f"10.0.0.{number}", 40000, **changes)


class PlayedJob:
    """A job of agents that run round 0; the first coordinates. They go with the block."""

    def __init__(
        self, meetings: Meetings, run_id: str, nodes: int = 1, secret: bytes | None = None
    ) -> None:
        self.secret = key_of(secret, run_id)
        self.stores: list[Store] = []
        members = []
        for number in range(1, nodes + 1):
            store, name = meetings.open(run_id, self.secret), f"{number:06x}"
            store.enrol(name, encode(record(number), key_of(secret, run_id), name), TTL)
            self.stores.append(store)
            members.append(Node(name, f"node{number}", f"10.0.0.{number}", 2, "default"))
        assert self.stores[0].await_leadership(members[0].name, 60.0)
        # A TCPStore's readers learn of who comes a moment later than its host.
        wait_until(lambda: len(self.stores[0].members()) == nodes, what="all are members")
        self.version = 0
        self.plan = Plan("maple", coordinator=members[0].name)
        self.post(phase="running", round=0, reason="all nodes are there", nodes=tuple(members))

    def post(self, **changes: Any) -> None:
        """Publish the plan with ``changes``."""
        self.plan = structs.replace(self.plan, **changes)
        self.version += 1
        nodes = encode_nodes(self.plan.nodes)
        value = encode_plan(self.plan, self.secret, self.version, nodes)
        assert self.stores[0].publish(self.version, value, nodes)

    def close(self) -> None:
        """Close the agents' stores, the coordinator's last."""
        while self.stores:
            self.stores.pop().close()

    def __enter__(self) -> PlayedJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
