"""The descriptors that a fork of a rank must let go of, so that it cannot be taken for the rank.

A fork (a DataLoader's worker) has a copy of every descriptor. As long as it holds a connection's,
the other end does not see that the rank has ended; if it used it, two processes would send at once.
"""

from __future__ import annotations

import os
import threading
from typing import Final, Protocol
from weakref import WeakSet


class LeftBehind(Protocol):
    """Something that a fork must not have: the connections of a channel or of a store, a page."""

    def forked(self) -> None:
        """Let go of it, sending nothing to the other ends; called in the fork."""


_owners: Final[WeakSet[LeftBehind]] = WeakSet()
_watching: Final = threading.Event()


def leave_behind(owner: LeftBehind) -> None:
    """Have ``owner.forked()`` called in every process that is forked from this one.

    Not in those that are forked from them in turn, unless it calls this again.
    """
    if not _watching.is_set():
        _watching.set()
        os.register_at_fork(after_in_child=_in_fork)
    _owners.add(owner)


def _in_fork() -> None:
    owners = list(_owners)
    _owners.clear()
    for owner in owners:
        owner.forked()
