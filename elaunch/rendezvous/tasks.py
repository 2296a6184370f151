"""What an agent's place in its job asks for: one call to the store at a time, and the fence."""

from __future__ import annotations

from dataclasses import dataclass

from elaunch.rendezvous.news import News


@dataclass(frozen=True)
class Open:
    """Open the store (anew), and read the board."""


@dataclass(frozen=True)
class Enrol:
    """Put our entry on the roster; ``seq`` is the number of the record in ``value``."""

    name: str
    value: bytes
    seq: int


@dataclass(frozen=True)
class Update:
    """Replace our entry; ``seq`` as in Enrol: another may be told while this one is written."""

    value: bytes
    seq: int


@dataclass(frozen=True)
class Renew:
    """Keep our entry alive."""


@dataclass(frozen=True)
class Withdraw:
    """Take our entry off the roster, if it is there."""


@dataclass(frozen=True)
class Idle:
    """Nothing, before ``until`` or before something is told; None: for ever."""

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
