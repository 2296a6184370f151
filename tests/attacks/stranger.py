"""A stranger who reaches the port of a job's TCPStore, and speaks its protocol."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elaunch.store.tcp import wire
from elaunch.store.tcp.wire import Connection

DEADLINE = 60.0


class Stranger:
    """Reads and writes the keys of one job's store on this machine."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection = connection
        self._prefix = f"{run_id}/"

    def get(self, key: str) -> bytes:
        """Return the value of a key of the job, empty if it has none."""
        until = time.monotonic() + DEADLINE
        self._connection.send([wire.get(self._prefix + key)], until)
        return self._connection.value(until)

    def put(self, key: str, value: bytes) -> None:
        """Set a key of the job."""
        self._connection.send([wire.put(self._prefix + key, value)], time.monotonic() + DEADLINE)

    def push(self, key: str, *values: bytes) -> None:
        """Put values at the end of a queue of the job."""
        requests = [wire.push(self._prefix + key, value) for value in values]
        self._connection.send(requests, time.monotonic() + DEADLINE)

    def version(self) -> int:
        """Return the newest version of the plan, 0 without one."""
        return int(self.get("head") or 0)

    def is_above(self, version: int) -> bool:
        """Return whether a newer version than that was posted."""
        return self.version() > version

    def plan(self) -> tuple[int, bytes]:
        """Return the newest plan and its version; waits until there is one."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            version = self.version()
            if version and (value := self.get(f"b/{version}")):
                return version, value
            time.sleep(0.02)
        raise TimeoutError("no plan was posted")

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
        """Write a version of the plan."""
        self.put(f"b/{version}", value)
        self.put("head", str(version).encode())


def body(record: bytes) -> dict[str, Any]:
    """Return what a record says, whether it is signed or not."""
    found: dict[str, Any] = json.loads(record[record.index(b"{") :])
    return found


@contextmanager
def stranger(port: int, run_id: str) -> Iterator[Stranger]:
    """Connect to the store at a port of this machine as soon as it is there."""
    until = time.monotonic() + DEADLINE
    while True:
        connection = Connection(socket.socket())
        try:
            connection.open(("127.0.0.1", port), time.monotonic() + 5.0)
            break
        except OSError:
            connection.close()
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)
    try:
        yield Stranger(connection, run_id)
    finally:
        connection.close()
