"""What an agent receives of its rendezvous: frozen news, posted by the threads of its Meeting.

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
