"""The round's TCPStore, as the ranks use it to meet and to agree.

Every key begins with ``elaunch/<scope>/<n>/``: scope is the job and the round, n is how many
contexts this rank has opened in the round before this one, in whichever of its processes. So what
a script leaves there disturbs neither torch nor the next context, nor a script that runs after it.

Where no launcher hosts the store, rank 0 does, with torch, so that ``init_process_group("env://")``
in the same process shares it. Otherwise torch is not needed: elaunch.store.tcp reaches it.

A thread that lives as long as the context has a connection that is opened again when it breaks
(`SteadyConnection`): a firewall drops what has been idle for long, and a wait that is never
interrupted would not notice. So waits are cut into slices, and at the end of each the store has to
answer.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

from elaunch.errors import CollectiveError, CollectiveTimeout, ContextError, PeerLost
from elaunch.hosts import keep_alive
from elaunch.store.tcp import connection as tcpline
from elaunch.store.tcp import wire
from elaunch.store.tcp.wire import Connection, ForeignAnswer
from elaunch.training.launch import Placement
from elaunch.wire import forks

PAUSES: Final = (0.02, 0.05, 0.1, 0.25)
"""Seconds between two attempts to connect; the last goes on."""
MOST_APPENDED: Final = 1 << 36
"""Bytes of a value that many have added to."""
NO_VALUE: Final = b"\0none"
"""A value that is set nowhere, so that a key which is compared with it stays as it is."""
GRACE_S: Final = 10.0
"""Seconds for the store to answer that a wait is over."""

Answer = TypeVar("Answer")


class Request(NamedTuple):
    """One request: its bytes by the key's whole name, and what reads its answer, if it has one."""

    key: str
    packed: Callable[[str], bytes]
    answer: Callable[[Connection, float], Any] | None = None


def put(key: str, value: bytes) -> Request:
    """Return a request to set a key."""
    return Request(key, lambda name: wire.put(name, value))


def append(key: str, value: bytes) -> Request:
    """Return a request to add to the end of a key's value."""
    return Request(key, lambda name: wire.append(name, value))


def put_first(key: str, value: bytes) -> Request:
    """Return a request to set a key unless it has a value; the answer is what it then is."""
    return Request(key, lambda name: wire.compare_set(name, b"", value), Connection.value)


def get(key: str) -> Request:
    """Return a request for the value of a key, empty if it has none.

    It is compared with what no value is, which changes nothing: TCPStore without libuv closes the
    connection that gets a key which is not there.
    """
    return Request(key, lambda name: wire.compare_set(name, NO_VALUE, NO_VALUE), _value)


def add(key: str, number: int) -> Request:
    """Return a request to add to a counter; the answer is the sum."""
    return Request(key, lambda name: wire.add(name, number), Connection.integer)


def forget(key: str) -> Request:
    """Return a request to delete a key; the answer is whether it was there."""
    return Request(key, wire.delete, Connection.integer)


def _value(connection: Connection, until: float) -> bytes:
    found = connection.value(until, MOST_APPENDED)
    return b"" if found == NO_VALUE else found


class StoreConnection:
    """One connection to the store; one thread at a time uses it, any thread may cut it.

    Every method blocks until ``until`` on the monotonic clock at the longest, and raises PeerLost
    when the connection is broken or cut, CollectiveTimeout when the store does not answer. After
    either the connection is of no more use.
    """

    def __init__(
        self, connection: Connection, where: str, prefix: str, addrs: tuple[str, str]
    ) -> None:
        self.local_addr, self.store_addr = addrs
        """This node's address as the store sees it, and the store's as this node does."""
        self._connection = connection
        self._where = where
        self._prefix = prefix

    def put(self, key: str, value: bytes, until: float) -> None:
        """Set ``key``; there is no answer, so only a later call shows whether it was received."""
        self.exchange([put(key, value)], until)

    def get(self, key: str, until: float) -> bytes:
        """Return the value of ``key``, empty if it has none."""
        return self.multi_get([key], until)[0]

    def multi_get(self, keys: Iterable[str], until: float) -> list[bytes]:
        """Return the values of ``keys``, empty for those that have none."""
        return self.exchange([get(key) for key in keys], until)

    def add(self, key: str, number: int, until: float) -> int:
        """Add to the counter ``key`` and return the sum."""
        return int(self.exchange([add(key, number)], until)[0])

    def put_first(self, key: str, value: bytes, until: float) -> bytes:
        """Set ``key`` unless it has a value; return what it then is."""
        found: bytes = self.exchange([put_first(key, value)], until)[0]
        if found == value:  # it wakes those that wait, as comparing does with libuv only
            self.put(key, value, until)
        return found

    def wait(self, key: str, until: float) -> bool:
        """Wait until ``key`` has a value; return whether it has before ``until``."""
        soon = time.monotonic() + GRACE_S
        request = wire.wait(self._prefix + key)

        def awaited(connection: Connection) -> bool:
            connection.send([request], max(soon, until))
            return connection.awaited(until, GRACE_S)

        return self._do(awaited)

    def exchange(self, requests: Sequence[Request], until: float) -> list[Any]:
        """Send requests in one go; return the answers of those that have one, in order."""

        def send_and_read(connection: Connection) -> list[Any]:
            connection.send([one.packed(self._prefix + one.key) for one in requests], until)
            return [one.answer(connection, until) for one in requests if one.answer is not None]

        return self._do(send_and_read)

    def cut(self) -> None:
        """Wake the thread that uses the connection, for good; from any thread."""
        self._connection.cut()

    def close(self) -> None:
        """Free the descriptor; only the thread that uses the connection may."""
        self._connection.close()

    def _do(self, exchange: Callable[[Connection], Answer]) -> Answer:
        try:
            return exchange(self._connection)
        except TimeoutError:
            raise CollectiveTimeout(f"{self._where} does not answer") from None
        except (OSError, ForeignAnswer) as error:
            raise PeerLost(f"{self._where} is lost: {_reason(error)}") from None


class RoundStore:
    """The round's store for one context; nothing happens before the first :meth:`connect`."""

    def __init__(self, placement: Placement) -> None:
        self.context_number = 0
        """How many contexts this rank has opened in this round, this one included."""
        self._placement = placement
        self._lock = threading.Lock()
        self._hosted: object | None = None
        self._prefix = ""
        self._open: WeakSet[StoreConnection] = WeakSet()
        self._closed = ""

    @property
    def name(self) -> str:
        """The store's name for people."""
        host, port = self._placement.store or ("nowhere", 0)
        return "the round's " + tcpline.tcpstore_name(host, port)

    @property
    def prefix(self) -> str:
        """The prefix of this context's keys; empty before the first connection."""
        return self._prefix

    def connect(self, until: float) -> StoreConnection:
        """Return a new connection; each thread needs its own.

        Tries again until ``until`` (monotonic clock) while nothing answers: the host may still be
        starting. Raises CollectiveTimeout then, PeerLost for an answer of something else, and
        ContextError after close, in a fork, and where there is but one rank.
        """
        if self._placement.store is None:
            raise ContextError("a job of one rank has no store")
        with self._lock:
            self._host(until)
        connection, addrs = self._connect(until)
        with self._lock:
            made = StoreConnection(connection, self.name, self._prefix, addrs)
            try:
                made = self._scoped(made, connection, until)
            except CollectiveError:
                made.close()
                raise
            self._open.add(made)
        if self._closed:
            made.cut()
        forks.leave_behind(self)
        return made

    @property
    def is_closed(self) -> bool:
        """Whether nothing can connect any more."""
        return bool(self._closed)

    def close(self, why: str = "the context is closed") -> None:
        """Cut every connection, and end the store if this rank hosts it; may be called twice."""
        self._closed = self._closed or why
        for connection in list(self._open):
            connection.cut()
        with self._lock:
            self._hosted = None

    def forked(self) -> None:
        """Let go of the connections in a process that was forked from this one."""
        self._closed = f"this process was forked from rank {self._placement.rank}"
        self._lock = threading.Lock()
        for connection in list(self._open):
            connection.close()

    def _scoped(
        self, made: StoreConnection, connection: Connection, until: float
    ) -> StoreConnection:
        if self._prefix:
            return made
        scope = f"elaunch/{self._placement.scope}"
        self.context_number = made.add(f"{scope}/contexts/{self._placement.rank}", 1, until)
        self._prefix = f"{scope}/{self.context_number - 1}/"
        return StoreConnection(
            connection, self.name, self._prefix, (made.local_addr, made.store_addr)
        )

    def _host(self, until: float) -> None:
        here = self._placement
        if not here.hosts_store or here.rank != 0 or here.store is None or self._hosted:
            return
        if self._closed:
            raise ContextError(self._closed)
        from torch.distributed import TCPStore

        host, port = here.store
        left = timedelta(seconds=max(1.0, until - time.monotonic()))
        try:
            self._hosted = TCPStore(
                host, port, None, True, left, wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError, OSError) as error:
            why = str(error).partition("\n")[0]
            raise PeerLost(
                f"rank 0 cannot host {self.name}: {why}; give another MASTER_ADDR or MASTER_PORT, "
                "the same for all ranks"
            ) from error

    def _connect(self, until: float) -> tuple[Connection, tuple[str, str]]:
        pauses = iter(PAUSES)
        pause = PAUSES[-1]
        why = "no time was left"
        while time.monotonic() < until:
            if self._closed:
                raise ContextError(f"{self.name}: {self._closed}")
            try:
                return self._connect_once(until)
            except ForeignAnswer as error:
                raise PeerLost(f"cannot reach {self.name}: {error}") from None
            except OSError as error:
                why = _reason(error)
            pause = next(pauses, pause)
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
        host = " (rank 0 is to host it)" if self._placement.hosts_store else ""
        raise CollectiveTimeout(f"cannot reach {self.name}{host}: {why}")

    def _connect_once(self, until: float) -> tuple[Connection, tuple[str, str]]:
        host, port = self._placement.store or ("", 0)
        addresses = tcpline.resolve(host, port, until)
        why = OSError(f"{host} has no address")
        for number, (family, address) in enumerate(addresses):
            left = until - time.monotonic()
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection = Connection(sock)
                keep_alive(sock)  # a rank may wait for long, or compute
                connection.open(address, time.monotonic() + left / (len(addresses) - number))
                return connection, (str(sock.getsockname()[0]), str(sock.getpeername()[0]))
            except OSError as error:
                sock.close()
                why = error
            except ForeignAnswer:
                sock.close()
                raise
        raise why


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


ANSWER_S: Final = 10.0
"""Seconds that the store may take for one exchange."""
OPEN_S: Final = 5.0
SLICE_S: Final = 15.0
AGAIN_S: Final = 0.2
"""Seconds between two attempts to open a connection."""


class SteadyConnection:
    """One thread's connection to the round's store; any thread may cut it.

    Every method raises CollectiveError when the store could not be reached for ``patience`` seconds
    after it was lost (0: does not try again; math.inf: never gives up), and soon after :meth:`cut`.
    ``seconds`` are those that one attempt to connect may take, and one exchange; OPEN_S and
    ANSWER_S if None.
    """

    def __init__(self, store: RoundStore, patience: float, seconds: float | None = None) -> None:
        self.lost = False
        """Whether the last attempt to use it failed."""
        self.patience = patience
        self._store = store
        self._opening = OPEN_S if seconds is None else seconds
        self._answer = ANSWER_S if seconds is None else seconds
        self._connection: StoreConnection | None = None
        self._lock = threading.Lock()
        self._cut = threading.Event()

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    def run(self, exchange: Callable[[StoreConnection, float], Answer]) -> Answer:
        """Call ``exchange(connection, until)`` and return its answer.

        If the connection breaks meanwhile it is called again with a new one: it must bear to be
        done twice, also in part.
        """
        give_up: float | None = None
        while True:
            try:
                return exchange(self._opened(give_up), time.monotonic() + self._answer)
            except CollectiveError:
                self.close()
                self.lost = True
                now = time.monotonic()
                give_up = now + self.patience if give_up is None else give_up
                if self._cut.is_set() or now >= give_up:
                    raise
                self._cut.wait(AGAIN_S)

    def await_key(self, key: str, until: float) -> bool:
        """Wait until ``key`` is there, or the monotonic clock shows ``until``; whether it is."""
        while True:
            slice_end = min(until, time.monotonic() + SLICE_S)
            if self._wait(key, slice_end):
                return True
            if time.monotonic() >= until:
                return False

    def cut(self) -> None:
        """Wake the thread that uses it, for good; from any thread."""
        with self._lock:
            self._cut.set()
            if self._connection is not None:
                self._connection.cut()

    def close(self) -> None:
        """Free the connection; only the thread that uses it may."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _wait(self, key: str, until: float) -> bool:
        return self.run(lambda connection, _: connection.wait(key, until))

    def _opened(self, give_up: float | None) -> StoreConnection:
        if self._connection is None:
            until = time.monotonic() + self._opening
            try:
                connection = self._store.connect(until if give_up is None else min(until, give_up))
            except ContextError as error:  # this side has closed it
                self._cut.set()
                raise PeerLost(str(error)) from error
            with self._lock:
                self._connection = connection
            self.lost = False
        if self._cut.is_set():
            raise PeerLost("this rank's connection to the round's store was closed meanwhile")
        return self._connection
