"""For whom an agent without workers waits, and for how long: the looks that it takes."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from elaunch.rendezvous.decide.view import Rules
from elaunch.rendezvous.events import StillWaiting
from elaunch.rendezvous.plan import AgentState, Node, NodeStatus, Plan
from elaunch.rendezvous.waiting import Hopeless, Waiting, is_last, working

RULES = Rules(2, 2, store_timeout=30.0, remind=30.0)
NODES = tuple(Node(f"a{n}", f"node{n}", f"10.0.0.{n}", 1, "default") for n in (1, 2))
RUNNING = Plan("job", 3, "running", "first start", nodes=NODES)
ENDING = replace(RUNNING, phase="ending", reason="node2 was lost")


def record(number: int, state: AgentState, round: int = 3) -> NodeStatus:
    """Return what an agent publishes of itself."""
    return NodeStatus(f"node{number}", f"10.0.0.{number}", 1, 1, state=state, round=round)


@pytest.mark.parametrize(
    ("plan", "other", "expected"),
    [
        (RUNNING, record(2, "running"), ["node2"]),
        (RUNNING, record(2, "failed"), ["node2"]),
        (RUNNING, record(2, "leaving"), ["node2"]),
        (RUNNING, record(2, "ready", 2), ["node2"]),
        (RUNNING, record(2, "finished", 2), ["node2"]),
        (RUNNING, record(2, "finished"), []),
        (RUNNING, record(2, "ended"), []),
        (RUNNING, None, []),
        (ENDING, record(2, "running"), []),
        (None, record(2, "running"), []),
    ],
)
def test_who_works(plan: Plan | None, other: NodeStatus | None, expected: list[str]) -> None:
    """Another node of the round that runs, until its record ends its part of it."""
    members = {"a1": record(1, "finished"), **({"a2": other} if other else {})}
    assert [node.host for node in working(plan, "a1", members)] == expected


def test_a_wait_for_a_node_that_works_may_last() -> None:
    """A line now and then, less often each time; no end."""
    waiting, now, looks = Waiting(RULES, 0.0), 0.0, []
    members = {"a1": record(1, "finished"), "a2": record(2, "running")}
    while now < 7200.0:
        now += 1.0
        if waiting.due(now):
            looks.append(now)
            found = waiting.looked(RUNNING, "a1", members, now)
            assert found == StillWaiting(
                f"waiting for {now:.0f} s for node node2 (10.0.0.2) in round 3"
            )
    assert looks[:5] == [30.0, 90.0, 210.0, 450.0, 930.0]
    assert max(b - a for a, b in itertools.pairwise(looks)) == 600.0


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (RUNNING, "no node works on round 3, and no coordinator has ended it"),
        (ENDING, "no coordinator has published what follows (node2 was lost)"),
        (None, "no coordinator has published a plan"),
    ],
)
def test_nobody_decides(plan: Plan | None, said: str) -> None:
    """The wait ends ``store_timeout`` + 2 ``remind`` after the first look that shows it."""
    waiting, now = Waiting(RULES, 0.0), 0.0
    members = {"a1": record(1, "finished"), "a2": record(2, "finished")}
    for now in (30.0, 60.0, 90.0):
        assert not waiting.due(now - 0.1)
        assert waiting.due(now)
        expected = StillWaiting(f"waiting for {now:.0f} s: {said}")
        assert waiting.looked(plan, "a1", members, now) == expected
    found = waiting.looked(plan, "a1", members, 120.0)
    assert found == Hopeless(f"{said}, for 120 s; giving up")


def test_what_is_received_begins_the_wait_anew() -> None:
    """Also for an agent that was suspended: one look alone ends nothing."""
    waiting = Waiting(RULES, 0.0)
    assert isinstance(waiting.looked(ENDING, "a1", {}, 30.0), StillWaiting)
    waiting.restart(40.0)
    assert not waiting.due(69.0)
    assert isinstance(waiting.looked(ENDING, "a1", {}, 5000.0), StillWaiting)
    assert isinstance(waiting.looked(ENDING, "a1", {}, 5030.0), StillWaiting)
    assert isinstance(waiting.looked(ENDING, "a1", {}, 5090.0), Hopeless)


def test_many_agents_look_less_often() -> None:
    """A members of N records is read by each of N agents."""
    waiting = Waiting(RULES, 0.0)
    members = {f"a{n}": record(n, "running") for n in range(640)}
    waiting.looked(RUNNING, "a1", members, 30.0)
    assert not waiting.due(30.0 + 599.0)
    assert waiting.due(30.0 + 600.0)


@pytest.mark.parametrize(
    ("plan", "others", "expected"),
    [
        (RUNNING, [], True),
        (None, [], True),
        (RUNNING, [record(2, "leaving")], True),
        (RUNNING, [record(2, "running")], False),
        (RUNNING, [record(2, "leaving"), record(3, "ready")], False),
        (replace(RUNNING, phase="over"), [], False),
    ],
)
def test_who_leaves_last(plan: Plan | None, others: list[NodeStatus], expected: bool) -> None:
    """Nobody stays who could end the job."""
    members = {"a1": record(1, "leaving"), **{one.host: one for one in others}}
    assert is_last(plan, "a1", members) == expected
