"""Whether a round may still commit a checkpoint, as the loop of its agent knows. Pure.

In a job of one node nobody else decides. In one of several the store is asked instead
(elaunch.agent.saver.surroundings).
"""

from __future__ import annotations

from elaunch.agent.policy.state import Phase, State

COMMITTING = (Phase.RUNNING, Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING)


def refusal(state: State, round_number: int) -> str:
    """Return why ``round_number`` may not commit in ``state``, or ""."""
    if state.round != round_number:
        return f"the job is in round {state.round}"
    if state.phase not in COMMITTING:
        return "it is over, and the checkpoint of the next round is being chosen"
    return ""
