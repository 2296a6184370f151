"""Lines that accuse nobody are kept until the plan names the rank to blame."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from elaunch.agent.policy.actions import NOTHING, StopWorkers
from elaunch.agent.policy.state import Limits, State
from elaunch.agent.policy.turn import Turn
from elaunch.agent.status import decisionlog
from elaunch.agent.status.decisionlog import DecisionLog
from elaunch.rendezvous.plan import Plan, WorkerFailure
from elaunch.rendezvous.text import UNACCUSED
from tests.agent.histories import Played, exited
from tests.agent.policy.test_nodes import ENDING, RUNS
from tests.launching import wait_until

WHO = "rank 3 has ended with 0, and the others have lost it"
FIRST = f"{UNACCUSED}: rank 0 exited with code 1; stopping the other 1 worker, grace 5 s"
NAMED = f"round 0: {WHO} (rank 0 exited with code 1); stopping the other 1 worker, grace 5 s"


@pytest.fixture
def decisions() -> Iterator[DecisionLog]:
    """Return a log, whose timer has nothing left to say in the end."""
    made = DecisionLog(SimpleNamespace(), {})  # type: ignore[arg-type]
    yield made
    made.release()


def turn(reason: str, plan: Plan | None = None) -> Turn:
    """Return a turn of round 0 with a reason that is shown, and the plan in that state."""
    history = Played(Limits(2, meets=True))
    for event in RUNS:
        history.take(event)
    state: State = replace(history.state, plan=plan or history.state.plan)
    action: Any = StopWorkers(15, 5.0) if reason else NOTHING[0]
    return Turn(state, exited(0, 1), action, reason, state)


def failed(summary: str) -> Plan:
    """Return a plan of the round's end that has its failure."""
    return replace(ENDING, failure=WorkerFailure(rank=0, exitcode=1, summary=summary))


def test_a_line_is_kept_until_the_plan_names_somebody(
    decisions: DecisionLog, caplog: pytest.LogCaptureFixture
) -> None:
    """The first thing that a person reads is the guilty rank."""
    decisions.see(turn(FIRST))
    decisions.see(turn("all workers have ended", failed(UNACCUSED)))
    assert caplog.messages == ["round 0: all workers have ended"]
    decisions.see(turn("", failed(WHO)))
    assert caplog.messages[1:] == [NAMED]


def test_the_failure_of_the_round_before_names_nobody(
    decisions: DecisionLog, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan of a round that runs has that one still."""
    decisions.see(turn(FIRST, replace(failed(WHO), phase="running")))
    assert not caplog.messages


def test_where_nobody_is_named_the_line_comes_before_the_verdict(
    decisions: DecisionLog, caplog: pytest.LogCaptureFixture
) -> None:
    """As it was."""
    decisions.see(turn(FIRST))
    verdict = f"{UNACCUSED}: rank 0 on node1 exited with code 1; restart 1 of 3"
    decisions.see(turn(verdict, replace(failed(UNACCUSED), phase="forming")))
    assert caplog.messages == [f"round 0: {FIRST}", f"round 0: {verdict}"]


def test_no_line_is_kept_for_long(
    decisions: DecisionLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that does not end, or a coordinator that does not answer, hides no failure."""
    monkeypatch.setattr(decisionlog, "HOLD_S", 0.01)
    decisions.see(turn(FIRST))
    wait_until(lambda: caplog.messages == [f"round 0: {FIRST}"], what="the line is logged")
