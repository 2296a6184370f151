"""An agent as its worker sees it: a real Unix socket; on it a test speaks elaunch.wire.worker."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from elaunch.wire.local import LocalChannel, Message, close_files

SECONDS = 60.0


class Agent:
    """An agent's socket, and what its one worker said; the test answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(SECONDS)
        self.listener.bind(str(path))
        self.listener.listen()
        self.worker: socket.socket | None = None
        self.channel: LocalChannel | None = None
        self.fds: list[int] = []

    def accept(self) -> Message:
        """Take the worker in and return its first message."""
        self.worker, _ = self.listener.accept()
        self.channel = LocalChannel(self.worker, most_files=4)
        received = self.channel.receive(time.monotonic() + SECONDS)
        assert received is not None
        self.fds = received[1]
        return received[0]

    def hear(self) -> Message:
        """Return the worker's next message; {} at the end."""
        assert self.channel is not None
        received = self.channel.receive(time.monotonic() + SECONDS)
        return {} if received is None else received[0]

    def say(self, *messages: Message) -> None:
        """Send messages."""
        assert self.channel is not None
        for message in messages:
            self.channel.send(message, (), SECONDS)

    def end(self) -> None:
        """Die: all descriptors are closed."""
        close_files(self.fds)
        if self.channel is not None:
            self.channel.close()
        self.listener.close()
