"""Worker scripts of the integration tests; only those that need torch import it."""

from __future__ import annotations

from pathlib import Path

ACT = Path(__file__).with_name("act.py")
COLLECTIVE = Path(__file__).with_name("collective.py")
PROGRESS = Path(__file__).with_name("progress.py")
WAITING = Path(__file__).with_name("waiting.py")

SPAWN = ("--start-method", "spawn")
"""Plain processes: quick for scripts that do without torch."""
FORK = ("--preload", "none")
"""The fork server, for scripts that do without torch."""
METHODS = [SPAWN, FORK]
