"""Connections between the agents of the nodes of one job.

A side that listens has a :class:`StreamListener`, one that connects uses :func:`dial`. Before any
other message both prove that they belong to one job::

    connecting side    b"elnchan1", 32 random bytes
    listening side     32 random bytes, proof("listens", both randoms, its rank)
    connecting side    purpose, its rank, proof("connects", both randoms, purpose, its rank)

Agents do so (elaunch.agent.peers.peers); their "rank" is the port that they listen on. A proof is
HMAC-SHA256 under a key that only the job's processes know.
Everything has a fixed length, so an unauthenticated process can make the other side keep 40 bytes,
for a few seconds; it learns nothing, and its connection is closed. Later messages are not
encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from elaunch.store.tcp import connection
from elaunch.text import host_port

HELLO: Final = b"elnchan1"
NONCE: Final = 32
PROOF: Final = 32
OPENING: Final = len(HELLO) + NONCE
REPLY: Final = NONCE + PROOF
_WHO: Final = struct.Struct("<4sI")
MOST_UNPROVED: Final = 128
HANDSHAKE_S: Final = 10.0
"""Seconds that a caller's handshake may take."""
PAUSE_S: Final = 0.2
"""Seconds without accepting while there are no descriptors left."""
AGAIN_S: Final = 0.05
"""Seconds before the next attempt where the other side was too busy to accept."""
JOIN_S: Final = 5.0
CLOSING: Final = _WHO.size + PROOF

PEER: Final = b"peer"


class Unauthenticated(ConnectionError):
    """The other side does not know the job's key, or uses another protocol."""


class Caller(NamedTuple):
    """The process that has connected, and what for."""

    purpose: bytes
    rank: int


def session_key(secret: bytes, session: str) -> bytes:
    """Return the key of one context: a process of another one cannot get in by mistake."""
    return hmac.digest(secret, b"elaunch channel " + session.encode(), hashlib.sha256)


def _proof(key: bytes, side: bytes, nonces: bytes, stated: bytes) -> bytes:
    return hmac.digest(key, side + nonces + stated, hashlib.sha256)


class Answering:
    """The listening side, without waiting: bytes in, bytes out."""

    def __init__(self, key: bytes, rank: int) -> None:
        self.caller: Caller | None = None
        self._key = key
        self._rank = rank
        self._received = b""
        self._nonces = b""

    @property
    def wanted(self) -> int:
        """How many bytes it waits for; not one more may be read."""
        return (CLOSING if self._nonces else OPENING) - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Take what was received and return what to send; raises Unauthenticated."""
        self._received += data
        if not HELLO.startswith(self._received[: len(HELLO)]) and not self._nonces:
            raise Unauthenticated("no rank of this job")
        if self.wanted > 0:
            return b""
        received, self._received = self._received, b""
        if self._nonces:
            self._check(received)
            return b""
        own = os.urandom(NONCE)
        self._nonces = received[len(HELLO) :] + own
        return own + _proof(self._key, b"listens", self._nonces, struct.pack("<I", self._rank))

    def _check(self, received: bytes) -> None:
        stated, proof = received[: _WHO.size], received[_WHO.size :]
        if not hmac.compare_digest(proof, _proof(self._key, b"connects", self._nonces, stated)):
            raise Unauthenticated("does not know the job's key")
        self.caller = Caller(*_WHO.unpack(stated))


@dataclass
class PendingHandshake:
    """A connection whose handshake is not complete."""

    sock: socket.socket
    answering: Answering
    until: float


class StreamListener:
    """Accepts connections in a thread of its own, and hands on those whose handshake is complete.

    A handshake costs 40 bytes for ``patience`` seconds at most; where there are MOST_UNPROVED, the
    one that came first is dropped for the next.

    Args:
        name: of the thread.
        admit: takes each connection, not blocking, with its caller; is called in the thread.
        has_room: whether one more connection may be accepted now; asked again after :meth:`poke`.
        patience: seconds that a handshake may take.
    """

    def __init__(
        self,
        name: str,
        admit: Callable[[socket.socket, Caller], None],
        *,
        has_room: Callable[[], bool] = lambda: True,
        patience: float = HANDSHAKE_S,
    ) -> None:
        self.key = b""
        """The key that callers must know; without one nobody is let in."""
        self._admit = admit
        self._has_room = has_room
        self._patience = patience
        self._rank = 0
        self._listening: dict[int, socket.socket] = {}
        self._pending: dict[int, PendingHandshake] = {}
        self._lock = threading.RLock()
        self._wake = -1
        self._closing = False
        self._pause = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, listening: Iterable[socket.socket], rank: int) -> None:
        """Begin to accept; the sockets are this listener's then, whose number is ``rank``."""
        self._rank, self._closing = rank, False
        for sock in listening:
            sock.setblocking(False)
            self._listening[sock.fileno()] = sock
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def poke(self) -> None:
        """Have the thread look again; from any thread."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop listening and end the thread, which frees all descriptors; may be called twice."""
        self._closing = True
        self.poke()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._closing:
            now = time.monotonic()
            poller = select.poll()
            takes = now >= self._pause and self._has_room()
            for fd in [self._wake, *self._pending, *(self._listening if takes else ())]:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(self._wait_ms(now)):
                if fd == self._wake:
                    os.eventfd_read(fd)
                elif fd in self._listening:
                    self._accept(self._listening[fd])
                elif fd in self._pending:
                    self._read(fd)
            now = time.monotonic()
            for fd in [fd for fd, pending in self._pending.items() if pending.until <= now]:
                self._drop(fd)
        self._free()

    def _wait_ms(self, now: float) -> int | None:
        """Return how long to poll: until a handshake's time or a pause is over; None: for ever."""
        times = [pending.until for pending in self._pending.values()]
        if self._pause > now:
            times.append(self._pause)
        return max(1, int(1000 * (min(times) - now)) + 1) if times else None

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self._pause = time.monotonic() + PAUSE_S
            return
        if not self.key:
            sock.close()
            return
        sock.setblocking(False)
        if len(self._pending) >= MOST_UNPROVED:
            self._drop(next(iter(self._pending)))
        until = time.monotonic() + self._patience
        self._pending[sock.fileno()] = PendingHandshake(
            sock, Answering(self.key, self._rank), until
        )

    def _read(self, fd: int) -> None:
        """Go on with a handshake; hand the connection on when that is complete."""
        pending = self._pending[fd]
        try:
            data = pending.sock.recv(pending.answering.wanted)
            if not data:
                raise Unauthenticated("hung up")
            reply = pending.answering.feed(data)
            if reply:
                pending.sock.send(reply)
        except BlockingIOError:
            return
        except OSError:  # Unauthenticated is one too
            self._drop(fd)
            return
        if pending.answering.caller is not None:
            del self._pending[fd]
            self._admit(pending.sock, pending.answering.caller)

    def _drop(self, fd: int) -> None:
        self._pending.pop(fd).sock.close()

    def _free(self) -> None:
        for fd in list(self._pending):
            self._drop(fd)
        for sock in self._listening.values():
            sock.close()
        self._listening.clear()
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)


class Unreached(Exception):
    """No connection was made; the text says why.

    ``how``: ``refused`` (nobody listens there), ``foreign`` (what listens there is not of this
    job), ``silent`` (no answer, no way), ``busy`` (it takes no connection until the deadline).
    """

    def __init__(self, how: Literal["refused", "foreign", "silent", "busy"], text: str) -> None:
        super().__init__(text)
        self.how = how


@dataclass(frozen=True)
class Endpoint:
    """The TCP port that a process listens on."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_port(self.host, self.port)

    def addresses(self, until: float) -> list[tuple[int, Any]]:
        """Return the families and addresses to connect to; raises OSError."""
        return list(connection.resolve(self.host, self.port, until))


def dial(
    endpoint: Endpoint,
    key: Callable[[], bytes],
    rank: int,
    caller: Caller,
    until: float,
    *,
    key_may_change: bool = False,
) -> socket.socket:
    """Return a connection after the handshake with the listener whose number is ``rank``.

    Every address is tried, and all again where the other side is too busy, until ``until``
    (monotonic clock); with ``key_may_change`` also where it does not know the key. Raises
    Unreached; where the last attempt had no answer, with the answer that came before, too.
    """
    why = ""
    while True:
        try:
            return _dial_once(endpoint, key, rank, caller, until)
        except ConnectionRefusedError:
            raise Unreached("refused", "nobody listens there") from None
        except TimeoutError:
            if why:
                raise Unreached("busy", f"{why}; then no answer") from None
            raise Unreached("silent", "no answer") from None
        except Unauthenticated as error:
            why = str(error)
            if not key_may_change:
                raise Unreached("foreign", why) from None
        except (ConnectionResetError, BrokenPipeError, BlockingIOError) as error:
            why = error.strerror or str(error)
        except OSError as error:
            raise Unreached("silent", error.strerror or str(error)) from None
        if time.monotonic() + AGAIN_S >= until:
            raise Unreached("busy", why)
        time.sleep(AGAIN_S)


def _dial_once(
    endpoint: Endpoint, key: Callable[[], bytes], rank: int, caller: Caller, until: float
) -> socket.socket:
    why = OSError(f"{endpoint.host} has no address")
    addresses = endpoint.addresses(until)
    for place, (family, address) in enumerate(addresses):
        share = (until - time.monotonic()) / (len(addresses) - place)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, share))
            sock.connect(address)
            call_up(sock, key(), rank, caller, until)
        except OSError as error:
            sock.close()
            why = error
            continue
        return sock
    raise why


def call_up(sock: socket.socket, key: bytes, rank: int, caller: Caller, until: float) -> None:
    """Do the connecting side over a connected socket; ``rank`` is that of the listening side.

    Blocks until ``until`` at the longest; raises OSError, and Unauthenticated for a wrong answer.
    """
    nonce = os.urandom(NONCE)
    sock.settimeout(max(0.001, until - time.monotonic()))
    sock.sendall(HELLO + nonce)
    reply = receive(sock, REPLY, until)
    nonces = nonce + reply[:NONCE]
    if not hmac.compare_digest(
        reply[NONCE:], _proof(key, b"listens", nonces, struct.pack("<I", rank))
    ):
        raise Unauthenticated("what answers there is not of this job, or another rank of it")
    stated = _WHO.pack(caller.purpose, caller.rank)
    sock.sendall(stated + _proof(key, b"connects", nonces, stated))


def receive(sock: socket.socket, count: int, until: float) -> bytes:
    """Read ``count`` bytes; raises OSError, ConnectionResetError at the end of the stream."""
    data = b""
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer")
        sock.settimeout(left)
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("it hung up")
        data += chunk
    return data
