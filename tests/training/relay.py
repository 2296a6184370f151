"""A network between ranks and their store: a TCP relay that is slow, or forgets connections."""

from __future__ import annotations

import random
import socket
import threading


class Relay:
    """Carries connections to ``port`` on loopback, from :attr:`port`, until :meth:`close`.

    ``delay``: up to so many seconds are added to what goes either way, at random.
    """

    def __init__(self, port: int, delay: float = 0.0, seed: int = 0) -> None:
        self._to = port
        self._delay = delay
        self._random = random.Random(seed)
        self._closing = threading.Event()
        self._forgotten: set[int] = set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        """Carry nothing any more on the connections that there are, and tell nobody."""
        self._forgotten = set(map(id, self._sockets))

    def close(self) -> None:
        """End all connections."""
        self._closing.set()
        for end in (self._listener, *self._sockets):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                end.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(end)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._closing.wait(self._random.random() * self._delay)
                if id(source) not in self._forgotten:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return
