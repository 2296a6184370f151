"""The first lines of an agent that a program has started: it ends where that program ends."""

from __future__ import annotations

import signal
import sys

from elaunch import __main__ as command
from elaunch.server import processes


def main() -> int:
    """Run ``elaunch`` with this process' arguments, of which the first is its parent's pid."""
    processes.die_with_parent(int(sys.argv.pop(1)), signal.SIGTERM)
    return command.main()
