"""Events that an agent receives of its rendezvous, and requests of its membership to the store.

News are posted to the agent by the threads of its Meeting:

=============  =====================================================================================
news           meaning
=============  =====================================================================================
PlanSeen       the coordinator has decided something; ``name`` is ours at this moment
CutOff         the others have given us up, or may have: our workers are dead or must be at once
Rejoined       we are a member again, under another name, as a newcomer
StillWaiting   this agent waits for others for long; the reason names them
StoreSilent    the store does not answer, or takes no writes; the workers go on while nobody can
               decide without us
StoreBack      it does again, and nothing was lost
MeetingFailed  we cannot go on: too long without the store, or it does not let us in
=============  =====================================================================================

A task is one call to the store, made by the thread of the entry; an effect is news, or the moment
at which the workers are to be killed.
"""

from __future__ import annotations

from msgspec import Struct

from elaunch.rendezvous.plan import Plan


class PlanSeen(Struct, frozen=True):
    """The newest plan; ``name`` is our own among the members."""

    plan: Plan
    name: str


class CutOff(Struct, frozen=True):
    """The store has given us up, or cannot be reached for so long that it may have."""

    reason: str


class Rejoined(Struct, frozen=True):
    """We are a member again, as ``name``."""

    name: str


class StillWaiting(Struct, frozen=True):
    """No plan was received for long: ``reason`` names what this agent waits for."""

    reason: str


class StoreSilent(Struct, frozen=True):
    """The store does not answer: ``reason``."""

    reason: str


class StoreBack(Struct, frozen=True):
    """The store answers again, or takes writes again."""

    reason: str = "the store answers again"


class MeetingFailed(Struct, frozen=True):
    """The rendezvous is over for this agent, which ends with ``exit_code``."""

    exit_code: int
    problem: str


News = PlanSeen | CutOff | Rejoined | StillWaiting | StoreSilent | StoreBack | MeetingFailed


# ── what an agent's membership asks for ───────────────────────────────────────────────────────────


class Open(Struct, frozen=True):
    """Open the store (anew) within ``seconds``, and read the plan."""

    seconds: float


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
    """All workers are to be killed at ``until`` unless a later one follows."""

    until: float


Task = Open | Enrol | Update | Renew | Withdraw | Idle
Effect = News | Fence
