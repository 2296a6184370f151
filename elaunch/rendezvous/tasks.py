"""What an agent's place in its job asks for: one call to the store at a time, and the fence."""

from __future__ import annotations

from msgspec import Struct

from elaunch.rendezvous.news import News


class Open(Struct, frozen=True):
    """Open the store (anew), and read the plan."""


class Enrol(Struct, frozen=True):
    """Write our entry; ``seq`` is the number of the record in ``value``."""

    name: str
    value: bytes
    seq: int


class Update(Struct, frozen=True):
    """Replace our entry; ``seq`` as in Enrol: a newer one may come while this one is written."""

    value: bytes
    seq: int


class Renew(Struct, frozen=True):
    """Keep our entry alive."""


class Withdraw(Struct, frozen=True):
    """Remove our entry, if it is there."""


class Idle(Struct, frozen=True):
    """Do nothing before ``until`` or before a new record; None: for ever."""

    until: float | None = None


class Fence(Struct, frozen=True):
    """All workers are to be killed at ``until`` unless a later one follows.

    With ``hold`` they are only stopped (SIGSTOP) then, and killed that many seconds later; a later
    fence lets them go on.
    """

    until: float
    hold: float = 0.0


Task = Open | Enrol | Update | Renew | Withdraw | Idle
Effect = News | Fence
