"""Memory → disk → commit: a real directory, and storage that is full, broken, or hangs."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch import atonce
from elaunch.agent.saver import inflight
from elaunch.agent.saver import queue as savequeue
from elaunch.agent.saver.queue import SaveQueue
from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import decode
from elaunch.checkpoint.records import Committed, Image, ShardHeader, Stage
from elaunch.checkpoint.storage import commit, durable
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.errors import SaveError
from elaunch.wire.worker import StagedShard
from tests.launching import wait_until

LONG = 60.0
RUN = "digits"


class Disk(PosixStorage):
    """A storage whose writing a test disturbs: ``before`` is called with (stage, rank)."""

    before: Callable[[Stage, int], object] = staticmethod(lambda stage, rank: None)

    def write_shard(self, stage: Stage, header: ShardHeader, images: Sequence[Image]) -> bytes:
        self.before(stage, header.rank)
        return super().write_shard(stage, header, images)


@dataclass
class Rules:
    """The commit rules of a process, as the test wants it."""

    ranks: frozenset[int]
    chief: bool = True
    refusal: str = ""
    room: bool = False
    calls: list[tuple[str, int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    on_written: Callable[[], object] = lambda: None
    on_committed: Callable[[], object] = lambda: None

    def own_ranks(self) -> frozenset[int]:
        return self.ranks

    def commits(self, _: StagedShard) -> bool:
        return self.chief

    def fence(self, round_number: int) -> None:
        if self.refusal:
            raise SaveError(self.refusal)

    def released(self, shard: StagedShard) -> None:
        self.calls.append(("released", shard.header.rank))

    def written(self, shard: StagedShard, _: bytes) -> None:
        self.calls.append(("written", shard.header.rank))
        self.on_written()

    def failed(self, shard: StagedShard, _: str) -> None:
        self.calls.append(("failed", shard.header.rank))

    def writing(self, shard: StagedShard) -> None:
        self.calls.append(("writing", shard.header.rank))

    def committed(self, _: StagedShard, done: Committed) -> None:
        self.on_committed()
        self.done.append(done.name)

    def make_room(self, _: StagedShard) -> bool:
        self.calls.append(("room", 0))
        return self.room


@dataclass
class Rig:
    """One process with the ranks of a job of ``world`` that hand over to it."""

    root: Path
    ranks: tuple[int, ...] = (0, 1)
    world: int = 2
    rules: Rules = field(init=False)
    disk: Disk = field(init=False)
    queue: SaveQueue = field(init=False)

    def __post_init__(self) -> None:
        self.rules = Rules(frozenset(self.ranks))
        self.disk = Disk(self.root)
        self.disk.prepare(RUN, given=True)
        self.queue = SaveQueue(self.disk, self.rules)
        for rank in self.ranks:
            self.queue.join(rank)

    def shard(self, step: int, rank: int, uuid: str = "u", local: bool = False) -> StagedShard:
        copied = rank not in self.ranks  # it is a replica of another node's
        header = ShardHeader(rank, self.world, RUN, {"steps_completed": step}, copied=copied)
        files = ((f"part-{rank}", ((4, 4), (0, 4))),)
        return StagedShard(Stage(step, 0, uuid), header, files, local=local)

    def stage(self, step: int, rank: int, uuid: str = "u") -> None:
        self.queue.stage(self.shard(step, rank, uuid), memoryview(b"%04dtail" % step))()

    def begin(self, rank: int, wait: bool = True) -> bool:
        return self.queue.begin(rank, wait, LONG)

    def saved(self, step: int) -> Committed | None:
        for rank in self.ranks:
            assert self.begin(rank)
            self.stage(step, rank)
        return self.queue.wait(self.ranks[0], LONG)

    @property
    def names(self) -> list[str]:
        return [found.name for found in self.disk.listed()]

    @property
    def stages(self) -> list[str]:
        return sorted(path.name for path in (self.root / ".stage").iterdir())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


class Gate:
    """Holds writers of the given ranks until it is opened: storage that hangs."""

    def __init__(self, rig: Rig, *ranks: int) -> None:
        self._ranks = ranks
        self.opened = threading.Event()
        self.waiting = threading.Event()
        rig.disk.before = self._wait  # type: ignore[method-assign]

    def _wait(self, _: Stage, rank: int) -> None:
        if rank in self._ranks:
            self.waiting.set()
            assert self.opened.wait(LONG)


def breaks(rig: Rig, code: int, rank: int, times: int = 1) -> None:
    """Have the next ``times`` writes of ``rank`` fail."""
    left = [times]

    def fail(_: Stage, of: int) -> None:
        if of == rank and left[0]:
            left[0] -= 1
            raise OSError(code, "it is broken", "/disk/part")

    rig.disk.before = fail  # type: ignore[method-assign]


def test_what_lies_in_memory_is_committed(rig: Rig) -> None:
    """The pieces of a file in their order, the metadata, the durations."""
    done = rig.saved(10)
    assert done is not None
    assert (done.name, done.step, done.run_id) == ("step-00000010.r0", 10, RUN)
    assert (rig.root / done.name / "part-1").read_bytes() == b"tail0010"
    assert done.document["durations"]["write"] >= 0
    rig.disk.verify(done, RUN)
    assert rig.queue.last(1) == done
    wait_until(lambda: rig.rules.done == [done.name], LONG)
    record = rig.queue.record()
    assert (record["step"], record["saving"], record["problem"]) == (10, None, "")


def test_the_training_comes_first(rig: Rig) -> None:
    """What writes has a lower priority than the process has, and that keeps its own."""
    found: list[int] = []
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def note(_: Stage, rank: int) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    rig.disk.before = note  # type: ignore[method-assign]
    assert rig.saved(10)
    assert len(found) == 2
    assert min(found) > own or own == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_one_save_after_the_other(rig: Rig) -> None:
    """The second waits, or is skipped as asked; a rank that has yet to hand over does not wait."""
    gate = Gate(rig, 0)
    assert rig.begin(0)
    rig.stage(10, 0)
    assert not rig.begin(0, wait=False)
    assert rig.begin(1), "rank 1 waits for a save that waits for rank 1"
    rig.stage(10, 1)
    assert not rig.begin(1, wait=False)
    assert rig.queue.record()["saving"] == 10
    with pytest.raises(TimeoutError, match=r"step-00000010\.r0 is not committed after 0 s"):
        rig.queue.wait(1, 0.0)
    gate.opened.set()
    assert rig.begin(0)
    assert rig.begin(1)
    assert rig.names == ["step-00000010.r0"]


def test_a_failure_is_told_once_to_each_rank(rig: Rig) -> None:
    """The save comes to nothing, its stage goes, the one before stays, the next one works."""
    rig.saved(10)
    breaks(rig, errno.EIO, rank=1)
    for rank in (0, 1):
        assert rig.begin(rank)
        rig.stage(20, rank)
    for rank in (0, 1):
        with pytest.raises(SaveError, match=r"step-00000020\.r0 was not committed: rank 1: it is"):
            rig.queue.wait(rank, LONG)
    assert "rank 1: it is broken (/disk/part)" in rig.queue.record()["problem"]
    wait_until(lambda: not rig.stages, LONG)
    assert ("failed", 1) in rig.rules.calls
    assert rig.names == ["step-00000010.r0"]
    done = rig.saved(30)
    assert done is not None
    assert done.step == 30


def test_a_full_disk_is_tried_once_more(rig: Rig) -> None:
    """What retention allows has gone meanwhile."""
    rig.rules.room = True
    breaks(rig, errno.ENOSPC, rank=0)
    done = rig.saved(10)
    assert done is not None
    assert rig.rules.calls.count(("room", 0)) == 1


@pytest.mark.parametrize("room", [False, True])
def test_a_disk_that_stays_full_fails_the_save(rig: Rig, room: bool) -> None:
    """Not the job."""
    rig.rules.room = room
    breaks(rig, errno.ENOSPC, rank=0, times=2)
    with pytest.raises(SaveError, match="rank 0: it is broken"):
        rig.saved(10)
    assert rig.names == []


def test_a_rank_that_ends_before_it_hands_over(rig: Rig) -> None:
    """The other one's shard is discarded, and it is told whose is missing."""
    assert rig.begin(0)
    rig.stage(10, 0)
    rig.queue.leave(1)
    with pytest.raises(SaveError, match="rank 1 ended before handing over a part"):
        rig.queue.wait(0, LONG)
    wait_until(lambda: not rig.stages, LONG)


def test_a_rank_that_had_ended_already(rig: Rig) -> None:
    """The order in which the agent hears of it does not matter."""
    rig.queue.leave(1)
    rig.stage(10, 0)
    with pytest.raises(SaveError, match="rank 1 ended"):
        rig.queue.wait(0, LONG)
    wait_until(lambda: not rig.stages, LONG)


def test_a_rank_that_gives_up(rig: Rig) -> None:
    """Its copy has failed: the part of the other is discarded at once, its own earlier one not."""
    rig.saved(10)
    assert rig.begin(0)
    assert rig.begin(1)
    rig.stage(20, 0)
    rig.queue.abandon(1)
    with pytest.raises(SaveError, match="rank 1 gave up its shard"):
        rig.queue.wait(0, LONG)
    assert rig.names == ["step-00000010.r0"]


def test_the_end_of_a_round_waits_for_what_is_written(rig: Rig) -> None:
    """All parts had been handed over: nothing is lost."""
    gate = Gate(rig, 1)
    rig.stage(10, 0)
    rig.stage(10, 1)
    threading.Timer(0.05, gate.opened.set).start()
    settled = rig.queue.settle(time.monotonic() + LONG)
    assert [done.name for done in settled.committed] == ["step-00000010.r0"]
    assert settled.lost == ()


def test_the_end_of_a_round_loses_what_is_not_whole(rig: Rig) -> None:
    """Without waiting for a part that cannot come."""
    rig.stage(10, 0)
    settled = rig.queue.settle(time.monotonic() + LONG)
    assert settled.lost == ("step-00000010.r0: rank 1 ended before handing over a part",)
    wait_until(lambda: not rig.stages, LONG)


def test_storage_that_hangs_does_not_hold_up_the_end(rig: Rig) -> None:
    """It is named; what it takes too late is discarded, and the next round can save again."""
    gate = Gate(rig, 1)
    rig.stage(10, 0)
    rig.stage(10, 1)
    assert gate.waiting.wait(LONG)
    settled = rig.queue.settle(time.monotonic() + 0.05)
    assert settled.lost == ("step-00000010.r0: the storage has not taken it in time",)
    assert rig.queue.unfinished() == ("step-00000010.r0.u",)
    rig.queue.end_round()
    for rank in (0, 1):
        rig.queue.join(rank)
    assert not rig.begin(1, wait=False), "its memory is read still"
    gate.opened.set()
    wait_until(lambda: not rig.queue.unfinished() and not rig.stages, LONG)
    assert rig.names == []
    done = rig.saved(20)
    assert done is not None


def test_a_round_resumes_from_a_save_whose_commit_is_yet_to_be_noted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is on the disk, where the next round has found it: nothing is said to be lost."""
    there, opened = threading.Event(), threading.Event()
    commit_it = rig.disk.commit

    def commit_slowly(*given: Any) -> Committed:
        done = commit_it(*given)
        there.set()
        assert opened.wait(LONG)
        return done

    monkeypatch.setattr(rig.disk, "commit", commit_slowly)
    rig.stage(10, 0)
    rig.stage(10, 1)
    assert there.wait(LONG)
    rig.queue.end_round(resumed="step-00000010.r0")
    opened.set()
    wait_until(lambda: rig.rules.done == ["step-00000010.r0"], LONG)
    assert "not committed" not in caplog.text
    assert rig.queue.record()["problem"] == ""


def test_a_round_that_keeps_its_workers_goes_on_with_what_is_whole(rig: Rig) -> None:
    """A save that lacks a shard comes to nothing; nobody is told, since the ranks begin anew."""
    gate = Gate(rig, 0)
    for rank in (0, 1):
        rig.stage(10, rank)
    rig.stage(20, 1, "v")
    rig.queue.leave(0)
    rig.queue.end_round(whole=True)
    rig.queue.join(1)
    gate.opened.set()
    done = rig.queue.wait(1, LONG)
    assert done is not None and done.name == "step-00000010.r0" and rig.names == [done.name]


@pytest.mark.slow
def test_storage_that_hangs_for_good(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call says so; memory that is still read is never given out."""
    monkeypatch.setattr(inflight, "WRITE_DEADLINE_S", 0.05)
    gate = Gate(rig, 0)
    rig.stage(10, 0)
    rig.stage(10, 1)
    for _ in range(2):
        with pytest.raises(SaveError, match="hang"):
            rig.begin(0)
    gate.opened.set()


@pytest.mark.slow
def test_a_part_that_never_comes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank lives, and does not save: whoever waits learns of it."""
    monkeypatch.setattr(inflight, "SHARD_DEADLINE_S", 0.05)
    rig.stage(10, 0)
    with pytest.raises(SaveError, match="rank 1 staged no shard within"):
        rig.begin(0)


def test_another_node_that_writes_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so all the time: the deadline begins anew with each word, and ends with the last."""
    monkeypatch.setattr(inflight, "SHARD_DEADLINE_S", 100.0)
    ahead = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(inflight, "time", clock)
    monkeypatch.setattr(savequeue, "time", clock)
    rig = Rig(tmp_path, ranks=(0,))
    stage = rig.shard(10, 1).stage
    rig.stage(10, 0)
    for _ in range(3):
        ahead += 70.0
        rig.queue.writing_elsewhere(stage, 1, 2)
        assert not rig.queue.begin(0, True, 0.05)
    ahead += 101.0
    with pytest.raises(SaveError, match="rank 1 staged no shard within 100 s"):
        rig.begin(0)


def test_who_commits_hears_of_a_write_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the storage takes something; one rank of two is here, so another waits."""
    monkeypatch.setattr(savequeue, "REPORT_S", 0.02)
    rig = Rig(tmp_path, ranks=(1,))
    rig.rules.chief = False
    gate = Gate(rig, 1)
    rig.stage(10, 1)
    wait_until(lambda: rig.rules.calls.count(("writing", 1)) > 2, LONG)
    monkeypatch.setattr(inflight, "WRITE_DEADLINE_S", 0.0)
    wait_until(lambda: _silent(rig.rules.calls), LONG)
    gate.opened.set()
    wait_until(lambda: ("written", 1) in rig.rules.calls, LONG)


def _silent(calls: list[tuple[str, int]]) -> bool:
    before = len(calls)
    time.sleep(0.2)
    return len(calls) == before


@pytest.mark.slow
def test_a_write_that_gets_on_is_no_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes in all."""
    monkeypatch.setattr(inflight, "WRITE_DEADLINE_S", 2.0)
    monkeypatch.setattr(atonce, "STEP", 1)
    monkeypatch.setattr(durable, "STEP", 1)
    rig, write = Rig(tmp_path, ranks=(0,), world=1), os.writev
    steps = itertools.count()

    def slow(descriptor: int, batch: list[memoryview]) -> int:
        if next(steps) < 8:  # the bytes of the part
            threading.Event().wait(0.5)
        return write(descriptor, batch)

    monkeypatch.setattr(os, "writev", slow)
    begun = time.monotonic()
    rig.stage(10, 0)
    assert rig.begin(0)
    assert time.monotonic() - begun > 2.0 and rig.names == ["step-00000010.r0"]


def test_a_round_that_is_over_commits_nothing(rig: Rig) -> None:
    """The stage is left, whole, to who chooses the next checkpoint."""
    rig.rules.refusal = "the job is in round 1"
    with pytest.raises(SaveError, match="the job is in round 1"):
        rig.saved(10)
    assert rig.names == []
    assert rig.stages == ["step-00000010.r0.u"]
    (done,) = rig.disk.finish_stages(RUN)
    assert done.name == "step-00000010.r0"


def test_a_stage_that_another_process_commits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that one's: what it gives back is finished by who chooses the next checkpoint."""
    monkeypatch.setattr(commit, "_SETTLE", 0.05)
    gate = Gate(rig, 1)
    rig.stage(10, 0)
    wait_until(lambda: 0 in rig.disk.manifests(Stage(10, 0, "u")), LONG)
    rig.stage(10, 1)
    assert gate.waiting.wait(LONG)
    claims = []

    def claim_first(path: Path) -> Path:
        claims.append(path.rename(path.with_name(layout.claim_name(path.name))))
        raise FileNotFoundError(path)

    monkeypatch.setattr(commit, "_claim", claim_first)
    gate.opened.set()
    with pytest.raises(SaveError, match="another process is at work"):
        rig.queue.wait(0, LONG)
    wait_until(lambda: not rig.queue.is_open(Stage(10, 0, "u")), LONG)
    monkeypatch.undo()
    assert rig.stages == [claims[0].name]
    claims[0].rename(claims[0].with_name("step-00000010.r0.u"))
    rig.queue.abandon(0)
    (done,) = rig.disk.finish_stages(RUN)
    assert done.step == 10


def test_a_commit_under_way_may_be_taken_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look before the next round does not skip what is complete; both get the checkpoint."""
    held, go_on = threading.Event(), threading.Event()

    def fence(_: int) -> None:
        held.set()
        assert go_on.wait(LONG)

    monkeypatch.setattr(rig.rules, "fence", fence)
    rig.stage(10, 0)
    rig.stage(10, 1)
    assert held.wait(LONG)
    (done,) = rig.disk.finish_stages(RUN, rig.queue.unfinished())
    go_on.set()
    assert rig.queue.wait(0, LONG) == done


def test_a_look_while_ranks_live_leaves_their_saves_alone(rig: Rig) -> None:
    """Workers that stay may hand the rest over; at the end of a round nothing comes any more."""
    rig.stage(10, 0)
    wait_until(lambda: 0 in rig.disk.manifests(Stage(10, 0, "u")), LONG)
    assert rig.disk.finish_stages(RUN, rig.queue.unfinished()) == []
    rig.stage(10, 1)
    assert rig.queue.wait(0, LONG) is not None
    rig.stage(20, 0)
    rig.queue.wake()
    wait_until(lambda: not rig.queue.unfinished(), LONG)
    assert rig.disk.finish_stages(RUN, rig.queue.unfinished()) == []
    assert rig.stages == []


def test_the_same_part_twice(rig: Rig) -> None:
    """A defect of the caller's, told as one."""
    gate = Gate(rig, 0)
    rig.stage(10, 0)
    with pytest.raises(SaveError, match="staged its shard before"):
        rig.stage(10, 0)
    gate.opened.set()


# ── several nodes ────────────────────────────────────────────────────────────────────────────────


def test_the_node_of_rank_0_commits(tmp_path: Path) -> None:
    """When it has heard of all manifests; the other node is done when it has told of its own."""
    here, there = Rig(tmp_path, (0,)), Rig(tmp_path, (1,))
    there.rules.chief = False
    there.stage(10, 1)
    assert there.queue.wait(1, LONG) is None
    assert ("written", 1) in there.rules.calls
    here.stage(10, 0)
    wait_until(lambda: ("written", 0) in here.rules.calls, LONG)
    stage = Stage(10, 0, "u")
    here.queue.written_elsewhere(stage, 1, 2, here.disk.manifests(stage)[1])
    done = here.queue.wait(0, LONG)
    assert done is not None
    assert sorted(path.name for path in Path(done.place).glob("part-*")) == ["part-0", "part-1"]


def test_seals_may_come_before_the_own_part(tmp_path: Path) -> None:
    """The other node was faster."""
    here, there = Rig(tmp_path, (0,)), Rig(tmp_path, (1,))
    there.rules.chief = False
    there.stage(10, 1)
    there.queue.wait(1, LONG)
    stage = Stage(10, 0, "u")
    here.queue.written_elsewhere(stage, 1, 2, here.disk.manifests(stage)[1])
    here.stage(10, 0)
    assert here.queue.wait(0, LONG) is not None


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_on_another_node(tmp_path: Path, first: bool) -> None:
    """Before or after the own part was handed over."""
    here = Rig(tmp_path, (0,))
    if first:
        here.queue.failed_elsewhere(Stage(10, 0, "u"), "rank 1: no space left")
    here.stage(10, 0)
    if not first:
        here.queue.failed_elsewhere(Stage(10, 0, "u"), "rank 1: no space left")
    with pytest.raises(SaveError, match="rank 1: no space left"):
        here.queue.wait(0, LONG)
    wait_until(lambda: not here.stages, LONG)


def test_the_end_of_a_round_leaves_other_nodes_parts_to_the_next_choice(tmp_path: Path) -> None:
    """The agent does not wait for a node that may be dead, but at the end of the job."""
    here, there = Rig(tmp_path, (0,)), Rig(tmp_path, (1,))
    there.rules.chief = False
    here.stage(10, 0)
    settled = here.queue.settle(time.monotonic() + LONG)
    assert (settled.committed, settled.lost) == ((), ())
    there.stage(10, 1)
    there.queue.settle(time.monotonic() + LONG)
    (done,) = here.disk.finish_stages(RUN)
    assert done.step == 10


def test_a_copy_of_a_dead_nodes_part_is_written_though_ours_is_long_done(tmp_path: Path) -> None:
    """Not the committer: what is complete then is committed by who chooses the next checkpoint."""
    rig = Rig(tmp_path, ranks=(1,))
    rig.rules.chief = False
    assert rig.begin(1)
    rig.stage(7, 1)
    rig.queue.wait(1, LONG)
    rig.stage(7, 0)  # a rank that has not joined here: its node has died
    rig.queue.settle(time.monotonic() + LONG)
    assert set(rig.disk.manifests(Stage(7, 0, "u"))) == {0, 1}
    (done,) = rig.disk.finish_stages(RUN, rig.queue.unfinished())
    assert done.step == 7


def test_a_directory_on_each_node(tmp_path: Path) -> None:
    """Each commits what it has, with the manifests of all."""
    rigs = [Rig(tmp_path / str(rank), (rank,)) for rank in (0, 1)]
    for rank, rig in enumerate(rigs):
        rig.disk = Disk(rig.root, local=True)
        rig.queue = SaveQueue(rig.disk, rig.rules)
        rig.queue.join(rank)
        rig.queue.stage(rig.shard(10, rank, local=True), memoryview(b"12345678"))()
    stage = Stage(10, 0, "u")
    manifests = {}
    for rank, rig in enumerate(rigs):
        wait_until(lambda rank=rank, rig=rig: rank in rig.disk.manifests(stage), LONG)
        manifests[rank] = rig.disk.manifests(stage)[rank]
    for rank, rig in enumerate(rigs):
        rig.queue.written_elsewhere(stage, 1 - rank, 2, manifests[1 - rank])
    done = [rig.queue.wait(rank, LONG) for rank, rig in enumerate(rigs)]
    digests = [(Path(each.place) / "COMMIT").read_text() for each in done if each is not None]
    assert len(digests) == 2
    assert [rig.names for rig in rigs] == [["step-00000010.r0"]] * 2


def test_a_copy_that_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    """Its own node may have written the part: the save goes on, nobody is told that it failed."""
    rig = Rig(tmp_path, ranks=(0,))
    breaks(rig, errno.EIO, 1)
    rig.stage(7, 0)
    rig.queue.join(1)  # a worker of the next round, which has this rank now
    rig.stage(7, 1)  # another node's
    settled = rig.queue.settle(time.monotonic() + LONG)
    assert (settled.committed, settled.lost) == ((), ())
    assert ("failed", 1) not in rig.rules.calls
    there = Rig(tmp_path, (1,))
    there.rules.chief = False
    there.stage(7, 1)
    there.queue.wait(1, LONG)
    stage = Stage(7, 0, "u")
    rig.queue.written_elsewhere(stage, 1, 2, there.disk.manifests(stage)[1])
    assert rig.queue.wait(0, LONG) is not None


def test_a_copy_tells_no_times(tmp_path: Path) -> None:
    """The node whose part it is may write the same file after it, and names the same host."""
    rig = Rig(tmp_path, ranks=(1,))
    rig.rules.chief = False
    rig.stage(7, 1)
    rig.stage(7, 0)
    rig.queue.settle(time.monotonic() + LONG)
    written = rig.disk.manifests(Stage(7, 0, "u"))
    times = {rank: decode(written[rank], rank).files[0].mtime_ns is None for rank in written}
    assert times == {0: True, 1: False}
    os.utime(tmp_path / ".stage" / Stage(7, 0, "u").name / "part-0", ns=(1, 1))
    assert rig.disk.commit(Stage(7, 0, "u"), lambda: None).step == 7


def test_a_directory_that_has_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The ranks are told that it has; of what was in it nothing is said, and it is not made."""
    rig = Rig(tmp_path / "ck")
    assert rig.saved(10) is not None
    rig.root.rename(tmp_path / "away")
    rig.root.mkdir()
    caplog.clear()
    for rank in rig.ranks:
        rig.stage(20, rank)
    for rank in rig.ranks:
        with pytest.raises(SaveError, match="is not the directory that this job began with"):
            rig.queue.wait(rank, LONG)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "run.json is gone; was it unmounted or removed?): nothing is saved there" in said
    assert "untouched" not in said and "its round is over" not in said
    assert os.listdir(rig.root) == []
    rig.root.rmdir()
    (tmp_path / "away").rename(rig.root)  # mounted again
    assert rig.saved(30) is not None


def test_a_save_is_written_where_no_thread_can_be_started(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would write it, and the next save would wait for it."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert rig.saved(10)
    assert rig.saved(20)
    assert rig.names == ["step-00000010.r0", "step-00000020.r0"]


def test_a_round_that_begins_while_a_manifest_is_sent(rig: Rig) -> None:
    """It went to the node that committed before: the one that does now is sent it, too."""
    rig.rules.chief = False
    again = partial(rig.queue.send_manifests, "u")

    def begin() -> None:
        rig.rules.on_written = lambda: None
        rig.queue.end_round("u")
        again()

    rig.rules.on_written = begin
    assert rig.begin(0)
    rig.stage(10, 0)
    wait_until(lambda: not rig.queue.unfinished(), LONG)
    assert rig.rules.calls.count(("written", 0)) == 2


def test_the_end_of_the_job_waits_for_what_is_removed(rig: Rig) -> None:
    """The ranks do not: their save is on the disk."""
    goes, closed = threading.Event(), threading.Event()
    rig.rules.on_committed = lambda: goes.wait(LONG)
    assert rig.saved(10) is not None

    def close() -> None:
        rig.queue.close(time.monotonic() + LONG)
        assert rig.rules.done == ["step-00000010.r0"]
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert not closed.wait(0.2)
    goes.set()
    assert closed.wait(LONG)
