"""What a worker asks of its agent's saver, where the worker does not read."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.saver import connection
from elaunch.agent.saver.connection import SaverConnection
from elaunch.wire.local import Channel, Requests


def test_a_torn_answer_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later answer is read as its rest, and what the worker has sent is still done."""
    monkeypatch.setattr(connection, "SEND_S", 0.1)
    monkeypatch.setattr(connection, "committed_to_json", lambda _: "x" * (4 << 20))
    abandoned: list[int] = []
    service: Any = SimpleNamespace(
        keeping=SimpleNamespace(
            wait=lambda rank, timeout: None,
            last=lambda rank: None,
            abandon=lambda rank, stage: abandoned.append(rank),
        )
    )
    ours, theirs = (Channel(end) for end in socket.socketpair())
    served = SaverConnection(Requests(theirs), 3, 0, 0)
    for number, op in enumerate(("wait", "abandon", "wait")):
        served.serve(service, {"op": op, "n": number})
    assert abandoned == [3]
    assert ours.receive() is None  # no whole message has come
    served.close()
    theirs.close()
    ours.close()
