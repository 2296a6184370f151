"""What an agent's place in its job asks for: one call to the store at a time, and the fence."""

from __future__ import annotations

from dataclasses import dataclass

from elaunch.rendezvous.news import News


@dataclass(frozen=True)
class Open:
    """Open the store (anew), and read the plan."""


@dataclass(frozen=True)
class Enrol:
    """Write our entry; ``seq`` is the number of the record in ``value``."""

    name: str
    value: bytes
    seq: int


@dataclass(frozen=True)
class Update:
    """Replace our entry; ``seq`` as in Enrol: a newer one may come while this one is written."""

    value: bytes
    seq: int


@dataclass(frozen=True)
class Renew:
    """Keep our entry alive."""


@dataclass(frozen=True)
class Withdraw:
    """Remove our entry, if it is there."""


@dataclass(frozen=True)
class Idle:
    """Do nothing before ``until`` or before a new record; None: for ever."""

    until: float | None = None


@dataclass(frozen=True)
class Fence:
    """All workers are to be killed at ``until`` unless a later one follows.

    With ``hold`` they are only stopped (SIGSTOP) then, and killed that many seconds later; a later
    fence lets them go on.
    """

    until: float
    hold: float = 0.0


Task = Open | Enrol | Update | Renew | Withdraw | Idle
Effect = News | Fence
