"""How two processes prove to each other that they belong to one job, before any other message.

::

    connecting side    b"elnchan1", 32 random bytes
    listening side     32 random bytes, proof("listens", both randoms, its rank)
    connecting side    purpose, its rank, proof("connects", both randoms, purpose, its rank)

Ranks do so (elaunch.training.channel), and agents (elaunch.agent.peers.peers), whose "rank" is the
port that they listen on. A proof is HMAC-SHA256 under a key that only the job's processes know
(derived anew for each context). Everything has a fixed length, so an unauthenticated process can
make the other side keep 40 bytes, for a few seconds; it learns nothing, and its connection is
closed. Later messages are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

HELLO: Final = b"elnchan1"
NONCE: Final = 32
PROOF: Final = 32
OPENING: Final = len(HELLO) + NONCE
REPLY: Final = NONCE + PROOF
_WHO: Final = struct.Struct("<4sI")
MOST_UNPROVED: Final = 128
CLOSING: Final = _WHO.size + PROOF

LINK: Final = b"link"
RING: Final = b"ring"
GATHER: Final = b"gath"
ASK: Final = b"ask?"
COURIER: Final = b"cour"


class Unauthenticated(ConnectionError):
    """The other side does not know the job's key, or uses another protocol."""


class Caller(NamedTuple):
    """The process that has connected, and what for."""

    purpose: bytes
    rank: int


def session_key(secret: bytes, session: str) -> bytes:
    """Return the key of one context: a process of another one cannot get in by mistake."""
    return hmac.digest(secret, b"elaunch channel " + session.encode(), hashlib.sha256)


def _proof(key: bytes, side: bytes, nonces: bytes, said: bytes) -> bytes:
    return hmac.digest(key, side + nonces + said, hashlib.sha256)


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
        said, proof = received[: _WHO.size], received[_WHO.size :]
        if not hmac.compare_digest(proof, _proof(self._key, b"connects", self._nonces, said)):
            raise Unauthenticated("does not know the job's key")
        self.caller = Caller(*_WHO.unpack(said))


@dataclass
class PendingHandshake:
    """A connection whose handshake is not complete."""

    sock: socket.socket
    answering: Answering
    until: float


class PendingHandshakes:
    """Connections whose handshakes are not complete; one thread uses it, and never waits in it.

    A connection without a proof after ``patience`` seconds is dropped; where there are
    MOST_UNPROVED, the one that came first is dropped for the next.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._pending: dict[int, PendingHandshake] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._pending)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, fd: int) -> bool:
        return fd in self._pending

    def wait_ms(self, now: float, pause: float) -> int | None:
        """Return how long to poll: until a handshake's time or ``pause`` is over; None: for ever.

        ``now`` and ``pause`` are on the monotonic clock, in seconds.
        """
        times = [pending.until for pending in self._pending.values()]
        if pause > now:
            times.append(pause)
        return max(1, int(1000 * (min(times) - now)) + 1) if times else None

    def admit(self, sock: socket.socket, answering: Answering) -> None:
        """Take a connection; its handshake begins."""
        sock.setblocking(False)
        if len(self._pending) >= MOST_UNPROVED:
            self._drop(next(iter(self._pending)))
        self._pending[sock.fileno()] = PendingHandshake(
            sock, answering, time.monotonic() + self._patience
        )

    def hear(self, fd: int) -> tuple[socket.socket, Caller] | None:
        """Read what has come; return the connection, given away, when its handshake is complete."""
        pending = self._pending[fd]
        try:
            data = pending.sock.recv(pending.answering.wanted)
            if not data:
                raise Unauthenticated("hung up")
            reply = pending.answering.feed(data)
            if reply:
                pending.sock.send(reply)
        except BlockingIOError:
            return None
        except OSError:  # Unauthenticated is one too
            self._drop(fd)
            return None
        caller = pending.answering.caller
        if caller is None:
            return None
        del self._pending[fd]
        return pending.sock, caller

    def drop_late(self) -> None:
        """Close the connections whose time is over."""
        now = time.monotonic()
        for fd in [fd for fd, pending in self._pending.items() if pending.until <= now]:
            self._drop(fd)

    def close(self) -> None:
        """Close all connections."""
        for fd in list(self._pending):
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._pending.pop(fd).sock.close()


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
    said = _WHO.pack(caller.purpose, caller.rank)
    sock.sendall(said + _proof(key, b"connects", nonces, said))


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
