"""TCPStore's wire protocol, and one connection to it with a deadline per read.

=============  ====  ===============================================  ===========================
request        code  followed by                                      reply
=============  ====  ===============================================  ===========================
validate       0     u32 0x3C85F7CE; the first bytes of a connection  none
set            1     key, value                                       none
compare_set    2     key, expected value, new value                   the value afterwards
get            3     key                                              value; empty if there is none
                                                                      (without libuv: none)
add            4     key, i64                                         i64: the sum
wait           6     u64 1, key                                       byte 0 once the key exists
delete         8     key                                              i64: how many keys it was
append         9     key, value                                       none
cancel_wait    12    nothing                                          byte 1
ping           13    u32                                              the same u32
=============  ====  ===============================================  ===========================

Numbers are little-endian. A key is a u64 length and "/" and the name; a value a u64 length and the
bytes. Requests are served in the order they came in; many may be sent in one go. These are those
that the ranks need of the round's store, which is torch's; of the agents' own store only the
identity is read so (elaunch.store.tcp.messages).

torch's own client and store are not used for this, for three reasons: the client waits for an
answer without a deadline, so that a frozen host would freeze every process; nothing can wake it;
and an agent would import torch, which costs a second or two and 200 MB. The protocol is that of
torch 2.13.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterable

LONGEST = 8 * 1024 * 1024
"""Bytes in a value that TCPStore still accepts."""
CHUNK = 65536
SEGMENT = 1220
"""Bytes in a TCP segment: any path carries them (RFC 8200). Where a switch silently drops what
hosts of a larger MTU send, large records would not arrive, and a living node would seem lost."""

ETCD_PORT = 2379
"""Of another backend than this one: a flag is wrong where it is used here."""
VALIDATE = struct.pack("<BI", 0, 0x3C85F7CE)
"""The first bytes of a connection."""
PING = b"\x0d"
NONCE = 4
"""Bytes after a ping, which the answer to it repeats."""
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
CANCEL_WAIT = b"\x0c"


def is_served_by(version: str) -> bool:
    """Return whether the TCPStore of a version of torch takes a bound socket with libuv."""
    return tuple(map(int, version.split(".")[:2])) >= (2, 8)


class ForeignAnswer(Exception):
    """The other side is no TCPStore; the text has what it sent."""


def sized(data: bytes) -> bytes:
    """Return a value as it is sent."""
    if len(data) > LONGEST:
        raise ValueError(f"{len(data)} bytes are more than a TCPStore takes ({LONGEST})")
    return _U64.pack(len(data)) + data


def _key(key: str) -> bytes:
    return sized(b"/" + key.encode())


def put(key: str, value: bytes) -> bytes:
    """Return a request to set ``key``; no reply."""
    return b"\x01" + _key(key) + sized(value)


def compare_set(key: str, expected: bytes, value: bytes) -> bytes:
    """Return a request to set ``key`` if it is ``expected``; the reply is what it then is."""
    return b"\x02" + _key(key) + sized(expected) + sized(value)


def append(key: str, value: bytes) -> bytes:
    """Return a request to add to the end of a value; no reply."""
    return b"\x09" + _key(key) + sized(value)


def delete(key: str) -> bytes:
    """Return a request to forget ``key``; the reply is an integer."""
    return b"\x08" + _key(key)


def get(key: str) -> bytes:
    """Return a request for the value of ``key``."""
    return b"\x03" + _key(key)


def add(key: str, number: int) -> bytes:
    """Return a request to add to a counter; the reply is an integer."""
    return b"\x04" + _key(key) + _I64.pack(number)


def wait(key: str) -> bytes:
    """Return a request to be answered once ``key`` exists, or the queue ``key`` is not empty."""
    return b"\x06" + _U64.pack(1) + _key(key)


class Connection:
    """One connection; one thread at a time uses it, any thread may cut it.

    Every method raises ConnectionError when the connection is cut by either side, TimeoutError
    when its deadline ``until`` (on the monotonic clock) passes, and ForeignAnswer for an answer
    that no TCPStore gives. After any of them the connection is of no more use.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._news = select.poll()
        self._received = bytearray()

    def open(self, address: tuple[object, ...], until: float) -> None:
        """Connect to ``address`` and make sure that a TCPStore answers there."""
        self._sock.settimeout(max(0.001, until - time.monotonic()))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)  # both ways
        self._sock.connect(address)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setblocking(False)
        self._news.register(self._sock, select.POLLIN)
        nonce = os.urandom(NONCE)
        hint = "; for an etcd give --rdzv-backend etcd" if address[1] == ETCD_PORT else ""
        self.send([VALIDATE, PING, nonce], until)
        try:
            answer = self.read(len(nonce), until)
        except TimeoutError:
            raise TimeoutError(f"it accepts connections and says nothing{hint}") from None
        if answer != nonce:
            received = (answer + bytes(self._received))[:40].split(b"\n")[0].strip()
            answered = f"something that is no TCPStore answers: {ascii(received)[2:-1]!r}{hint}"
            raise ForeignAnswer(answered)

    def send(self, requests: Iterable[bytes], until: float) -> None:
        """Send requests in one go."""
        rest = memoryview(b"".join(requests))
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                room = select.poll()
                room.register(self._sock, select.POLLOUT)
                _await(room, until)

    def ask(self, request: bytes, until: float) -> bytes:
        """Send a request whose reply is a value, and read that."""
        self.send([request], until)
        return self.value(until)

    def value(self, until: float, longest: int = LONGEST) -> bytes:
        """Read a value."""
        (length,) = _U64.unpack(self.read(8, until))
        if length > longest + 1:
            raise ForeignAnswer(f"something that is no TCPStore sent a length of {length}")
        return self.read(length, until)

    def integer(self, until: float) -> int:
        """Read an integer."""
        (number,) = _I64.unpack(self.read(8, until))
        return int(number)

    def awaited(self, until: float, grace: float) -> bool:
        """Read the reply to :func:`wait`, or cancel it at ``until``; whether the key exists.

        ``grace``: seconds for the server to answer the cancellation.
        """
        try:
            self.read(1, until)
            return True
        except TimeoutError:
            cancelled_by = time.monotonic() + grace
        self.send([CANCEL_WAIT], cancelled_by)
        if self.read(1, cancelled_by) == b"\x01":
            return False
        self.read(1, cancelled_by)  # both answers were on their way
        return True

    def cut(self) -> None:
        """Wake the thread that reads or connects; from any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was not connected, or not any more

    def close(self) -> None:
        """Free the descriptor; only the thread that uses it may."""
        self._sock.close()

    def read(self, count: int, until: float) -> bytes:
        """Read so many bytes; those of an attempt that timed out are read by the next one."""
        while len(self._received) < count:
            _await(self._news, until)
            chunk = self._sock.recv(max(CHUNK, min(count - len(self._received), 1024 * 1024)))
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            self._received += chunk
        data = bytes(self._received[:count])
        del self._received[:count]
        return data


def _await(poll: select.poll, until: float) -> None:
    """Wait until ``until``; what has come by then is taken, however late this process gets to it.

    A process that was frozen or starved past a deadline may have its answer all the same.
    """
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError("no answer")
