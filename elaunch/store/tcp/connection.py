"""A connection to the TCPStore of a job, opened again when it breaks.

The store's identity stands under the key ``elaunch``, outside of every job, as JSON::

    {"elaunch": 1, "run_id": "job", "boot": "9f86d081"}

``boot`` is a random id of the process that hosts it. A connection opens again only to the same one:
a host that was started anew knows nothing of this job's agents, which must enrol there again.
``refused`` instead of a store is why there is none.

What breaks an exchange, and what is raised as StoreUnreachable (elaunch.errors):

==========================  =====================================================================
connection closed or reset  nothing yet: a new connection is tried, for ``timeout`` seconds
connection refused          nobody_decides=True: nothing listens there, so the host has ended
no answer for ``timeout``   nobody_decides=False: it may be frozen or cut off, or we may be
another run id              nobody_decides=False: another job is there
another boot                StoreReplaced: another coordinator is there, our entry is gone
refused, hosted elsewhere   the same (``moved``)
==========================  =====================================================================
"""

from __future__ import annotations

import json
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from elaunch.errors import StoreClosed, StoreReplaced, StoreUnreachable
from elaunch.store.tcp import wire
from elaunch.store.tcp.wire import Connection, ForeignAnswer
from elaunch.text import host_port

LONGEST_NAME = 1_000
IDENTITY = "elaunch"
AGAIN = 0.02
"""Seconds before a broken connection is opened again: a host that ends closes its port last."""

Answer = TypeVar("Answer")
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
    threading.Thread(target=ask, name="elaunch-resolve", daemon=True).start()
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
    named = named and ("store" not in identity or _is_address(identity["store"]))
    return identity if named else None


def _is_line(value: object) -> bool:
    """Return whether it is one printable line that can be sent; any process may have written it."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()


def _is_address(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not _is_line(value[0]):
        return False
    return bool(value[0]) and type(value[1]) is int and 0 < value[1] < 65536


class TcpConnection:
    """A connection that is opened again when it breaks; several threads may take turns on it.

    Args:
        target: where to.
        timeout: seconds for one exchange, and for opening.
        closed: set by the owner before :meth:`cut`.
        connection: one that is open already.
        moved: called when nothing listens at the target; whether the store is hosted elsewhere now.
    """

    def __init__(
        self,
        target: StoreTarget,
        timeout: float,
        closed: threading.Event,
        connection: Connection | None = None,
        moved: Callable[[], bool] | None = None,
    ) -> None:
        self._moved = moved
        self.target, self.timeout = target, timeout
        self._closed = closed
        self._turn = threading.Lock()
        self._connection = connection
        self._connecting: Connection | None = None

    def exchange(
        self, talk: Callable[[Connection, float], Answer], patience: float | None = None
    ) -> Answer:
        """Return what ``talk(connection, until)`` returns; it may be called again after a break.

        ``patience``: seconds for other callers to finish, if not ``timeout``. Raises
        StoreUnreachable or StoreClosed.
        """
        if not self._turn.acquire(timeout=self.timeout if patience is None else patience):
            raise self._unreachable("it is busy with another call")
        try:
            return self._exchange(talk)
        finally:
            self._turn.release()

    def cut(self) -> None:
        """Wake waiting calls; ``closed`` is set already, so nothing is opened again."""
        for connection in (self._connection, self._connecting):
            if connection is not None:
                connection.cut()
        if self._turn.acquire(timeout=1.0):
            self._drop()
            self._turn.release()

    def _exchange(self, talk: Callable[[Connection, float], Answer]) -> Answer:
        broken = math.inf
        while True:
            if self._closed.is_set():
                raise StoreClosed(f"the connection to the {self.target.name} was closed")
            now = time.monotonic()
            if now >= broken + self.timeout:
                raise self._unreachable("it closes every connection")
            try:
                until = now + self.timeout
                return talk(self._open(min(until, broken + self.timeout)), until)
            except (ConnectionAbortedError, ConnectionResetError, BrokenPipeError):
                self._drop()
                broken = min(broken, time.monotonic())
                self._closed.wait(AGAIN)
            except (OSError, ForeignAnswer, StoreUnreachable) as error:
                self._drop()
                if not self._closed.is_set():
                    raise self._explained(error, broken) from None

    def _open(self, until: float) -> Connection:
        if self._connection is None:
            self._connection, identity = handshake(self.target.address, until, self._hold)
            if identity is None or identity["run_id"] != self.target.run_id:
                raise self._unreachable("it belongs to somebody else now")
            if identity["boot"] != self.target.boot:
                raise StoreReplaced(
                    f"cannot reach the {self.target.name}: it was started anew and does not know "
                    "this agent"
                )
        return self._connection

    def _hold(self, connection: Connection) -> None:
        self._connecting = connection
        if self._closed.is_set():
            raise ConnectionAbortedError("closed")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._connecting = None

    def _explained(self, error: Exception, broken: float) -> StoreUnreachable:
        if isinstance(error, StoreUnreachable):
            return error
        if isinstance(error, ConnectionRefusedError):
            if self._moved is not None and self._moved():
                return StoreReplaced(f"the {self.target.name} was started anew at another port")
            return self._unreachable("nothing listens there any more, its host has ended", True)
        if isinstance(error, TimeoutError) and broken < math.inf:
            return self._unreachable(
                f"the connection broke and none was had for {self.timeout:g} s"
            )
        if isinstance(error, TimeoutError):
            return self._unreachable(f"no answer for {self.timeout:g} s")
        if isinstance(error, ForeignAnswer):
            return self._unreachable(str(error))
        return self._unreachable(getattr(error, "strerror", None) or str(error))

    def _unreachable(self, why: str, nobody_decides: bool = False) -> StoreUnreachable:
        return StoreUnreachable(f"cannot reach the {self.target.name}: {why}", nobody_decides)
