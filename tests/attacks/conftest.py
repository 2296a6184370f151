"""What tests of attacks share."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number: int = probe.getsockname()[1]
    return number
