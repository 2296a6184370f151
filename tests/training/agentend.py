"""An agent as its worker sees it: a real Unix socket; on it a test speaks elaunch.wire.worker."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

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
        self.fds: list[int] = []
        self._lines = b""

    def accept(self) -> dict[str, Any]:
        """Take the worker in and return its first line."""
        self.worker, _ = self.listener.accept()
        self.worker.settimeout(SECONDS)
        data, self.fds, _, _ = socket.recv_fds(self.worker, 4096, 4)
        self._lines += data
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Return the worker's next line; {} at the end."""
        assert self.worker is not None
        while b"\n" not in self._lines:
            chunk = self.worker.recv(4096)
            if not chunk:
                return {}
            self._lines += chunk
        line, _, self._lines = self._lines.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def say(self, *lines: object) -> None:
        """Send lines in one go."""
        assert self.worker is not None
        self.worker.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def end(self) -> None:
        """Die: all descriptors are closed."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        if self.worker is not None:
            self.worker.close()
        self.listener.close()
