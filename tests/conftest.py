"""Fixtures that more than one test module uses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.launching import Launcher

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT for what it starts in the background, and commands would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run beside others on a busy machine: how long one example takes says nothing.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.fixture
def elaunch(tmp_path: Path) -> Iterator[Launcher]:
    """Run the real command, ``run(args)`` or ``start(args)``; it may leave no process behind."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
