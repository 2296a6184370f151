"""What the agent can do about an event: the actions that ``decide`` chooses from."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elaunch.checkpoint.records import Checkpoint
from elaunch.wire.worker import Notice


@dataclass(frozen=True)
class Nothing:
    """Wait for the next event."""


@dataclass(frozen=True)
class StartRound:
    """Start all workers of ``round`` from ``checkpoint``; ``first_rank`` is this node's lowest."""

    round: int
    checkpoint: Checkpoint | None
    first_rank: int = 0


@dataclass(frozen=True)
class Meet:
    """Wait for the plan: nothing of a round is left on this node."""


@dataclass(frozen=True)
class StopWorkers:
    """Send ``signum`` to every worker; those alive after ``grace`` seconds are killed."""

    signum: signal.Signals
    grace: float


@dataclass(frozen=True)
class EndTree:
    """End what is left of the round: ``signum`` and ``grace`` seconds first, if any, then KILL.

    A grace that StopWorkers has begun goes on; it does not begin anew.
    """

    signum: signal.Signals | None = None
    grace: float = 0.0


@dataclass(frozen=True)
class Hurry:
    """Let the grace that runs end after at most ``grace`` seconds from now."""

    grace: float


@dataclass(frozen=True)
class Forward:
    """Send ``signum`` to every worker and go on."""

    signum: signal.Signals


@dataclass(frozen=True)
class Notify:
    """Ask the workers to save and to end with 0; they have ``grace`` seconds, None: no limit."""

    notice: Notice
    grace: float | None


@dataclass(frozen=True)
class TakeStacks:
    """Have every worker's stacks taken, before the round that hangs is ended."""


@dataclass(frozen=True)
class Settle:
    """Bring to the disk what the round has left in memory; at most ``grace`` seconds."""

    grace: float


@dataclass(frozen=True)
class ReplaceServer:
    """Replace the server by one that imports nothing, and start workers by spawn from now on."""


@dataclass(frozen=True)
class RestartServer:
    """Start the server again, which has ended while no worker was there."""


@dataclass(frozen=True)
class KillServer:
    """Kill the server, which does not answer; its end is the next event."""


@dataclass(frozen=True)
class Finish:
    """Leave with ``exit_code``."""

    exit_code: int


Action = (
    Nothing
    | StartRound
    | Meet
    | StopWorkers
    | EndTree
    | Hurry
    | Forward
    | Notify
    | TakeStacks
    | Settle
    | ReplaceServer
    | RestartServer
    | KillServer
    | Finish
)
