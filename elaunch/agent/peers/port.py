"""Where the other nodes' agents reach this one: a TCP port behind the handshake of the job.

One thread takes all callers through the handshake (elaunch.wire.handshake); one that has passed
gets a thread of its own. An unauthenticated process costs 40 bytes for a few seconds and learns
nothing: the port hangs up at its first wrong byte. Of too many pending handshakes the oldest goes.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from elaunch.agent.workers.storesocket import listen_for_nodes
from elaunch.wire.handshake import COURIER, Answering, PendingHandshakes

HANDSHAKE_S: Final = 10.0
"""Seconds for a caller's handshake."""
MOST_SERVED: Final = 256
PAUSE_S: Final = 0.2
"""Seconds without accepting while there are no descriptors left."""
JOIN_S: Final = 2.0

log = logging.getLogger("elaunch")


class PeersPort:
    """Owns the listening socket and the connections of those who have passed.

    Args:
        host: the address that the other nodes reach this one at.
        serve: is called with each connection, in a thread of its own, and must close it.
    """

    def __init__(self, host: str, serve: Callable[[socket.socket], None]) -> None:
        self._host = host
        self._serve = serve
        self.key = b""
        """What callers must know; without one nobody is let in."""
        self.port = 0
        self._door: socket.socket | None = None
        self._wake = -1
        self._closing = False
        self._pending = PendingHandshakes(HANDSHAKE_S)
        self._served: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def open(self) -> int:
        """Listen, and return the port; raises OSError."""
        self._door = listen_for_nodes(self._host, 0)
        self._door.setblocking(False)
        self.port = int(self._door.getsockname()[1])
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()
        return self.port

    def close(self) -> None:
        """Stop listening and hang up on everybody; may be called twice."""
        self._closing = True
        if self._door is None:
            return
        self._poke()
        with self._lock:
            served = list(self._served)
        for sock in served:
            _cut(sock)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        door = self._door
        assert door is not None  # opened
        pause = 0.0
        while not self._closing:
            now = time.monotonic()
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            takes = now >= pause and len(self._served) < MOST_SERVED
            for fd in [*self._pending, *([door.fileno()] if takes else [])]:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(self._pending.wait_ms(now, pause)):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd == door.fileno() and not self._accept(door):
                    pause = time.monotonic() + PAUSE_S
                elif fd in self._pending:
                    self._hear(fd)
            self._pending.drop_late()
        self._pending.close()
        door.close()
        with self._lock:
            wake, self._wake = self._wake, -1
        os.close(wake)

    def _poke(self) -> None:
        """Wake the thread that polls."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _accept(self, door: socket.socket) -> bool:
        try:
            sock, _ = door.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return True
        except OSError:
            return False
        if not self.key:  # the caller tries again; the plan with the incarnation id comes soon
            sock.close()
            return True
        self._pending.admit(sock, Answering(self.key, self.port))
        return True

    def _hear(self, fd: int) -> None:
        proved = self._pending.hear(fd)
        if proved is None:
            return
        sock, caller = proved
        if caller.purpose != COURIER:
            sock.close()
            return
        sock.setblocking(True)
        with self._lock:
            self._served.add(sock)
        threading.Thread(
            target=self._attend, args=(sock,), name="courier-peer", daemon=True
        ).start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        except Exception:
            log.exception("the courier could not serve another node's agent")
        finally:
            with self._lock:
                self._served.discard(sock)
            sock.close()
            self._poke()  # there is room for another one


def _cut(sock: socket.socket) -> None:
    """Wake the thread that serves this connection."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection had ended before it was cut: %s", error)
