"""Ranks of a job, of which none is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.checkpoint.ddprig import Ranks
from tests.training.checkpoint.rig import Job


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start ranks: ``start(script, size)``; options are those of ``Job``."""
    started: list[Job] = []

    def begin(script: str, *args: Any, **options: Any) -> Job:
        started.append(Job(tmp_path, script, *args, **options))
        return started[-1]

    yield begin
    for job in started:
        job.close()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Return ranks, as threads, that keep their checkpoints below the test's directory."""
    found = Ranks(tmp_path)
    monkeypatch.setenv("ELAUNCH_CHECKPOINT_DIR", str(found.place))
    return found
