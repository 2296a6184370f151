"""The actions that ``decide`` chooses from: all that the agent can do about an event."""

from __future__ import annotations

import signal

from msgspec import Struct

from elaunch.checkpoint.records import Checkpoint
from elaunch.errors import ElaunchError
from elaunch.rendezvous.plan import RestartRequest
from elaunch.wire.worker import Notice


class Nothing(Struct, frozen=True):
    """Wait for the next event."""


class StartRound(Struct, frozen=True):
    """Start the workers of ``round`` from ``checkpoint``; ``first_rank`` is this node's lowest.

    The workers with the local ranks ``keeps`` go on from the round before.
    """

    round: int
    checkpoint: Checkpoint | None
    first_rank: int = 0
    keeps: frozenset[int] = frozenset()


class Meet(Struct, frozen=True):
    """Wait for the plan: nothing of a round is left on this node."""


class StopWorkers(Struct, frozen=True):
    """Send ``signum`` to every worker; those alive after ``grace`` seconds are killed."""

    signum: signal.Signals
    grace: float


class EndTree(Struct, frozen=True):
    """End what is left of the round: ``signum`` and ``grace`` seconds first, if any, then KILL.

    A grace that StopWorkers has begun goes on; it does not begin anew. The workers with the local
    ranks ``keeps``, which the next round has as well, stay with what they have started. None: the
    next round keeps none here, and all that end are ended by this.
    """

    signum: signal.Signals | None = None
    grace: float = 0.0
    keeps: frozenset[int] | None = None


class AwaitChildren(Struct, frozen=True):
    """Wait ``seconds`` for the processes that workers have left, before they are ended."""

    seconds: float


class Hurry(Struct, frozen=True):
    """Let the grace that runs end after at most ``grace`` seconds from now."""

    grace: float


class Forward(Struct, frozen=True):
    """Send ``signum`` to every worker and go on."""

    signum: signal.Signals


class Notify(Struct, frozen=True):
    """Ask the workers to save and to end with 0; they have ``grace`` seconds, None: no limit."""

    notice: Notice
    grace: float | None


class AskRestart(Struct, frozen=True):
    """Publish that somebody asks for another round; the plan says what follows.

    For somebody who takes part in a restart that was asked for before, it is that request again.
    """

    request: RestartRequest


class TakeStacks(Struct, frozen=True):
    """Have every worker's stacks taken, before the round that hangs is ended."""


class Finish(Struct, frozen=True):
    """Leave with ``exit_code``."""

    exit_code: int


class Settle(Struct, frozen=True):
    """Bring to the disk what the round has left in memory; at most ``grace`` seconds.

    ``holds``: what the next round can load from memory is not waited for. ``then`` is what follows
    for the reason ``why``, if that is decided.
    """

    grace: float
    holds: bool = False
    then: Finish | None = None
    why: str = ""


class ReplaceServer(Struct, frozen=True):
    """Replace the server by one that imports nothing, and start workers by spawn from now on."""


class RestartServer(Struct, frozen=True):
    """Start the server again, which has ended while no worker was there."""


class KillServer(Struct, frozen=True):
    """Kill the server, which does not answer; its end is the next event."""


class Refuse(Struct, frozen=True):
    """Leave before this node has joined: the reason is raised as ``error``, the command's own.

    ``code`` is more exact than the class's where that is known.
    """

    error: type[ElaunchError]
    code: str = ""


Action = (
    Nothing
    | StartRound
    | Meet
    | StopWorkers
    | EndTree
    | AwaitChildren
    | Hurry
    | Forward
    | Notify
    | AskRestart
    | TakeStacks
    | Settle
    | ReplaceServer
    | RestartServer
    | KillServer
    | Finish
    | Refuse
)

Decision = tuple[Action, str]
"""The action, and its reason, which is the log line; "" where nothing is decided."""
NOTHING: Decision = (Nothing(), "")
