"""The phrases that reasons are made of."""

from __future__ import annotations

from elaunch.agent.policy.state import State
from elaunch.endings import exit_code, how_it_ended
from elaunch.errors import HangError, ServerError

LOST = "all workers ended with 0, but their last checkpoint was in memory only, and is lost"


def failure(state: State) -> str:
    """Return what ended the round on this node."""
    if state.hang is not None and state.hung:
        return state.hang.reason
    if state.first is not None:
        return state.first.text
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
