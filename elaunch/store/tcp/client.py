"""The store that one agent hosts (``--rdzv-backend c10d``).

=================  ===============================================================================
``host``           the agent at the endpoint: serves it on a socket that it has bound, holds all
                   of it in its memory (elaunch.store.tcp.host), and alone can lead
``connect``        every other agent, and readers; waits for the host to be there
``identify``       asks what is at an address
=================  ===============================================================================

The store is kept nowhere else and ends with its host, and so does the coordinator. Calls then raise
StoreUnreachable with ``nobody_decides``.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from elaunch.errors import StoreClosed, StoreDenied, StoreUnreachable
from elaunch.store.tcp.agentconnection import AgentConnection, prove
from elaunch.store.tcp.connection import Address, StoreTarget, handshake, resolve, tcpstore_name
from elaunch.store.tcp.host import HostedJob
from elaunch.store.tcp.messages import PROTOCOL
from elaunch.store.tcp.server import TcpServer
from elaunch.store.tcp.store import TcpStore
from elaunch.store.tcp.wire import Connection, ForeignAnswer

CALL_TIMEOUT = 2.0
"""Seconds for an answer; a host that is alive answers in milliseconds, a lossy network in one."""
PAUSES = (0.1, 1.0)
"""Seconds between two attempts to connect, growing from the one to the other."""
SHORTEST = 0.5
"""Seconds that even the last attempt has, so that it reports what is there and not "no answer"."""
FOREIGN_PATIENCE = 5.0
"""Seconds for which another job's store, or something else on the port, may be about to end."""


def host(
    listening: socket.socket, run_id: str, *, shared: bytes = b"", key: bytes | None = None
) -> TcpStore:
    """Host the store of the job ``run_id`` on a bound socket, which is owned from now on.

    ``shared`` is what Store.shared is from the first moment, ``key`` what its clients must know to
    use anything else; None: nothing. Raises StoreUnreachable where no
    descriptor is left.
    """
    name = tcpstore_name(*listening.getsockname()[:2])
    identity = {"elaunch": PROTOCOL, "run_id": run_id, "boot": secrets.token_hex(4)}
    job = HostedJob(shared)
    try:
        return TcpStore(name, job, TcpServer(listening, job, identity, key))
    except OSError as error:
        listening.close()
        raise StoreUnreachable(f"the {name} cannot be hosted here: {error}") from None


def connect(
    host: str,
    port: int,
    run_id: str,
    *,
    deadline: float,
    timeout: float = CALL_TIMEOUT,
    stop: threading.Event | None = None,
    moved: Callable[[], bool] | None = None,
    key: bytes | None = None,
) -> TcpStore:
    """Connect to the store of the job ``run_id``, which another agent hosts or is about to.

    ``host`` is resolved anew at each attempt. Raises StoreUnreachable after ``deadline`` seconds,
    or sooner if something else is there to stay, and names what was tried; StoreClosed when
    ``stop`` is set meanwhile. ``timeout``: seconds for each call later. ``moved`` is called when
    nothing listens there any more: whether the store is hosted at another address now. ``key`` is
    what the agents share as a secret; without it, of a store whose host has one only what is shared
    can be read, and StoreDenied is raised for anything else, or for another key.
    """
    began, name = time.monotonic(), tcpstore_name(host, port)
    stopped = threading.Event() if stop is None else stop
    pause, attempts, foreign_since = PAUSES[0], 0, math.inf
    while not stopped.is_set():
        attempts += 1
        now = time.monotonic()
        until = max(now + SHORTEST, min(now + CALL_TIMEOUT, began + deadline))
        try:
            target, connection, challenge = _connect_once(host, port, run_id, until)
            proved = _proved(connection, name, challenge, key, until)
            return TcpStore(name, AgentConnection(target, timeout, connection, moved, key, proved))
        except _MissError as miss:
            now = time.monotonic()
            foreign_since = min(foreign_since, now) if miss.foreign else math.inf
            if now + pause >= min(began + deadline, foreign_since + FOREIGN_PATIENCE):
                tried = (
                    f"{attempts} attempts in {now - began:.3g} s" if attempts > 1 else "tried once"
                )
                raise StoreUnreachable(f"cannot reach the {name}: {miss} ({tried})") from None
        stopped.wait(pause)
        pause = min(PAUSES[1], pause * 1.5)
    raise StoreClosed(f"stopped while connecting to the {name}")


def identify(host: str, port: int, deadline: float) -> dict[str, Any] | None:
    """Return the identity of the store at an address; None: a TCPStore, but not elaunch's.

    Asks once, for ``deadline`` seconds at most. Raises StoreUnreachable.
    """
    try:
        _, connection, identity = _handshake(host, port, time.monotonic() + deadline)
    except _MissError as miss:
        raise StoreUnreachable(f"cannot reach the {tcpstore_name(host, port)}: {miss}") from None
    connection.close()
    return identity


class _MissError(Exception):
    """Why an attempt to connect failed; ``foreign``: something else is there."""

    def __init__(self, what: str, foreign: bool = False) -> None:
        super().__init__(what)
        self.foreign = foreign


def _connect_once(
    host: str, port: int, run_id: str, until: float
) -> tuple[StoreTarget, Connection, str | None]:
    """Connect and make sure that it is this job's store; raises _MissError."""
    address, connection, identity = _handshake(host, port, until)
    if identity is None:
        problem = "a TCPStore that no elaunch agent hosts is there"
    elif identity["run_id"] != run_id:
        problem = f"it belongs to the job {identity['run_id']!r}, not to {run_id!r}"
    elif identity["elaunch"] != PROTOCOL:
        problem = "another version of elaunch hosts it; all nodes need the same"
    else:
        target = StoreTarget(tcpstore_name(host, port), address, run_id, identity["boot"])
        return target, connection, identity.get("challenge")
    connection.close()
    raise _MissError(problem, foreign=True)


def _proved(
    connection: Connection, name: str, challenge: str | None, key: bytes | None, until: float
) -> bool:
    """Prove that we know the secret; raises _MissError where nothing answers."""
    try:
        return prove(connection, name, challenge, key, until)
    except (OSError, ForeignAnswer) as error:
        connection.close()
        raise _MissError(str(error)) from None
    except StoreDenied:
        connection.close()
        raise


def _handshake(
    host: str, port: int, until: float
) -> tuple[Address, Connection, dict[str, Any] | None]:
    """Return the first address of ``host`` where a TCPStore answers, and its identity."""
    try:
        addresses = resolve(host, port, until)
    except OSError as error:
        raise _MissError(f"{host} cannot be resolved: {error}") from None
    misses: dict[str, list[str]] = {}
    foreign = False
    for index, address in enumerate(addresses):
        left = (until - time.monotonic()) / (len(addresses) - index)
        try:
            by = time.monotonic() + min(CALL_TIMEOUT, left)
            return (address, *handshake(address, by, hold=lambda _: None))
        except ForeignAnswer as error:
            foreign = True
            what = str(error)
        except TimeoutError as error:
            what = str(error)
        except OSError as error:
            what = (error.strerror or str(error)).lower()
        misses.setdefault(what, []).append(str(address[1][0]))
    text = "; ".join(f"{what} ({', '.join(where)})" for what, where in misses.items())
    raise _MissError(text, foreign)
