"""Fixtures of the tests with real processes."""

from __future__ import annotations

import pytest

from tests import launching


@pytest.fixture
def free_port() -> int:
    """Return a port that nobody listens on; another may take it before it is used."""
    return launching.free_port()
