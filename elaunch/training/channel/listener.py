"""Where a rank is reached: an abstract Unix socket and, in a job of several nodes, a TCP port.

One thread does the handshakes, gives connections of neighbours to the thread that is in a call, and
answers the question what this rank does, also while that thread computes or waits. A pending
handshake costs a few bytes, for a few seconds; when there are too many, the oldest is dropped.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from elaunch.wire.handshake import ASK, GATHER, LINK, RING, Answering, Caller, PendingHandshakes

PATIENCE_S: Final = 10.0
PAUSE_S: Final = 0.2
"""Seconds without accepting when there are no descriptors left."""
LENGTH: Final = struct.Struct("<I")
_UCRED: Final = struct.Struct("3i")


class Listener:
    """Listens for one rank; :meth:`bind` before the meeting, :meth:`start` after it.

    ``patience``: seconds that a handshake may take.
    """

    def __init__(self, rank: int, size: int, patience: float = PATIENCE_S) -> None:
        self.unix = ""
        self.port = 0
        self._rank = rank
        self._size = size
        self._listening: list[socket.socket] = []
        self._pending = PendingHandshakes(patience)
        self._accepted: dict[tuple[bytes, int], socket.socket] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = self._arrived = -1
        self._key = b""
        self._answer: Callable[[], dict[str, Any]] = dict

    def bind(self, tcp_host: str | None) -> None:
        """Listen on a new abstract Unix socket, and on TCP if ``tcp_host`` is given ("": any)."""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.append(sock)
        self.unix = f"elaunch-{secrets.token_hex(16)}"
        sock.bind(f"\0{self.unix}")
        sock.listen(4096)
        if tcp_host is not None:
            self._bind_tcp(tcp_host)
        for each in self._listening:
            each.setblocking(False)

    def _bind_tcp(self, host: str) -> None:
        try:
            sock = socket.create_server((host, 0), family=_family(host), backlog=4096)
        except OSError:
            if not host:
                raise
            # An address that others use and this machine does not know: behind a translation.
            self._bind_tcp("")
            return
        self._listening.append(sock)
        self.port = sock.getsockname()[1]

    def start(
        self, key: bytes, answer: Callable[[], dict[str, Any]], unix_only: bool = False
    ) -> None:
        """Begin to take callers that know ``key``; ``answer()`` returns what this rank does.

        ``unix_only``: nobody is to come by TCP.
        """
        self._key, self._answer = key, answer
        if unix_only:
            for sock in self._listening[1:]:
                sock.close()
            del self._listening[1:]
        self._thread = threading.Thread(target=self._run, name="elaunch-channel", daemon=True)
        self._thread.start()

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
        if self._arrived >= 0:
            os.eventfd_write(self._arrived, 1)

    def take(self, purpose: bytes, rank: int) -> socket.socket | None:
        """Return the connection of a neighbour; None if it has not come yet."""
        with self._lock:
            return self._accepted.pop((purpose, rank), None)

    def close(self) -> None:
        """Stop listening and end the thread; may be called twice."""
        if self._thread is not None and self._thread is not threading.current_thread():
            os.eventfd_write(self._stop, 1)
            self._thread.join(5.0)
            if self._thread.is_alive():
                return  # it holds descriptors that are in use; the process ends soon
        self._thread = None
        self.forked()

    def forked(self) -> None:
        """Free every descriptor; alone in a fork, where the thread is not."""
        self._thread = None
        self._lock = threading.Lock()
        self._pending.close()
        for sock in [*self._listening, *self._accepted.values()]:
            sock.close()
        for fd in (self._stop, self._arrived):
            if fd >= 0:
                os.close(fd)
        self._listening, self._accepted = [], {}
        self._stop = self._arrived = -1

    def _run(self) -> None:
        doors = {sock.fileno(): sock for sock in self._listening}
        pause = 0.0
        while True:
            poller = select.poll()
            poller.register(self._stop, select.POLLIN)
            now = time.monotonic()
            for fd in [*self._pending, *(doors if now >= pause else ())]:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(self._pending.wait_ms(now, pause)):
                if fd == self._stop:
                    return
                if fd in doors and not self._accept(doors[fd]):
                    pause = time.monotonic() + PAUSE_S
                elif fd in self._pending:
                    self._hear(fd)
            self._pending.drop_late()

    def _accept(self, door: socket.socket) -> bool:
        try:
            sock, _ = door.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return True
        except OSError:
            return False
        if not _may_enter(sock):
            sock.close()
            return True
        self._pending.admit(sock, Answering(self._key, self._rank))
        return True

    def _hear(self, fd: int) -> None:
        proved = self._pending.hear(fd)
        if proved is not None:
            self._admit(*proved)

    def _admit(self, sock: socket.socket, caller: Caller) -> None:
        if caller.purpose == ASK:
            self._tell(sock)
        elif caller.purpose in (LINK, RING, GATHER) and caller.rank < self._size:
            with self._lock:
                older = self._accepted.pop((caller.purpose, caller.rank), None)
                self._accepted[caller.purpose, caller.rank] = sock
            if older is not None:
                older.close()
            self.wake()
        else:
            sock.close()

    def _tell(self, sock: socket.socket) -> None:
        said = json.dumps(self._answer()).encode()
        with sock:
            try:
                sock.send(LENGTH.pack(len(said)) + said)
            except OSError:
                return  # the asking rank is gone


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _may_enter(sock: socket.socket) -> bool:
    """Return whether a process of this user, or root's, is at the other end; TCP cannot tell."""
    if sock.family != socket.AF_UNIX:
        return True
    return peer_uid(sock) in (0, os.getuid())


def peer_uid(sock: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[1])
