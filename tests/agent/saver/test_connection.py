"""One worker's connection to its agent's saver, where the worker does not read."""

from __future__ import annotations

import json
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.saver import connection
from elaunch.agent.saver.connection import SaverConnection

LONG = 60.0


class Served:
    """A service with one answer that no socket takes at once."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.abandoned: list[int] = []
        self.keeping: Any = SimpleNamespace(
            wait=lambda rank, timeout: None,
            newest=lambda rank: None,
            abandon=lambda rank, stage: self.abandoned.append(rank),
        )

    def admit(self, connection: SaverConnection) -> None:
        """Let it in."""

    def left(self, connection: SaverConnection) -> None:
        """Note the end."""
        self.ended.set()


def test_a_torn_answer_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later answer is read as its rest, and what the worker has sent is still done."""
    monkeypatch.setattr(connection, "SEND_S", 1)
    monkeypatch.setattr(connection, "committed_to_json", lambda _: "x" * (4 << 20))
    ours, theirs = socket.socketpair()
    ours.settimeout(LONG)
    service = Served()
    SaverConnection(theirs, 0, 0, 0).start(service)  # type: ignore[arg-type]
    asked = [{"op": "wait", "n": 1}, {"op": "abandon", "n": 2}, {"op": "wait", "n": 3}]
    ours.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in asked))
    deadline = threading.Event()
    while not service.abandoned and not deadline.wait(0.01):
        pass  # the first answer is given up, the second request is done
    said = bytearray()
    while chunk := ours.recv(1 << 16):
        said += chunk
    greeting, torn = said.split(b"\n")
    assert json.loads(greeting) == {"ok": True}
    assert torn.startswith(b'{"n":1') and len(torn) < 4 << 20
    ours.close()
    assert service.ended.wait(LONG)
