"""The others of a round when the first has failed: what is asked of whom, and what it shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.hangs import scene
from elaunch.agent.hangs.collectives import CollectiveCall, GroupPlace, RankPlace
from elaunch.agent.hangs.elsewhere import OtherNodes
from elaunch.agent.hangs.living import RanksElsewhere
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.policy import events
from tests.agent.hangs.playedworker import PlayedWorker, SampledRound, call

FIRST = events.Exit(0, 2, 2, 1, 1, 0.0)
OUTSIDE = RankPlace({"0": GroupPlace((0, 1))}, done=12)
STACK = 'Current thread 0x01 (most recent call first):\n  File "a.py", line 1 in load\n'


def inside(seconds: float, members: tuple[int, ...] = (0, 1)) -> RankPlace:
    """Return a rank that has waited for so long at 1000 s."""
    waits = CollectiveCall(7, "all_reduce", at=1000.0 - seconds, waits=True)
    return RankPlace({"0": GroupPlace(members, calls=(waits,))}, done=13)


def described(
    places: dict[int, RankPlace],
    dumps: dict[int, Dump] | None = None,
    before: dict[int, RankPlace] | None = None,
) -> scene.Scene:
    """Return the scene of these places."""
    return scene.describe(0, places, dumps or {}, before=before or {}, now=1000.0)


@pytest.mark.parametrize("moved", [False, True])
def test_for_whom_all_had_waited_when_they_failed(moved: bool) -> None:
    """They have left the collective by their timeout, and end."""
    before = {0: inside(61.0), 1: OUTSIDE}
    now = RankPlace(OUTSIDE.groups, done=13) if moved else OUTSIDE
    places, dumps = {0: RankPlace(leaving=True), 1: now}, {1: Dump(("File x",))}
    found = described(places, dumps, before)
    assert found.culprit is None and found.leaving == (0,)
    assert (found.awaited is None) is moved
    if found.awaited is not None:
        assert found.awaited.sentence.startswith("rank 1 has not entered all_reduce #7; rank 0")
        assert found.awaited.ranks == (1,)
        # Without its stack nobody knows that it receives nothing.
        found = described(places, {}, before)
        assert found.awaited is not None and not found.awaited.ranks
        receives = CollectiveCall(0, "recv", at=939.0, waits=True)
        places[1] = RankPlace(OUTSIDE.groups, (receives,), done=12)
        assert described(places, {}, before).awaited is None


def test_a_rank_whose_stack_did_not_come_is_not_accused_of_a_crash() -> None:
    """But for one that has ended."""
    for other, ranks in ((OUTSIDE, ()), (RankPlace(ended=True), (1,))):
        found = described({0: inside(61.0, (0, 1, 2)), 1: other})
        assert found.culprit is not None and found.culprit.ranks == ranks


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SampledRound]:
    """Return a round of three, of which rank 0 waits and rank 1 loads; rank 2 is the first."""
    made = SampledRound(tmp_path, ranks=3)
    made.begin()
    waits = PlayedWorker(tmp_path, 0, 3, call(7, 61.0, waits=True))
    loads = PlayedWorker(tmp_path, 1, 3, call(6, 62.0, waits=False))
    waits.stack = loads.stack = STACK
    yield made
    waits.close()
    loads.close()


@pytest.mark.parametrize("is_victim", [True, False])
def test_the_others_are_asked_where_they_are(
    rig: SampledRound, monkeypatch: pytest.MonkeyPatch, is_victim: bool
) -> None:
    """Once; what a victim's peers answer is taken apart while they live."""
    monkeypatch.setattr(scene, "SCENE_S", 20.0)
    read: list[Path] = []
    monkeypatch.setattr(scene.LastLook, "read", _counted(scene.LastLook.read, read))
    look = scene.look(rig.sampler, FIRST, False, is_victim)
    assert look is not None and len(read) == is_victim
    found = look.described(0.0)
    assert found is not None and look.described(0.0) is not None and len(read) == 1
    assert (found.waiting, found.seen) == ((0,), {0, 1})
    assert found.culprit is not None and found.culprit.ranks == (1,)


def _counted(call: Any, into: list[Any]) -> Any:
    def counted(self: Any) -> Any:
        into.append(self)
        return call(self)

    return counted


def test_a_run_directory_that_hangs(rig: SampledRound, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on without it."""
    answers = threading.Event()
    monkeypatch.setattr("elaunch.agent.patience.FILES_S", 0.05)
    monkeypatch.setattr(rig.sampler.recorders, "ask", lambda *_, **__: answers.wait(20.0))
    began = time.monotonic()
    assert scene.look(rig.sampler, FIRST, False, False) is None
    assert time.monotonic() - began < 15
    answers.set()


@pytest.mark.parametrize("lost", [True, False])
def test_other_nodes_are_asked_by_one_that_has_lost_a_rank(rig: SampledRound, lost: bool) -> None:
    """What they answer later counts, too."""
    elsewhere = RanksElsewhere()
    asked: list[object] = []

    def ask(begun: object, waited: bool) -> RanksElsewhere:
        assert not waited
        asked.append(begun)
        elsewhere.answered.set()
        return elsewhere

    rig.sampler.others = SimpleNamespace(ask=ask)  # type: ignore[assignment]
    look = scene.look(rig.sampler, FIRST, lost, False)
    elsewhere.places, elsewhere.failed = {4: RankPlace(ended=True)}, {5}
    elsewhere.settled.set()
    assert look is not None and asked == ([rig.begun] if lost else [])
    found = look.described(20.0)
    assert found is not None and found.failed == ({5} if lost else set())
    assert found.seen == ({0, 1, 4, 5} if lost else {0, 1})


def test_they_are_asked_again_while_a_rank_comes_to_its_end() -> None:
    """By what their agents answer."""
    answers = [
        {"places": {"4": {"ended": True}, "5": {"leaving": True}}},
        {"places": {}, "failed": [5]},
    ]

    class Line:
        def __enter__(self) -> Line:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, request: dict[str, object]) -> dict[str, object]:
            assert (request["round"], request["waited"]) == (0, False)
            return {"now": time.time(), **answers.pop(0)}

    peers: Any = SimpleNamespace(
        handle=lambda *_: None, node=lambda rank: rank, call=lambda *_: Line()
    )
    place = SimpleNamespace(nodes=2, node_rank=0)
    plan = SimpleNamespace(nodes=(0, 1))
    begun: Any = SimpleNamespace(round=0, place=place, plan=plan, own_ranks=frozenset(range(4)))
    found = OtherNodes(peers, lambda *_: {}, lambda _: ()).ask(begun, waited=False)
    assert found.settled.wait(20.0) and not answers
    assert (found.places[4], found.failed) == (RankPlace(ended=True), {5})
