"""Fixtures that more than one test module uses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import netns
from tests.cluster import Cluster
from tests.launching import Launcher

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT for what it starts in the background, and commands would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run beside others on a busy machine: how long examples take says nothing.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


@pytest.fixture
def elaunch(tmp_path: Path) -> Iterator[Launcher]:
    """Run the real command, ``run(args)`` or ``start(args)``; it may leave no process behind."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """Make machines, ``cluster(count)``; no process may be left behind in them."""
    if why := netns.problem():
        # What must pass before a change is merged does not pass by being skipped.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    with ExitStack() as clusters:

        def build(count: int) -> Cluster:
            made = Cluster(tmp_path, count)
            clusters.callback(made.close)
            return made

        yield build
