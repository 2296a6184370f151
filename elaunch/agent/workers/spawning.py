"""What a server is started with, by the agent and before that."""

from __future__ import annotations

import os
from pathlib import Path

import elaunch.server
from elaunch.config import Settings

_LONGEST_ROOM = 100_000


def server_command(interpreter: str, room: int, lifeline: int) -> list[str]:
    """Return the command of a server with ``room`` bytes for the titles of its workers."""
    entry = str(Path(elaunch.server.__file__).with_name("__main__.py"))
    padding = "." * min(max(0, room - len(entry)), _LONGEST_ROOM)
    return [interpreter, "-u", entry, str(lifeline), padding]


def title_room(settings: Settings) -> int:
    """Return the length of the longest command of a worker."""
    words = [settings.interpreter, settings.entrypoint, *settings.args]
    has_checkpoint = settings.checkpoint_dir is not None or settings.init_from is not None
    longest_checkpoint = 4096 if has_checkpoint else 0
    return sum(len(os.fsencode(word)) + 1 for word in words) + 64 + longest_checkpoint
