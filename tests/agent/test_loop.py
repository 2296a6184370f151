"""The loop: in which order a turn is acted on and shown."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.loop import Agent
from elaunch.agent.policy.state import Limits, State
from elaunch.agent.policy.turn import Turn
from tests.agent.histories import READY, Played, exited, started


@pytest.mark.parametrize("others", [True, False])
def test_the_others_are_signalled_as_soon_as_they_were_looked_at(others: bool) -> None:
    """The culprit is found, and written down, while they end; the reason names it nevertheless."""
    played = Played(Limits(2))
    history = [READY, started(0), started(1), *([] if others else [exited(0, 0)])]
    for event in history:
        played.take(event)
    did: list[str] = []

    def accuse(_: State) -> str:
        did.append("found")
        return "rank 0 has ended before all_reduce #7"

    def see(turn: Turn) -> None:
        did.append(turn.reason)

    def end_tree(*_: object) -> float:
        did.append("swept")
        return 1.0

    signal = SimpleNamespace(
        send_signal=lambda *_, **__: did.append("signalled"),
        server=SimpleNamespace(end_tree=end_tree),
    )
    fakes: dict[str, Any] = dict.fromkeys(("sampler", "saver"), SimpleNamespace())
    reporter: Any = SimpleNamespace(look=lambda _: did.append("looked"), accuse=accuse)
    fakes["links"] = SimpleNamespace(shielded=list)
    fakes["group"] = signal
    settings: Any = SimpleNamespace(
        nproc_per_node="2",
        max_restarts=0,
        shutdown_timeout=5.0,
        sibling_grace=0.0,
        wait_for_children=0.0,
        forward_signals=(),
        preempt_signals=(),
        hang_timeout=None,
        checkpoint_dir=None,
        checkpoint_local=False,
    )
    observers = (reporter, (), (see,))
    alone: Any = SimpleNamespace(decide=lambda: None)
    agent = Agent(settings, queue.SimpleQueue(), observers=observers, standalone=alone, **fakes)
    agent._state = played.state
    agent._serve(exited(1, 7))
    *order, reason = did
    assert order == (["looked", "signalled", "found"] if others else ["looked", "found", "swept"])
    assert reason.startswith("rank 0 has ended before all_reduce #7 (rank 1 exited with code 7)")
