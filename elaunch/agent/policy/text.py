"""The phrases that reasons are made of."""

from __future__ import annotations

from elaunch.agent.policy import events
from elaunch.agent.policy.state import State
from elaunch.endings import exit_code, how_it_ended
from elaunch.errors import HangError, ServerError

LOST = "all workers ended with 0, but their last checkpoint was in memory only, and is lost"


def ended(event: events.WorkerExited, first_rank: int = 0) -> str:
    """Return "rank 1 exited with code 7" or "rank 1 was killed by SIGKILL"."""
    return f"rank {first_rank + event.local_rank} {how_it_ended(event.exitcode)}"


def failure(state: State) -> str:
    """Return what ended the round on this node."""
    if state.hang is not None and state.hung:
        return state.hang.reason
    if state.first is not None:
        return ended(state.first, state.first_rank)
    return server_ended(state.server_lost or 0)


def failure_code(state: State) -> int:
    """Return the exit code of a run that this round's failure ends."""
    if state.hung:
        return HangError.exit_code
    return ServerError.exit_code if state.first is None else exit_code(state.first.exitcode)


def server_ended(exitcode: int) -> str:
    """Return how the server ended."""
    return f"the server that starts the workers {how_it_ended(exitcode)}"


def workers(number: int) -> str:
    """Return "1 worker" or "3 workers"."""
    return "1 worker" if number == 1 else f"{number} workers"
