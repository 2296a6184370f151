"""A stranger who reaches the store of a job, and reads it; in an etcd it writes there, too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from elaunch.store.etcd import client as etcd
from elaunch.store.protocol import Store
from elaunch.store.tcp import client as tcp
from tests import etcdserver

DEADLINE = 60.0


class Stranger:
    """Reads and writes what one job's store has; ``server`` is the etcd that it is in."""

    def __init__(self, store: Store, run_id: str, server: etcdserver.Cluster | None = None) -> None:
        self.store = store
        self._server = server
        self._run_id = run_id

    def plan(self) -> tuple[int, bytes]:
        """Return the newest plan and its version; waits until there is one."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            post = self.store.latest()
            if post is not None and post.value:
                return post.version, post.value
            time.sleep(0.02)
        raise TimeoutError("no plan was posted")

    def is_above(self, version: int) -> bool:
        """Return whether a newer version than that was posted."""
        post = self.store.latest()
        return post is not None and post.version > version

    def await_plan(self, **wanted: Any) -> tuple[int, dict[str, Any]]:
        """Wait for a plan with these fields; return it, unsigned, and its version."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            version, value = self.plan()
            plan = body(value)
            if all(plan.get(name) == value for name, value in wanted.items()):
                return version, plan
            time.sleep(0.02)
        raise TimeoutError(f"no plan has {wanted}: {plan}")

    def post(self, version: int, value: bytes) -> None:
        """Write a version of the plan, into etcd."""
        self.put("plan", b"%d\n" % version + value)

    def put(self, key: str, value: bytes) -> None:
        """Set a key of the job in etcd: "plan" or "shared"."""
        from elaunch.store.etcd import imports
        from elaunch.store.etcd.cluster import keys_of

        assert self._server is not None, "a hosted store has no keys"
        where: bytes = getattr(keys_of("/elaunch", self._run_id), key)
        put = imports.load().rpc.PutRequest(key=where, value=value)
        self._server.call("KV", "Put", put)


def body(record: bytes) -> dict[str, Any]:
    """Return what a record says, whether it is signed or not."""
    found: dict[str, Any] = json.loads(record[record.index(b"{") :])
    return found


@contextmanager
def stranger(port: int, run_id: str) -> Iterator[Stranger]:
    """Connect to the hosted store at a port of this machine as soon as it is there."""
    with closing(tcp.connect("127.0.0.1", port, run_id, deadline=DEADLINE)) as store:
        yield Stranger(store, run_id)


@contextmanager
def stranger_in_etcd(server: etcdserver.Cluster, run_id: str) -> Iterator[Stranger]:
    """Connect to a job's part of an etcd."""
    with closing(etcd.connect(server.place(), run_id, deadline=DEADLINE)) as store:
        yield Stranger(store, run_id, server)
