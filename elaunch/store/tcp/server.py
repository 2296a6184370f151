"""A TCPStore in Python, for the agents of a job: the one that hosts it needs no torch for it.

It answers the requests of the table in ``wire``, as torch's store with libuv does. One thread
serves all connections; what is malformed ends its connection, and so does a client that reads none
of its answers. While no descriptor is left, a client that connects waits. Only agents speak with
it, a few requests a second each: 1,024 of them form a round as quickly as around torch's store.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import selectors
import socket
import struct
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Generator
from operator import attrgetter
from typing import Final

from elaunch.store.tcp.wire import CHUNK, LONGEST, VALIDATE

_Reading = Generator[int, None, None]
_MOST_KEYS: Final = 1 << 17
"""Keys in one request; a host writes and reads a few for each agent."""
_MOST_UNSENT: Final = 1 << 26
"""Bytes that a client may leave unread; the nodes of 16,384 agents are half a megabyte."""
_AGAIN_S: Final = 1.0
"""Seconds until a connection is accepted again after there was no descriptor for one."""
_OWN_FILES: Final = 256
"""Descriptors that are left to the process, or half of its limit."""

log = logging.getLogger("elaunch")


class _MalformedError(Exception):
    """A client has sent what no client of a TCPStore sends."""


class _Client:
    """One connection: what it has sent, what it is sent, and the keys that it waits for."""

    def __init__(self, sock: socket.socket, server: TcpServer) -> None:
        self.sock = sock
        self.received = bytearray()
        self.unsent = bytearray()
        self.waits_for: set[bytes] = set()
        self.is_full = False
        self.heard = 0.0
        self._requests = server.requests(self)
        self._needed = next(self._requests)

    def serve(self) -> None:
        """Serve what is there in full; raises _MalformedError."""
        while len(self.received) >= self._needed:
            self._needed = next(self._requests)

    def take(self, count: int) -> bytes:
        """Take bytes that are there."""
        data = bytes(self.received[:count])
        del self.received[:count]
        return data

    def answer(self, data: bytes) -> None:
        """Have it sent an answer; raises _MalformedError where it has read too few of them."""
        if len(self.unsent) + len(data) > _MOST_UNSENT:
            raise _MalformedError
        self.unsent += data


class TcpServer:
    """Serves on a listening socket, which it owns, until it is closed."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._values: dict[bytes, bytes] = {}
        self._queues: defaultdict[bytes, deque[bytes]] = defaultdict(deque)
        self._waiting: defaultdict[bytes, set[_Client]] = defaultdict(set)
        self._selector = selectors.DefaultSelector()
        self._accepts_at: float | None = None
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(limit // 2, limit - _OWN_FILES) if limit > 0 else sys.maxsize
        self._short = False
        self._ended, self._end = socket.socketpair()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="elaunch-tcpstore", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and leave the port."""
        self._end.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            left = None if self._accepts_at is None else self._accepts_at - time.monotonic()
            if left is not None and left <= 0:
                self._accept_again()
                left = None
            for key, events in self._selector.select(left):
                if key.fileobj is self._ended:
                    self._close()
                    return
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._turn(key.data, events)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._listening.close()  # it is not registered while no descriptor is left
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # it is gone already
            return
        except OSError as error:
            # The listening socket stays readable: the thread would only come here again.
            self._complain(f"takes no connection for now: {error.strerror}")
            self._selector.unregister(self._listening)
            self._accepts_at = time.monotonic() + _AGAIN_S
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(sock, selectors.EVENT_READ, _Client(sock, self))
        registered = self._selector.get_map()
        if len(registered) > self._most + 2:  # the listening socket and the end are no clients
            self._complain(
                f"has {self._most} connections, for more raise ulimit -n: the most "
                "silent one ends for each that comes"
            )
            clients = (key.data for key in registered.values() if key.data is not None)
            self._drop(min(clients, key=attrgetter("heard")))

    def _complain(self, problem: str) -> None:
        if not self._short:
            log.warning("the agents' store %s", problem)
        self._short = True

    def _accept_again(self) -> None:
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._accepts_at = None

    def _turn(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = client.sock.recv(CHUNK)
                if not data:
                    raise ConnectionResetError
                client.received += data
                client.heard = time.monotonic()
                client.serve()
            self._flush(client)
        except BlockingIOError:
            return
        except (OSError, _MalformedError):
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        with contextlib.suppress(KeyError, ValueError):  # it was dropped when it was to be woken
            self._selector.unregister(client.sock)
        client.sock.close()

    def _forget(self, client: _Client) -> None:
        """Have a client wait for nothing."""
        for name in client.waits_for:
            self._waiting[name].discard(client)
            if not self._waiting[name]:
                del self._waiting[name]
        client.waits_for = set()

    def _flush(self, client: _Client) -> None:
        """Send what the socket takes; the rest when it takes more."""
        with contextlib.suppress(BlockingIOError):
            while client.unsent:
                del client.unsent[: client.sock.send(client.unsent)]
        if client.is_full is bool(client.unsent):
            return
        client.is_full = not client.is_full
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.is_full else 0)
        self._selector.modify(client.sock, wanted, client)

    def requests(self, client: _Client) -> _Reading:
        """Serve the requests of a client, one after the other; yields how many bytes it needs."""
        yield len(VALIDATE)
        if client.take(len(VALIDATE)) != VALIDATE:
            raise _MalformedError
        while True:
            yield 1
            code = client.take(1)[0]
            serve = _SERVES.get(code)
            if serve is None:
                raise _MalformedError
            yield from serve(self, client)

    def _put(self, name: bytes, value: bytes) -> None:
        self._values[name] = value
        self._wake(name)

    def _wake(self, name: bytes) -> None:
        for client in self._waiting.pop(name, ()):
            client.waits_for.discard(name)
            if not client.waits_for:
                try:
                    client.answer(b"\x00")
                    self._flush(client)
                except (OSError, _MalformedError):
                    self._drop(client)

    def _set(self, client: _Client) -> _Reading:
        name = yield from _value(client)
        self._put(name, (yield from _value(client)))

    def _compare_set(self, client: _Client) -> _Reading:
        name = yield from _value(client)
        expected = yield from _value(client)
        value = yield from _value(client)
        if self._values.get(name, b"") == expected:
            self._put(name, value)
        client.answer(_sent(self._values.get(name, expected)))

    def _get(self, client: _Client) -> _Reading:
        name = yield from _value(client)
        client.answer(_sent(self._values.get(name, b"")))

    def _add(self, client: _Client) -> _Reading:
        name = yield from _value(client)
        yield 8
        (number,) = _I64.unpack(client.take(8))
        try:
            number += int(self._values.get(name, b"0"))
            client.answer(_I64.pack(number))
        except (ValueError, struct.error):
            raise _MalformedError from None
        self._put(name, str(number).encode())

    def _wait(self, client: _Client) -> _Reading:
        names = yield from _names(client)
        self._forget(client)
        client.waits_for = {n for n in names if n not in self._values and not self._queues.get(n)}
        for name in client.waits_for:
            self._waiting[name].add(client)
        if not client.waits_for:
            client.answer(b"\x00")

    def _cancel_wait(self, client: _Client) -> _Reading:
        yield 0
        self._forget(client)
        client.answer(b"\x01")

    def _delete(self, client: _Client) -> _Reading:
        name = yield from _value(client)
        found = self._values.pop(name, None), self._queues.pop(name, None)
        client.answer(_I64.pack(found != (None, None)))

    def _multi_get(self, client: _Client) -> _Reading:
        for name in (yield from _names(client)):
            client.answer(_sent(self._values.get(name, b"")))

    def _multi_set(self, client: _Client) -> _Reading:
        for _ in range((yield from _number(client, _MOST_KEYS))):
            yield from self._set(client)

    def _ping(self, client: _Client) -> _Reading:
        yield 4
        client.answer(client.take(4))

    def _push(self, client: _Client) -> _Reading:
        name = yield from _value(client)
        self._queues[name].append((yield from _value(client)))
        self._wake(name)

    def _pop(self, client: _Client) -> _Reading:
        queue = self._queues.get((yield from _value(client)))
        client.answer(_I64.pack(len(queue or ())))
        if queue:
            client.answer(_sent(queue.popleft()))


def _number(client: _Client, most: int) -> Generator[int, None, int]:
    yield 8
    (number,) = _U64.unpack(client.take(8))
    if number > most:
        raise _MalformedError
    return int(number)


def _value(client: _Client) -> Generator[int, None, bytes]:
    length = yield from _number(client, LONGEST)
    yield length
    return client.take(length)


def _names(client: _Client) -> Generator[int, None, list[bytes]]:
    count, names = (yield from _number(client, _MOST_KEYS)), list[bytes]()
    while len(names) < count:
        names += [(yield from _value(client))]
    return names


def _sent(value: bytes) -> bytes:
    return _U64.pack(len(value)) + value


_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_SERVES = {
    1: TcpServer._set,
    2: TcpServer._compare_set,
    3: TcpServer._get,
    4: TcpServer._add,
    6: TcpServer._wait,
    8: TcpServer._delete,
    10: TcpServer._multi_get,
    11: TcpServer._multi_set,
    12: TcpServer._cancel_wait,
    13: TcpServer._ping,
    14: TcpServer._push,
    15: TcpServer._pop,
}
"""By the codes of the table in ``wire``."""
