"""What tests of attacks share."""

from __future__ import annotations

import pytest

from tests import launching


@pytest.fixture
def port() -> int:
    """Return a port of this machine that was free a moment ago."""
    return launching.free_port()
