"""Which round may commit, as the loop of one node's agent says."""

from __future__ import annotations

import pytest

from elaunch.agent.policy.fencing import refusal
from elaunch.agent.policy.state import Limits, Phase, State

MAY = {Phase.RUNNING, Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING}


@pytest.mark.parametrize("phase", Phase)
def test_from_the_start_of_a_round_to_the_choice_of_the_next_checkpoint(phase: Phase) -> None:
    """And no round but that."""
    state = State(Limits(1), phase=phase, round=2)
    assert (refusal(state, 2) == "") == (phase in MAY)
    assert refusal(state, 1) == refusal(state, 3) == "the job is in round 2"
