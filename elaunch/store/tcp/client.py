"""The store in a TCPStore that one agent hosts (``--rdzv-backend c10d``).

=================  ===============================================================================
``host``           the agent at the endpoint: serves one on a socket that it has bound, keeps the
                   members (elaunch.store.tcp.host), and alone can lead. It is elaunch's own
                   (elaunch.store.tcp.server); in a job of more than OWN_AGENTS it is torch's
``connect``        every other agent, and readers; waits for the host to be there
``identify``       asks what is at an address
=================  ===============================================================================

The store is kept nowhere else and ends with its host, and so does the coordinator. Calls then raise
StoreUnreachable with ``nobody_decides``.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from elaunch.errors import StoreClosed, StoreUnreachable
from elaunch.store.protocol import Store
from elaunch.store.tcp import wire
from elaunch.store.tcp.connection import (
    IDENTITY,
    Address,
    StoreTarget,
    handshake,
    resolve,
    tcpstore_name,
)
from elaunch.store.tcp.host import SHARED
from elaunch.store.tcp.server import TcpServer
from elaunch.store.tcp.store import TcpStore
from elaunch.store.tcp.wire import Connection, ForeignAnswer

CALL_TIMEOUT = 2.0
"""Seconds for an answer; a host that is alive answers in milliseconds, a lossy network in one."""
PAUSES = (0.1, 1.0)
"""Seconds between two attempts to connect, growing from the one to the other."""
SHORTEST = 0.5
"""Seconds that even the last attempt has, so that it reports what is there and not "no answer"."""
OWN_AGENTS = 1024
"""Agents for which elaunch's own server is as quick as torch's. That one needs an import of torch,
but not the interpreter's lock: 4,096 agents are told to stop in 1.3 s, not in 7."""
FOREIGN_PATIENCE = 5.0
"""Seconds for which another job's store, or something else on the port, may be about to end."""


def host(
    listening: socket.socket,
    run_id: str,
    *,
    timeout: float = CALL_TIMEOUT,
    shared: bytes = b"",
    agents: int = 2,
) -> Store:
    """Host the store of the job ``run_id`` on a bound socket, which is owned from now on.

    ``timeout``: seconds for each call. ``shared``: what Store.shared is from the first moment,
    whatever an unauthenticated process has written there. ``agents``: how many there may be; torch
    is imported for more than OWN_AGENTS. Raises StoreUnreachable if the store that was started does
    not answer.
    """
    bound = listening.getsockname()
    name, own = tcpstore_name(bound[0], bound[1]), _reachable(listening)
    address = (listening.family, (own, *bound[1:]))
    target = StoreTarget(name, address, run_id, secrets.token_hex(4))
    identity = {"elaunch": 1, "run_id": run_id, "boot": target.boot}
    server: object = None
    try:
        server = _serve(listening, own, timeout, agents)
        raw = json.dumps(identity).encode()
        connection = _announce(target, raw, shared, time.monotonic() + timeout)
    except (OSError, RuntimeError, ForeignAnswer) as error:
        if isinstance(server, TcpServer):
            server.close()
        raise StoreUnreachable(f"the {name} cannot be hosted here: {error}") from None
    return TcpStore(target, timeout, connection, server=server)


def connect(
    host: str,
    port: int,
    run_id: str,
    *,
    deadline: float,
    timeout: float = CALL_TIMEOUT,
    stop: threading.Event | None = None,
    moved: Callable[[], bool] | None = None,
) -> Store:
    """Connect to the store of the job ``run_id``, which another agent hosts or is about to.

    ``host`` is resolved anew at each attempt. Raises StoreUnreachable after ``deadline`` seconds,
    or sooner if something else is there to stay, and names what was tried; StoreClosed when
    ``stop`` is set meanwhile. ``timeout``: seconds for each call later. ``moved`` is called when
    nothing listens there any more: whether the store is hosted at another address now.
    """
    began, name = time.monotonic(), tcpstore_name(host, port)
    stopped = threading.Event() if stop is None else stop
    pause, attempts, foreign_since = PAUSES[0], 0, math.inf
    while not stopped.is_set():
        attempts += 1
        now = time.monotonic()
        until = max(now + SHORTEST, min(now + CALL_TIMEOUT, began + deadline))
        try:
            target, connection = _connect_once(host, port, run_id, until)
            return TcpStore(target, timeout, connection, moved=moved)
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
) -> tuple[StoreTarget, Connection]:
    """Connect and make sure that it is this job's store; raises _MissError."""
    address, connection, identity = _handshake(host, port, until)
    if identity is not None and identity["run_id"] == run_id:
        return StoreTarget(tcpstore_name(host, port), address, run_id, identity["boot"]), connection
    connection.close()
    if identity is None:
        raise _MissError("a TCPStore that no elaunch agent hosts is there", foreign=True)
    raise _MissError(
        f"it belongs to the job {identity['run_id']!r}, not to {run_id!r}", foreign=True
    )


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


def _reachable(listening: socket.socket) -> str:
    """Return the address at which this process itself reaches a listening socket."""
    bound = str(listening.getsockname()[0])
    if bound == "0.0.0.0":
        return "127.0.0.1"
    return "::1" if bound == "::" else bound


def _serve(listening: socket.socket, address: str, timeout: float, agents: int) -> object:
    """Start the store on a bound socket: torch's for very many agents, where it can do that."""
    if agents <= OWN_AGENTS:
        return TcpServer(listening)
    # Read when torch is loaded: else it logs each process that sends it nonsense to stderr. Taken
    # away again, so that the workers' torch does not read it.
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ and "torch" not in sys.modules
    if quiet:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    try:
        from torch import __version__
        from torch.distributed import TCPStore
    finally:
        if quiet:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
    if not wire.is_served_by(__version__):
        return TcpServer(listening)
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=True,
        timeout=timedelta(seconds=timeout),
    )


def _announce(target: StoreTarget, identity: bytes, shared: bytes, until: float) -> Connection:
    """Write what all share, then the store's identity, and read that back."""
    connection, _ = handshake(target.address, until, hold=lambda _: None)
    first = [wire.put(f"{target.run_id}/{SHARED}", shared)] if shared else []
    connection.send([*first, wire.put(IDENTITY, identity), wire.get(IDENTITY)], until)
    if connection.value(until) != identity:
        raise ForeignAnswer("it does not keep what is written")
    return connection
