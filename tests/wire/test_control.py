"""elaunch.wire.control: what a client makes of an agent's bad answers (good ones: tests/agent)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaunch.wire import control, local
from elaunch.wire.control import ask
from elaunch.wire.local import LocalChannel


@contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """Serve one client with ``answer``, then hang up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(60)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "hung up without an answer"),
        (b'{"state": "RUN', "hung up without an answer"),
        (b"\xff\xff\n", "cannot be understood: the message is not JSON"),
        (b"[1]\n", "cannot be understood: the message is no object"),
        (b'{"error": "no"}\n', "refused: {'error': 'no'}"),
    ],
)
def test_bad_answers(tmp_path: Path, answer: bytes, problem: str) -> None:
    with (
        answering(tmp_path / "agent.sock", answer),
        pytest.raises(ConnectionError, match=problem),
    ):
        ask(tmp_path / "agent.sock", {"op": "status"}, timeout=60)


def test_a_request_that_came_too_late_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has hung up on a client that was held up between its connection and its request."""
    path, hung_up = tmp_path / "agent.sock", threading.Event()

    def connected(path: Path, seconds: float) -> socket.socket:
        connection = local.connect(path, seconds)
        assert hung_up.wait(60)
        return connection

    monkeypatch.setattr(control, "connect", connected)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(2)

        def serve() -> None:
            listener.accept()[0].close()
            hung_up.set()
            channel = LocalChannel(listener.accept()[0])
            received = channel.receive(time.monotonic() + 60)
            channel.send({"got": received and received[0]["op"]})
            channel.close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert ask(path, {"op": "status"}, timeout=60) == {"got": "status"}
        thread.join(60)
