"""What agents have in memory, as the coordinator weighs it against what is on the disk."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.decide import checkpoints
from elaunch.rendezvous.decide.view import Absent, Present, Rules, SearchResult, View
from elaunch.rendezvous.plan import HeldShards, Node, NodeStatus, Plan, PlanCheckpoint

NODES = tuple(Node(name, name, "10.0.0.1", 2, "default") for name in ("a", "b"))
RULES = Rules(1, 2, preempt_grace=30.0)
ON_DISK = PlanCheckpoint("/ck/step-00000010.r0", 10, "elaunch")


def shards(step: int, *ranks: int, writing: bool = False, number: int = 1) -> HeldShards:
    """Return shards of a save of four ranks."""
    path = f"/ck/step-{step:08d}.r{number}"
    return HeldShards(path, step, number, f"u{step}", 4, ranks, writing)


def view(a: list[HeldShards], b: list[HeldShards] | None, found: PlanCheckpoint | None) -> View:
    """Return a view in which node a has ended, and b, if it is not gone (None)."""
    plan = Plan("job", 1, "ending", nodes=NODES)
    there = {"a": a} if b is None else {"a": a, "b": b}
    present = {
        name: Present(
            NodeStatus(name, "10.0.0.1", 1, 2, state="ended", round=1, held=tuple(one)), 0, k, 0
        )
        for k, (name, one) in enumerate(there.items())
    }
    absent = {} if b is not None else {"b": Absent("expired", 0.0)}
    return View("a", plan, present, absent, search_result=SearchResult(found))


NONE: list[HeldShards] = []
TABLE = {
    "nothing at all": (NONE, NONE, None, None),
    "on the disk": (NONE, NONE, ON_DISK, "10"),
    "half of it on each node": ([shards(20, 0, 1)], [shards(20, 2, 3)], ON_DISK, "20 u20"),
    "half of it only": ([shards(20, 0, 1)], NONE, ON_DISK, "10"),
    "two halves of different steps": ([shards(20, 0, 1)], [shards(30, 2, 3)], ON_DISK, "10"),
    "a node is gone, and its half too": ([shards(20, 0, 1)], None, ON_DISK, "10"),
    "a neighbour has its replicas": ([shards(20, 0, 1, 2, 3)], None, ON_DISK, "20 u20"),
    "what the disk has is newer": ([shards(5, 0, 1, 2, 3)], NONE, ON_DISK, "10"),
    "it is on the disk by now": ([shards(10, 0, 1, 2, 3, number=0)], NONE, ON_DISK, "10"),
    "the same step of a later round": ([shards(10, 0, 1, 2, 3)], NONE, ON_DISK, "10 u10"),
    "two of them": ([shards(20, 0, 1, 2, 3), shards(30, 0, 1, 2, 3)], NONE, None, "30 u30"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_newest(name: str) -> None:
    """Of a save all shards count, or none; what is on the disk is taken from there."""
    a, b, found, expected = TABLE[name]
    chosen = checkpoints.newest(view(a, b, found))
    said = None if chosen is None else f"{chosen.step} {chosen.uuid}".strip()
    assert said == expected


def test_what_a_node_has_that_is_not_in_the_round_does_not_count() -> None:
    """Nobody could fetch it from there."""
    there = view([shards(20, 0, 1)], [shards(20, 2, 3)], ON_DISK)
    assert checkpoints.newest(there, ["a"]) == ON_DISK


LATE = {
    "nothing is written": ([shards(20, 0, 1)], None, False),
    "the lost node may have written its half": ([shards(20, 0, 1, writing=True)], None, True),
    "a living node has none": ([shards(20, 0, 1, writing=True)], NONE, False),
    "it can be loaded as it is": ([shards(20, 0, 1, 2, 3, writing=True)], None, False),
    "it is older than what can be loaded": (
        [shards(20, 0, 1, writing=True), shards(30, 0, 1, 2, 3)],
        None,
        False,
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_is_waited_for(name: str) -> None:
    """Only what the disk alone can make whole, and for a bounded time."""
    a, b, waits = LATE[name]
    expected = ("waiting for 1 node to write out a save", 37.0) if waits else None
    assert checkpoints.awaited(view(a, b, None), RULES, 7.0) == expected
