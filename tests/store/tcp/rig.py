"""One client's connection to a hosted store, for tests that send it what agents would not."""

from __future__ import annotations

import socket
import time
from typing import Any

from elaunch.store.tcp import messages, wire
from elaunch.store.tcp.connection import IDENTITY
from elaunch.store.tcp.messages import HEAD, Request
from elaunch.store.tcp.wire import Connection
from tests.store.test_contract import LONG


class Client:
    """An open connection that has read the identity."""

    def __init__(self, port: int) -> None:
        self.sock = socket.socket()
        self._line = Connection(self.sock)
        self._line.open(("127.0.0.1", port), time.monotonic() + LONG)
        self.identity = self._line.ask(wire.get(IDENTITY), time.monotonic() + LONG)

    def send(self, *frames: bytes) -> None:
        """Send bytes."""
        self._line.send(frames, time.monotonic() + LONG)

    def frame(self) -> tuple[int, bytes]:
        """Read one frame: its first byte, and its message."""
        until = time.monotonic() + LONG
        first, length = messages.head(self._line.read(HEAD, until))
        return first, self._line.read(length, until)

    def ask(self, request: Request) -> Any:
        """Send a request, and return its answer."""
        self.send(messages.frame(request))
        return messages.read_answer(self.frame()[1], type(request))

    def is_ended(self) -> bool:
        """Return whether the server ends the connection; reads what there is before."""
        try:
            while True:
                self._line.read(1, time.monotonic() + LONG)
        except ConnectionError:
            return True

    def close(self) -> None:
        """Close it."""
        self._line.close()
