"""Worker scripts of the integration tests; only those that need torch import it."""

from __future__ import annotations

from pathlib import Path

import pytest

ACT = Path(__file__).with_name("act.py")
ATTENTIVE = Path(__file__).with_name("attentive.py")
COLLECTIVE = Path(__file__).with_name("collective.py")
GPUCOMPILE = Path(__file__).with_name("gpucompile.py")
GPUSTATE = Path(__file__).with_name("gpustate.py")
ONEGPU = Path(__file__).with_name("onegpu.py")
PROGRESS = Path(__file__).with_name("progress.py")
UNUSUAL = Path(__file__).with_name("unusual.py")
WAITING = Path(__file__).with_name("waiting.py")

SPAWN = ("--start-method", "spawn")
"""Plain processes: a worker takes 0.1 s of processor time, and a fork a third of that."""
FORK = ("--preload", "none")
"""The fork server, for scripts that do without torch; the tests' own has elaunch in memory."""
both_methods = pytest.mark.parametrize(
    "method", [pytest.param(SPAWN, marks=pytest.mark.trial), FORK], ids=["spawn", "fork"]
)
"""Forked; by spawn among the trials, since workers differ in how they begin, and in little else."""
