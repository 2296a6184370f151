"""Where a store is, and whose: addresses, and the identity that is read from one.

The store's identity stands under the key ``elaunch``, outside of every job, as JSON::

    {"elaunch": 3, "run_id": "job", "boot": "9f86d081"}

``elaunch`` is the version of what its agents speak with it (elaunch.store.tcp.messages); ``boot`` a
random id of the process that hosts it. ``store`` beside them is the port of the same machine where
the agents' store is instead: any process may have written it, so it names no other machine.
A ``challenge`` is there where the agents share a secret, which a client then proves that it knows.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from elaunch.store.tcp import wire
from elaunch.store.tcp.wire import Connection, ForeignAnswer
from elaunch.text import host_port

LONGEST_NAME = 1_000
IDENTITY = "elaunch"

Address = tuple[int, tuple[Any, ...]]
"""An address family and what ``socket.connect`` takes."""


class StoreTarget(NamedTuple):
    """Where a job's store is: what the user called it, the address that answered, whose it is."""

    name: str
    address: Address
    run_id: str
    boot: str


def tcpstore_name(host: str, port: int) -> str:
    """Return "TCPStore at h:29400", with brackets around an IPv6 address."""
    return f"TCPStore at {host_port(host, port)}"


_resolved: dict[tuple[str, int], list[Address]] = {}


def resolve(host: str, port: int, until: float) -> list[Address]:
    """Return the addresses of ``host``; OSError if it has none or none is found in time.

    A name that was resolved before keeps its addresses while the name service fails: an agent that
    was cut off from its network comes back without it.
    """
    before = _resolved.get((host, port))
    try:
        now = time.monotonic()
        found = _resolve(host, port, until if before is None else now + (until - now) / 2)
    except OSError:
        if before is None:
            raise
        return before
    _resolved[host, port] = found
    return found


def _resolve(host: str, port: int, until: float) -> list[Address]:
    try:
        return _look_up(host, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        answers: queue.SimpleQueue[list[Address] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_look_up(host, port))
        except UnicodeError:
            answers.put(OSError(f"{host!r} is no host name"))
        except OSError as error:
            answers.put(OSError(error.strerror or str(error)))

    # A thread, because a resolver that does not answer has deadlines of its own.
    try:
        threading.Thread(target=ask, name="elaunch-resolve", daemon=True).start()
    except RuntimeError:  # no thread can be had
        ask()
    try:
        answer = answers.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        raise OSError("the name service does not answer") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _look_up(host: str, port: int, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def handshake(
    address: Address, until: float, hold: Callable[[Connection], None]
) -> tuple[Connection, dict[str, Any] | None]:
    """Connect and return the store's identity; None: a TCPStore without one.

    ``hold`` is given the connection before it blocks, to have it cut. Raises OSError and
    ForeignAnswer.
    """
    family, where = address
    connection = Connection(socket.socket(family, socket.SOCK_STREAM))
    try:
        hold(connection)
        connection.open(where, until)
        return connection, _read_identity(connection.ask(wire.get(IDENTITY), until))
    except (OSError, ForeignAnswer):
        connection.close()
        raise


def _read_identity(raw: bytes) -> dict[str, Any] | None:
    if not raw:
        return None
    try:
        identity = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(identity, dict) or type(identity.get("elaunch")) is not int:
        return None
    named = all(_is_line(identity.get(name)) for name in ("run_id", "boot"))
    named = named and ("store" not in identity or _is_port(identity["store"]))
    named = named and ("challenge" not in identity or _is_line(identity["challenge"]))
    return identity if named else None


def _is_line(value: object) -> bool:
    """Return whether it is one printable line that can be sent; any process may have written it."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value < 65536
