"""Since when a store that answers has taken no write of this agent. Pure.

Renewals are no writes: an etcd whose space is used up keeps every entry alive, and no deadline for
its answers ever passes. So what waits to be written has a deadline of its own: the agent's entry,
and the plans of one that coordinates.
"""

from __future__ import annotations

from typing import Literal

from elaunch.errors import StoreError, StoreFull
from elaunch.rendezvous.news import StoreBack, StoreSilent

What = Literal["entry", "plan"]


class Writes:
    """Keeps which writes were refused, since when, and why."""

    def __init__(self) -> None:
        self._since: dict[What, float] = {}
        self._named = False

    def refused(self, what: What, problem: StoreError, now: float) -> list[StoreSilent]:
        """Take that a write was not done, or may not have been; a full store is named once."""
        self._since.setdefault(what, now)
        if self._named or not isinstance(problem, StoreFull):
            return []
        self._named = True
        return [StoreSilent(f"{problem}; the job goes on until something has to be decided")]

    def done(self, what: What) -> list[StoreBack]:
        """Take that a write was done."""
        self._since.pop(what, None)
        named, self._named = self._named, False
        return [StoreBack("the store takes writes again")] if named else []

    def overdue(self, now: float, limit: float) -> float | None:
        """Return for how long a write has waited if that is ``limit`` seconds or more."""
        waited = now - min(self._since.values(), default=now)
        return waited if self._since and waited >= limit else None
