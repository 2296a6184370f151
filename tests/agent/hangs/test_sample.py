"""The one thread that asks the workers: what it makes of their answers, on real sockets."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.hangs import sample, stacks
from elaunch.agent.hangs.collectives import RankPlace
from elaunch.agent.hangs.living import RanksElsewhere
from elaunch.agent.hangs.recorders import STACKS
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from tests.agent.hangs.playedworker import PlayedWorker, SampledRound, call
from tests.agent.logrig import eventually

Play = Callable[..., PlayedWorker]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """Return what makes a worker of two that has made such collectives."""
    made: list[PlayedWorker] = []

    def play(local_rank: int, *calls: dict[str, Any], size: int = 2) -> PlayedWorker:
        made.append(PlayedWorker(tmp_path, local_rank, size, *calls))
        return made[-1]

    yield play
    for worker in made:
        worker.close()


def answering(places: dict[int, RankPlace]) -> Any:
    """Return other nodes that have answered at once."""

    def ask(_: Round, waited: bool, then: Callable[[], object]) -> RanksElsewhere:
        found = RanksElsewhere()
        found.places = places
        found.settled.set()
        then()
        return found

    return SimpleNamespace(ask=ask)


def test_it_asks_by_itself_which_rank_comes_last(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the record of a run that nobody has looked at says it, too."""
    monkeypatch.setattr(sample, "FIRST_S", 0.01)
    rig = SampledRound(tmp_path)
    rig.begin()
    for rank, late in ((0, 0.0), (1, 0.5)):
        play(rank, *(call(n, 100 - n - late, waits=False) for n in range(1, 41)))
    with rig.running() as sampler:
        eventually(lambda: sampler.lateness(False) is not None)
    found = sampler.lateness(False)
    assert found is not None and (found["slow"], found["collectives"]) == (1, 40)
    sampler.begin(Round(1, 2))
    assert sampler.lateness(False) is None


def test_a_command_that_asks_has_what_is_new_enough(tmp_path: Path, play: Play) -> None:
    """Not more than one survey in ANSWERED_S; no stack is looked at for that."""
    rig = SampledRound(tmp_path)
    rig.begin()
    workers = [play(rank, call(1, 9.0, waits=False), call(2, 5.0, waits=True)) for rank in (0, 1)]
    with rig.running() as sampler:
        found = sampler.lateness(True)
        assert found is not None and found["collectives"] == 2
        asked = [len(one.asked) for one in workers]
        assert sampler.lateness(True) == found
        assert [len(one.asked) for one in workers] == asked
        assert all(STACKS not in one.asked for one in workers)


def test_places_are_answered_with_the_waits_that_stacks_show(tmp_path: Path, play: Play) -> None:
    """Where any rank waits; a worker that ends while its stack is asked for may abort."""
    rig = SampledRound(tmp_path)
    rig.begin()
    first, second = (play(rank, call(1, 9.0, waits=False)) for rank in (0, 1))
    frame = '  File "/x/torch/distributed/distributed_c10d.py", line 7 in recv\n'
    second.stack = f"Current thread 0x01 (most recent call first):\n{frame}"
    with rig.running() as sampler:
        assert not sampler.places(1)
        found = sampler.places(0)
        assert found.keys() == {0, 1} and STACKS not in second.asked
        assert [one.name for one in sampler.places(0, waited=True)[1].awaited] == ["recv"]
        first.calls.append(call(2, 5.0, waits=True))
        found = sampler.places(0)
        assert [str(found[rank].awaited[0]) for rank in (0, 1)] == ["all_reduce #2", "recv #0"]
    assert sampler.waiting


def test_a_worker_without_a_process_group_is_outside(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a fork shows whether it has one; one that is stopped says why."""
    for method, found in (("forkserver", RankPlace()), ("spawn", None)):
        rig = SampledRound(tmp_path, start_method=method)
        rig.begin()
        play(0, call(1, 9.0, waits=False))
        with rig.running() as sampler:
            assert sampler.places(0).get(1) == found
    monkeypatch.setattr(stacks, "at_rest", lambda _: "stopped")
    rig = SampledRound(tmp_path)
    rig.begin()
    with rig.running() as sampler:
        assert sampler.places(0)[1] == RankPlace(problem="stopped", stopped=True)


@pytest.mark.slow
def test_a_hang_is_told_once_in_each_round(tmp_path: Path, play: Play) -> None:
    """With the rank that the other waits for, and the process of that."""
    rig = SampledRound(tmp_path, hang_timeout=1.0)
    rig.begin()
    play(0, *(call(n, 500.0, waits=n == 61) for n in range(60, 62)))
    play(1, call(60, 500.0, waits=False))
    with rig.running() as sampler:
        eventually(lambda: bool(rig.hangs()))
        (found,) = rig.hangs()
        assert (found.round, found.ranks, found.pid) == (0, (1,), os.getpid())
        assert found.culprit.startswith("rank 1 has not entered all_reduce #")
        record = sampler.record()
        assert record is not None and record["source"] == "collectives"
        assert (record["limit_s"], record["learning"]) == (1.0, False)


@pytest.mark.slow
def test_a_hang_that_cannot_be_explained_is_posted(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another node answers ends no thread."""
    rig = SampledRound(tmp_path, hang_timeout=1.0, rendezvous=object())
    nonsense: Any = {2: "nonsense"}
    rig.sampler.others = answering(nonsense)
    rig.begin()
    for rank in (0, 1):
        play(rank, call(60, 500.0, waits=rank == 0))
    with rig.running():
        eventually(lambda: bool(rig.hangs()))


def test_for_which_rank_the_others_wait(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All nodes are asked; it is in the record, goes to other nodes, and is logged once."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    monkeypatch.setattr(sample, "FIRST_S", 0.01)
    monkeypatch.setattr(sample, "EVERY_S", 0.02)
    monkeypatch.setattr(sample, "SPARING", 0)
    rig = SampledRound(tmp_path, rendezvous=object())
    rig.sampler.others = answering({})
    rig.begin()
    for rank in (0, 1):
        play(rank, *(call(n, 400.0, waits=n == 7) for n in range(1, 8 - rank)))
    with rig.running() as sampler:
        eventually(lambda: sampler.awaited() is not None)
        eventually(lambda: len(rig.posted) > 3)
        found = sampler.awaited()
    told = "rank 1 has not entered all_reduce #7; rank 0 has been waiting there for 6m 4"
    assert found is not None and found["ranks"] == [1] and found["text"].startswith(told)
    assert all(isinstance(one, events.RanksAsked) for one in rig.posted)
    assert caplog.text.count(told) == 1
    sampler.begin(Round(1, 2))
    assert sampler.awaited() is None


@pytest.mark.parametrize("rests", ["", "stopped"])
def test_a_worker_that_has_ended_and_whose_end_is_not_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rests: str,
) -> None:
    """Its parent does not wait for it; a server that is stopped is sent on elsewhere."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    monkeypatch.setattr(sample, "FIRST_S", 0.01)
    monkeypatch.setattr(sample, "EVERY_S", 0.02)
    monkeypatch.setattr(sample, "SPARING", 0)
    monkeypatch.setattr(stacks, "at_rest", lambda _: stacks.STOPPED * bool(rests))
    child, asked = subprocess.Popen(["sh", "-c", "exit 7"]), threading.Event()
    rig = SampledRound(tmp_path)
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        rig.begin({1: child.pid})
        with rig.running() as sampler:
            for _ in range(2 * sample.UNREPORTED_LOOKS):
                sampler.places(0)
                asked.wait(0.05)
            if not rests:
                eventually(lambda: bool(rig.posted))
    finally:
        assert child.wait() == 7
    found = [
        (one.rank, one.pid, one.exitcode) for one in rig.posted if isinstance(one, events.Exit)
    ]
    assert found[:1] == ([] if rests else [(1, child.pid, 7)])
    assert ("does not report it: it hangs" in caplog.text) is not bool(rests)


def test_no_time_counts_while_a_debugger_looks(tmp_path: Path) -> None:
    """At one worker, of one command; its socket goes with it."""
    workers = SampledRound(tmp_path).sampler.workers
    (tmp_path / "debug-7").touch()
    with workers.held_by_debugger(7) as first:
        assert first and workers.debugged
        with workers.held_by_debugger(7) as second:
            assert not second
        assert workers.debugged
    assert not workers.debugged and not (tmp_path / "debug-7").exists()


def test_who_is_in_the_roster(tmp_path: Path) -> None:
    """Those that live, by rank, and how the others have ended."""
    rig = SampledRound(tmp_path, ranks=4)
    rig.begin()
    for rank, code, stopped in ((0, 0, False), (1, 1, True), (2, -15, True)):
        rig.hear(events.Exit(0, rank, rank, 1, code, 1.0, stopped))
    now = rig.sampler.workers.now
    assert (now.pids.keys(), now.ended, now.failed) == ({3}, {0}, {1})
    assert rig.sampler.workers.failed(0) == {1} and not rig.sampler.workers.failed(1)
    assert (rig.sampler.workers.pid(3), rig.sampler.workers.pid(0)) == (os.getpid(), 0)
