"""What asks something of the agent's loop from outside: the time of --preempt-at."""

from __future__ import annotations

import queue
import time

import pytest

from elaunch.agent import frontends
from elaunch.agent.policy import events


@pytest.mark.parametrize(("before_end", "most"), [(300.0, 200.0), (40.0, 0.0), (None, None)])
def test_a_timer_that_is_late(before_end: float | None, most: float | None) -> None:
    """What is left until Slurm ends the job is counted when it fires: here 100 s too late."""
    posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    frontends.preempt_timer(time.time() - 100.0, before_end, posted.put)
    event = posted.get(timeout=60.0)
    assert isinstance(event, events.PreemptAsked)
    if most is None or event.left is None:
        assert event.left is most
    else:
        assert max(0.0, most - 60.0) <= event.left <= most
