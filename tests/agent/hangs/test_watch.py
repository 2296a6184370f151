"""What the collectives make of a hang, and of a crash: which rank is named."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from elaunch.agent.hangs import watch
from elaunch.agent.hangs.collectives import CollectiveCall, GroupPlace, RankPlace
from elaunch.agent.hangs.judge import HangVerdict
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.hangs.watch import SILENT_ASKS, UNREPORTED_LOOKS, HangWatch
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round

FIRST = events.Exit(0, 0, 0, 1, 1, 0.0)
FOUND = HangVerdict((1,), "rank 1 has made no progress for 61 s", "collectives", patience=60.0)


class Explained:
    """A watch of this node's ranks 0 and 1; ``places`` are theirs and those of other nodes."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        run_dir: Path,
        others: bool,
        start_method: str = "forkserver",
    ) -> None:
        settings = SimpleNamespace(
            hang_timeout=60.0, no_stacks=False, rendezvous=None, start_method=start_method
        )
        nothing = SimpleNamespace(readings=dict, left=dict)
        group = SimpleNamespace(run_dir=run_dir, server=SimpleNamespace(pid=os.getpid()))
        made: Any = HangWatch
        self.watch: HangWatch = made(settings, nothing, group, lines=None, post=lambda _: None)
        self.own: dict[int, RankPlace] = {}
        self.elsewhere: dict[int, RankPlace] = {}
        world = SimpleNamespace(world_size=4 if others else 2, nodes=2 if others else 1)
        self.watch._begun = cast(Round, SimpleNamespace(round=0, place=world))
        monkeypatch.setattr(self.watch, "places", lambda *_: self.own)
        monkeypatch.setattr(watch, "AGAIN_S", 5.0)
        if others:
            self.watch.meet(cast(Any, SimpleNamespace(places=lambda *_: self.elsewhere)))

    def __call__(self, found: HangVerdict = FOUND) -> HangVerdict | None:
        """Return what is made of a verdict."""
        self.watch._ask_again = 0.0
        return self.watch._explain(found)


def inside(seconds: float, members: tuple[int, ...] = (0, 1)) -> RankPlace:
    """Return a rank that has waited for so long."""
    call = CollectiveCall(7, "all_reduce", at=time.time() - seconds, waits=True)
    return RankPlace({"0": GroupPlace(members, calls=(call,))}, done=13)


def test_no_rank_is_judged_by_its_collectives_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each does its own work, then, or the others have ended; a short wait is none."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    outside = RankPlace({"0": GroupPlace((0, 1))}, done=12)
    for other in (outside, RankPlace(ended=True), inside(30.0)):
        explained.own = {0: other, 1: outside}
        assert explained() is None
    explained.own = {0: inside(61.0), 1: outside}
    found = explained()
    assert found is not None and found.ranks == (1,)
    assert found.culprit.startswith("rank 1 has not entered all_reduce #7; rank 0 has been waiting")
    explained.own = {0: outside, 1: outside}
    script = HangVerdict((1,), "rank 1 has made no progress", "script")
    assert explained(script) == script


def test_ranks_of_other_nodes_that_wait_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one rank of a node may be the one that all others wait for."""
    explained = Explained(monkeypatch, tmp_path, others=True)
    everyone = (0, 1, 2, 3)
    explained.own = {1: RankPlace({"0": GroupPlace(everyone)}, done=12)}
    assert explained() is None
    explained.elsewhere = {rank: inside(61.0, everyone) for rank in (0, 2, 3)}
    found = explained()
    assert found is not None and found.ranks == (1,)


@pytest.mark.parametrize("silent", [{}, {3: RankPlace(problem="no answer")}])
def test_a_rank_that_never_answers_does_not_hide_a_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: Mapping[int, RankPlace]
) -> None:
    """It is given a few chances; one that answers and is in no collective is its own node's."""
    explained = Explained(monkeypatch, tmp_path, others=True)
    everyone = (0, 1, 2, 3)
    explained.own = {rank: inside(61.0, everyone) for rank in (0, 1)}
    outside = RankPlace({"0": GroupPlace(everyone)}, done=12)
    explained.elsewhere = {2: outside, **silent}
    assert [explained() for _ in range(2 * SILENT_ASKS)] == [None] * (2 * SILENT_ASKS)
    explained.elsewhere = {2: inside(61.0, everyone), **silent}
    assert [explained() for _ in range(SILENT_ASKS)] == [None] * SILENT_ASKS
    found = explained()
    assert found is not None and "waiting in all_reduce #7" in found.reason
    assert 3 not in found.ranks


def receiving(seconds: float = 61.0) -> RankPlace:
    """Return a rank whose stack shows that it receives, for so long."""
    call = CollectiveCall(0, "recv", at=time.time() - seconds, waits=True)
    return RankPlace({"0": GroupPlace((0, 1))}, (call,), done=12)


def test_ranks_that_send_and_receive_wait_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that does is not accused, and not judged while another may still come."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    outside = RankPlace({"0": GroupPlace((0, 1))}, done=12)
    both = HangVerdict((0, 1), "no rank has made progress", "collectives", False, patience=60.0)
    explained.own = {0: receiving(5.0), 1: outside}
    assert explained(both) is None
    explained.own = {0: receiving(), 1: outside}
    found = explained(both)
    assert found is not None and (found.ranks, found.named) == ((1,), True)
    assert found.culprit.startswith(
        "rank 1 waits for no other rank; rank 0 has been waiting in recv"
    )
    late = HangVerdict((0,), "rank 0 has made no progress", "collectives", patience=60.0)
    assert explained(late) is None
    explained.own = {0: receiving(), 1: receiving()}
    found = explained(late)
    assert found is not None and not found.named
    # The script shows progress of rank 1, which never comes.
    explained.own = {0: inside(61.0), 1: outside}
    found = explained(HangVerdict((0,), "rank 0 has made no progress", "script", patience=60.0))
    assert found is not None and found.ranks == (1,)


def test_a_rank_whose_interpreter_ends_is_not_accused_before_it_is_known_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have lost a connection, and hang as it ends."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    explained.own = {0: inside(61.0), 1: RankPlace(leaving=True)}
    found = explained()
    assert found is not None and (found.named, found.leaving) == (False, (1,))
    assert found.reason.startswith("rank 1, whose interpreter ends, has not entered all_reduce #7;")


@pytest.mark.parametrize("moved", [False, True])
def test_for_whom_all_had_waited_when_they_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moved: bool
) -> None:
    """They have left the collective by their timeout, and end."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    outside = RankPlace({"0": GroupPlace((0, 1))}, done=12)
    recorders = explained.watch._recorders
    monkeypatch.setattr(recorders, "places", lambda *_: {0: inside(61.0), 1: outside})
    explained.watch._seen()
    now = structs.replace(outside, done=13) if moved else outside
    places, dumps = {0: RankPlace(leaving=True), 1: now}, {1: Dump(("File x",))}
    monkeypatch.setattr(recorders, "scene", lambda *_, **__: lambda: (places, dumps))
    found = explained.watch._take_scene(FIRST, False, True)(0.0)
    assert found is not None and found.culprit is None and found.leaving == (0,)
    assert (found.awaited is None) is moved
    if found.awaited is not None:
        assert found.awaited.sentence.startswith("rank 1 has not entered all_reduce #7; rank 0")
        assert found.awaited.ranks == (1,)
        # Without its stack nobody knows that it receives nothing.
        dumps.clear()
        found = explained.watch._take_scene(FIRST, False, True)(0.0)
        assert found is not None and found.awaited is not None and not found.awaited.ranks
        places[1] = receiving()
        found = explained.watch._take_scene(FIRST, False, True)(0.0)
        assert found is not None and found.awaited is None


def test_a_rank_whose_stack_did_not_come_is_not_accused_of_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But for one that has ended."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    outside = RankPlace({"0": GroupPlace((0, 1))}, done=12)
    for other, ranks in ((outside, ()), (RankPlace(ended=True), (1,))):
        places = {0: inside(61.0, (0, 1, 2)), 1: other}
        monkeypatch.setattr(
            explained.watch._recorders,
            "scene",
            lambda *_, places=places, **__: lambda: (places, {}),
        )
        found = explained.watch._take_scene(FIRST, False, True)(0.0)
        assert found is not None and found.culprit is not None
        assert found.culprit.ranks == ranks


@pytest.mark.parametrize("is_victim", [True, False])
def test_what_a_victims_peers_do_is_read_while_they_live(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_victim: bool
) -> None:
    """A line of a script under a relative name is found where its process runs."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    read: list[int] = []

    def answers() -> tuple[dict[int, RankPlace], dict[int, Dump]]:
        read.append(1)
        return {0: inside(61.0)}, {}

    monkeypatch.setattr(explained.watch._recorders, "scene", lambda *_, **__: answers)
    describe = explained.watch.take_scene(FIRST, False, is_victim)
    assert bool(read) is is_victim
    assert describe(0.0) is not None and describe(0.0) is not None
    assert read == [1]


def test_a_scene_in_a_file_system_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The loop goes on without it."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    answers = threading.Event()
    monkeypatch.setattr("elaunch.agent.patience.FILES_S", 0.05)
    monkeypatch.setattr(explained.watch._recorders, "scene", lambda *_, **__: answers.wait(20.0))
    began = time.monotonic()
    assert explained.watch.take_scene(FIRST, False, False)(0.0) is None
    assert time.monotonic() - began < 15
    answers.set()


@pytest.mark.parametrize("lost", [True, False])
def test_other_nodes_are_asked_by_one_that_has_lost_a_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: bool
) -> None:
    """And again while a rank there comes to its end."""
    explained = Explained(monkeypatch, tmp_path, others=True)
    waits = inside(1.0, (0, 1, 2, 3))
    monkeypatch.setattr(
        explained.watch._recorders, "scene", lambda *_, **__: lambda: ({1: waits}, {})
    )
    answers = [({2: RankPlace(ended=True), 3: RankPlace(leaving=True)}, ()), ({}, (3,))]

    def places(_: Round, __: bool, failed: set[int]) -> Mapping[int, RankPlace]:
        found, gone = answers.pop(0)
        failed.update(gone)
        return found

    explained.watch.meet(cast(Any, SimpleNamespace(places=places)))
    found = explained.watch.take_scene(FIRST, lost, lost)(10.0)
    assert found is not None
    assert found.seen == ({1, 2, 3} if lost else {1})
    assert (found.ended, found.failed, found.leaving) == (
        ((2,), {3}, (3,)) if lost else ((), set(), ())
    )
    assert (found.culprit is not None and found.culprit.ranks == (2,)) is lost
    assert len(answers) == (0 if lost else 2)


def test_no_stack_is_asked_for_where_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that ends at that moment may abort of it."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    recorders, asked = explained.watch._recorders, list[int]()
    found = {0: RankPlace(done=1), 1: RankPlace(done=1)}
    monkeypatch.setattr(recorders, "places", lambda *_: found)
    monkeypatch.setattr(recorders, "with_receives", lambda *_: asked.append(1) or found)
    assert HangWatch.places(explained.watch, 0) == found and not asked
    assert HangWatch.places(explained.watch, 0, waited=True) == found and asked.pop()
    found[0] = inside(1.0)
    assert HangWatch.places(explained.watch, 0) == found and asked


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_without_a_process_group_is_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """Only a fork shows whether it has one."""
    explained = Explained(monkeypatch, tmp_path, others=False, start_method=method)
    progress, pid = explained.watch._progress, os.getpid()
    monkeypatch.setattr(progress, "workers", lambda: {0: (0, pid), 1: (1, pid)})
    monkeypatch.setattr(explained.watch._recorders, "places", lambda *_: {0: RankPlace(done=1)})
    found = HangWatch.places(explained.watch, 0)
    assert found.get(1) == (RankPlace() if method == "forkserver" else None)
    monkeypatch.setattr(watch.stacks, "at_rest", lambda _: "stopped")
    if method == "forkserver":
        stopped = RankPlace(problem="stopped", stopped=True)
        assert HangWatch.places(explained.watch, 0)[1] == stopped


def test_a_rank_of_another_node_that_has_no_process_group_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own node sees nothing of it; with ``auto`` that one sees whether it computes."""
    explained = Explained(monkeypatch, tmp_path, others=True)
    everyone = {"0": GroupPlace((0, 1, 2, 3))}
    call = CollectiveCall(0, "init_process_group", at=time.time() - 61, waits=True)
    comes = RankPlace(everyone, (call,))
    explained.own = dict.fromkeys((0, 1), comes)
    explained.elsewhere = {2: comes, 3: RankPlace()}
    both = HangVerdict((0, 1), "no rank has made progress", "collectives", False, patience=60.0)
    found = explained(both)
    assert found is not None and (found.ranks, found.named) == ((3,), True)
    explained.watch._judges_others = False
    assert explained(both) is None


@pytest.mark.parametrize("rests", ["", "stopped"])
def test_a_worker_that_has_ended_and_whose_end_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, rests: str
) -> None:
    """Its parent does not wait for it; a server that is stopped will be had go on."""
    explained = Explained(monkeypatch, tmp_path, others=False)
    posted: list[events.Event] = []
    monkeypatch.setattr(explained.watch, "_post", posted.append)
    monkeypatch.setattr(watch.stacks, "at_rest", lambda _: watch.stacks.STOPPED * bool(rests))
    child = subprocess.Popen(["sh", "-c", "exit 7"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        workers = {0: (0, os.getpid()), 1: (1, child.pid)}
        monkeypatch.setattr(explained.watch._progress, "workers", lambda: workers)
        for _ in range(UNREPORTED_LOOKS - 1):
            explained.watch._report_ended({})
        assert not posted
        explained.watch._report_ended({1: RankPlace(problem="it has hung up")})
    finally:
        assert child.wait() == 7
    found = [(one.rank, one.pid, one.exitcode) for one in posted if isinstance(one, events.Exit)]
    assert found == ([] if rests else [(1, child.pid, 7)])
    assert ("does not report it: it hangs" in caplog.text) is not bool(rests)
