"""Where a rank is reached: an abstract Unix socket and, in a job of several nodes, a TCP port.

The listener's thread gives connections of neighbours to the thread that is in a call, and answers
the question what this rank does, also while that thread computes or waits.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

from elaunch.wire.stream import ASK, HANDSHAKE_S, LINK, Caller, StreamListener

LENGTH: Final = struct.Struct("<I")


class Listener:
    """Listens for one rank; :meth:`bind` before the meeting, :meth:`start` after it.

    ``patience``: seconds that a handshake may take.
    """

    def __init__(self, rank: int, size: int, patience: float = HANDSHAKE_S) -> None:
        self.unix = ""
        self.port = 0
        self._rank = rank
        self._size = size
        self._bound: list[socket.socket] = []
        self._stream = StreamListener("elaunch-channel", self._admit, patience=patience)
        self._accepted: dict[int, socket.socket] = {}
        self._lock = threading.RLock()
        self._arrived = -1
        self._answer: Callable[[], dict[str, Any]] = dict

    def bind(self, tcp_host: str | None) -> None:
        """Listen on a new abstract Unix socket, and on TCP if ``tcp_host`` is given ("": any)."""
        self._arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bound.append(sock)
        self.unix = f"elaunch-{secrets.token_hex(16)}"
        sock.bind(f"\0{self.unix}")
        sock.listen(4096)
        if tcp_host is not None:
            self._bind_tcp(tcp_host)

    def _bind_tcp(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, 0), family=family, backlog=4096)
        except OSError:
            if not host:
                raise
            # An address that others use and this machine does not know: behind a translation.
            self._bind_tcp("")
            return
        self._bound.append(sock)
        self.port = sock.getsockname()[1]

    def start(
        self, key: bytes, answer: Callable[[], dict[str, Any]], unix_only: bool = False
    ) -> None:
        """Begin to take callers that know ``key``; ``answer()`` returns what this rank does.

        ``unix_only``: nobody is to come by TCP.
        """
        self._answer, self._stream.key = answer, key
        bound, self._bound = self._bound, []
        if unix_only:
            for sock in bound[1:]:
                sock.close()
            del bound[1:]
        self._stream.start(bound, self._rank)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a neighbour's connection has come."""
        return self._arrived

    def mask(self) -> int:
        """Return the events to poll for."""
        return select.POLLIN

    def ready(self, events: int) -> None:
        """Take note that connections have come."""
        os.eventfd_read(self._arrived)

    def wake(self) -> None:
        """Wake the thread that polls this listener."""
        with self._lock:  # or the number may be another's by then
            if self._arrived >= 0:
                os.eventfd_write(self._arrived, 1)

    def take(self, rank: int) -> socket.socket | None:
        """Return the connection of a neighbour; None if it has not come yet."""
        with self._lock:
            return self._accepted.pop(rank, None)

    def close(self) -> None:
        """Stop listening and end the thread; may be called twice."""
        self._stream.close()
        self._free()

    def forked(self) -> None:
        """Free every descriptor in a process that was forked: the thread is not in it."""
        self._lock = threading.RLock()
        self._stream.forked()
        self._free()

    def _free(self) -> None:
        for sock in [*self._bound, *self._accepted.values()]:
            sock.close()
        self._bound, self._accepted = [], {}
        with self._lock:
            if self._arrived >= 0:
                os.close(self._arrived)
            self._arrived = -1

    def _admit(self, sock: socket.socket, caller: Caller) -> None:
        if caller.purpose == ASK:
            self._reply(sock)
        elif caller.purpose == LINK and caller.rank < self._size:
            with self._lock:
                older = self._accepted.pop(caller.rank, None)
                self._accepted[caller.rank] = sock
            if older is not None:
                older.close()
            self.wake()
        else:
            sock.close()

    def _reply(self, sock: socket.socket) -> None:
        reply = json.dumps(self._answer()).encode()
        with sock:
            try:
                sock.send(LENGTH.pack(len(reply)) + reply)
            except OSError:
                return  # the asking rank is gone
