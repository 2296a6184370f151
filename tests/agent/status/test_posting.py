"""A post to a server that takes its time."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from elaunch.agent.status import posting


def test_an_answer_that_drips_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """No single byte is late, and the end never comes."""
    monkeypatch.setattr(posting, "WHOLE_S", 0.2)
    server = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def drip() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            while not over.wait(0.01):
                connection.sendall(b"H")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(posting.REFUSED):
        posting.post(f"http://127.0.0.1:{server.getsockname()[1]}/", {}, {})
    over.set()
    thread.join()
    server.close()
