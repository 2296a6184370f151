"""The fixture of the tests of the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.resolving import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a directory with a script to resolve command lines in."""
    return Job(tmp_path)
