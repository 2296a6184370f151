"""The store of a round, on a socket that is bound already, with any version of torch."""

from __future__ import annotations

import fcntl
import socket

import pytest
import torch
from torch.distributed import TCPStore

from elaunch.server import stores
from elaunch.store.tcp import wire


@pytest.mark.parametrize("version", [None, "2.6.0+cu124"])
def test_a_store_is_served_on_a_bound_socket(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    """A torch that takes none by libuv does without that."""
    monkeypatch.setattr(torch, "__version__", version or torch.__version__)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    message = {"host": "127.0.0.1", "identity": ""}
    store = stores._open_store(message, listening.detach())
    assert isinstance(store, TCPStore)
    assert store.libuvBackend is wire.is_served_by(torch.__version__)
    client = TCPStore("127.0.0.1", port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_waits_behind_a_thousand_files() -> None:
    """What --preload imports may hold more files than select() can count."""
    sent: list[object] = []
    waiting = stores.Stores(sent.append, lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        high = fcntl.fcntl(listening, fcntl.F_DUPFD_CLOEXEC, 1100)
    waiting.open({"fixed": False}, high)
    waiting.start_waiting()
    assert waiting.files == [high]
    waiting.drop()
    assert sent == []
