"""A state directory of the test alone, and agents that are played in it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launching import clean_environment
from tests.views.playing import PlayedAgent

Play = Callable[..., PlayedAgent]


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of commands and played agents; no other test's runs are seen in it."""
    (tmp_path / "tmp").mkdir()
    directory = str(tmp_path / "tmp")
    monkeypatch.setattr(tempfile, "tempdir", directory)
    return clean_environment(tmp_path / "state") | {"TMPDIR": directory, "HOME": str(tmp_path)}


@pytest.fixture
def play(environ: dict[str, str]) -> Iterator[Play]:
    """Start played agents, ``play(workers=2, **record)``; they end with the test."""
    with ExitStack() as stack:
        yield lambda *args, **record: stack.enter_context(PlayedAgent(environ, *args, **record))
