"""What a process that was forked from a rank must let go of, so that it cannot be taken for it.

A fork (a DataLoader's worker) has a copy of every descriptor. As long as it holds a connection's,
the other end does not see that the rank has ended; if it used it, two processes would send at once.
"""

from __future__ import annotations

import os
import threading
from typing import Final, Protocol
from weakref import WeakSet


class LeftBehind(Protocol):
    """Something that a fork must not have: here the connections of a channel or of a store."""

    def forked(self) -> None:
        """Close the descriptors, sending nothing to the other ends; called in the fork."""


_owners: Final[WeakSet[LeftBehind]] = WeakSet()
_watching: Final = threading.Event()


def leave_behind(owner: LeftBehind) -> None:
    """Have ``owner.forked()`` called in every process that is forked from this one."""
    if not _watching.is_set():
        _watching.set()
        os.register_at_fork(after_in_child=_in_fork)
    _owners.add(owner)


def _in_fork() -> None:
    for owner in list(_owners):
        owner.forked()
    _owners.clear()
