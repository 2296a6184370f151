"""The saver of a rank without an agent: real directory, ranks as threads' objects."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.checkpoint.records import Part, Stage
from elaunch.checkpoint.storage.objects import Objects
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Location, open_storage
from elaunch.checkpoint.storage.url import ObjectStorage
from elaunch.checkpoint.writing import inflight, queue
from elaunch.errors import SaveError
from elaunch.training.agentlink import AgentLink
from elaunch.training.checkpoint.saver import local
from elaunch.training.checkpoint.saver.choose import open_saver
from elaunch.training.checkpoint.saver.local import LocalSaver
from elaunch.wire.progress import ProgressPage
from elaunch.wire.saver import Handed
from tests.launching import wait_until

LONG = 60.0


def keepers(place: Location, ranks: int = 2) -> list[LocalSaver]:
    """Return the savers of all ranks, at one place."""
    open_storage(place).prepare("digits", given=True)
    ring = Ring(ranks)
    each: list[Any] = [Rank(rank, ring) for rank in range(ranks)]
    made = [open_saver(rank, open_storage(place), 0, link=None) for rank in each]
    assert all(isinstance(saver, LocalSaver) for saver in made)
    return made  # type: ignore[return-value]


class Ring:
    """What the ranks, which are threads, say to each other; ``gone`` are those that have ended."""

    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self.meet = threading.Barrier(size)
        self.gone: set[int] = set()


@dataclass
class Rank:
    """As much of a DistributedContext as a saver needs."""

    rank: int
    ring: Ring
    launcher: str = "torchrun"

    @property
    def placement(self) -> Any:
        return SimpleNamespace(
            launcher=self.launcher, round=0, rank=self.rank, local_rank=self.rank
        )

    def allgather(self, said: Any, _: float) -> list[Any]:
        self.ring.said[self.rank] = said
        self.ring.meet.wait(LONG)
        return list(self.ring.said)

    def gone(self, ranks: list[int], _: float) -> list[int]:
        return [rank for rank in ranks if rank in self.ring.gone]


def save(saver: LocalSaver, rank: int, step: int, **fields: Any) -> None:
    """Leave one rank's part in its memory."""
    assert saver.begin(True, LONG)
    saver.memory(8)[:8] = b"%04d%04d" % (step, rank)
    part = Part(rank, 2, "digits", {"steps_completed": step})
    saver.staged(Handed(Stage(step, 0, f"u{step}"), part, ((f"p{rank}", ((0, 8),)),), **fields))


def test_rank_0_commits_when_all_have_sealed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It sees the others' seals in the stage; what a killed worker loses is said once."""
    both = keepers(tmp_path)
    with caplog.at_level(logging.WARNING, "elaunch"):
        for step in (10, 20):
            for rank in (1, 0):
                save(both[rank], rank, step)
            done = both[0].wait(LONG)
            assert done is not None
            assert done.step == step
            assert both[1].wait(LONG) is None
    assert caplog.text.count("no agent writes this job's checkpoints") == 1
    assert (tmp_path / "step-00000020.r0" / "p1").read_bytes() == b"00200001"
    assert both[0].recall(20, 0, [0, 1]) == {}
    for saver in both:
        saver.close()


def test_rank_0_waits_for_the_slow(tmp_path: Path) -> None:
    """The commit comes with the last part."""
    both = keepers(tmp_path)
    save(both[0], 0, 10)
    with pytest.raises(SaveError, match=r"step-00000010\.r0 is not committed after 0\.05 s"):
        both[0].wait(0.05)
    assert not both[0].begin(False)
    save(both[1], 1, 10)
    assert both[0].wait(LONG) is not None


def test_a_rank_that_cannot_write_tells_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for its deadline; nothing is committed, no stage is left."""
    fail_on(monkeypatch, PosixStorage, 1)
    both = keepers(tmp_path)
    for rank in (0, 1):
        save(both[rank], rank, 10)
    for saver in both:
        with pytest.raises(SaveError, match="rank 1: Input/output error"):
            saver.wait(LONG)
    wait_until(lambda: os.listdir(tmp_path / ".stage") == [], LONG)


def fail_on(monkeypatch: pytest.MonkeyPatch, storage: Any, rank: int, words: bool = True) -> None:
    """Have the storage fail under one rank; without ``words`` it cannot leave word there either."""
    write, put = storage.write_part, storage.put_failure

    def fail(self: Any, stage: Stage, part: Part, images: Any) -> bytes:
        if part.rank == rank:
            raise OSError(errno.EIO, "Input/output error", "/disk")
        return bytes(write(self, stage, part, images))

    def put_failure(self: Any, stage: Stage, rank: int, problem: str) -> None:
        if not words:
            raise OSError(errno.EIO, "Input/output error", "/disk")
        put(self, stage, rank, problem)

    monkeypatch.setattr(storage, "write_part", fail)
    monkeypatch.setattr(storage, "put_failure", put_failure)


def test_a_rank_that_cannot_write_to_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves word there, too."""
    fail_on(monkeypatch, ObjectStorage, 1)
    url = f"memory://{uuid.uuid4().hex}"
    both = keepers(url)
    for rank in (0, 1):
        save(both[rank], rank, 10)
    for saver in both:
        with pytest.raises(SaveError, match=r"step-00000010\.r0 .*rank 1: Input/output error"):
            saver.wait(LONG)
    storage = open_storage(url)
    wait_until(lambda: not storage.failures(Stage(10, 0, "u10")), LONG)
    assert storage.listed() == []


@pytest.mark.parametrize("at_url", [False, True], ids=["directory", "url"])
def test_a_rank_that_cannot_leave_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_url: bool
) -> None:
    """The next call of all ranks tells rank 0, which waits no longer; and the one after works."""
    fail_on(monkeypatch, ObjectStorage if at_url else PosixStorage, 1, words=False)
    both = keepers(f"memory://{uuid.uuid4().hex}" if at_url else tmp_path)
    for rank in (0, 1):
        save(both[rank], rank, 10)
    told = []

    def wait(saver: LocalSaver) -> None:
        saver.share(True, LONG)
        with pytest.raises(SaveError, match="rank 1: Input/output error") as raised:
            saver.wait(LONG)
        told.append(raised.value)
        saver.share(False, LONG)
        assert saver.begin(True, LONG)

    threads = [threading.Thread(target=wait, args=(saver,)) for saver in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(told) == 2


def test_a_rank_that_ended_before_its_part_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which closes, does not wait for the deadline of the parts; it names the rank."""
    monkeypatch.setattr(local, "ASK_S", 0.05)
    monkeypatch.setattr(local, "GONE_S", 0.1)
    both = keepers(tmp_path)
    save(both[0], 0, 10)
    both[0]._distributed.ring.gone.add(1)  # type: ignore[attr-defined]
    with pytest.raises(SaveError, match="rank 1: it ended before its part was on the disk"):
        both[0].close()


def test_an_agent_that_cannot_be_reached(tmp_path: Path) -> None:
    """No socket, nobody behind it, no variable: this process writes, and says what it lacks."""
    rank: Any = Rank(0, Ring(1), "elaunch")
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(dead))
    page = ProgressPage()
    for path, words in (
        (tmp_path / "none.sock", "none.sock: No such file"),
        (dead, "dead.sock: Connection refused"),
        (None, "ELAUNCH_AGENT_SOCKET is not set"),
    ):
        link = None if path is None else AgentLink(path, page, rank.placement)
        if link is not None:
            link.start()
        saver = open_saver(rank, open_storage(tmp_path), 0, link=link)
        assert isinstance(saver, LocalSaver)
        assert words in saver.lacks
        saver.fence(0)
    page.close()


def test_a_rank_that_never_hands_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is told after the deadline."""
    monkeypatch.setattr(inflight, "PART_DEADLINE_S", 0.05)
    both = keepers(tmp_path)
    save(both[0], 0, 10)
    with pytest.raises(SaveError, match="rank 1 handed over no part"):
        both[0].wait(LONG)


def test_closing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process would end the writing."""
    write, opened = PosixStorage.write_part, threading.Event()

    def slow(*args: Any) -> bytes:
        assert opened.wait(LONG)
        return write(*args)

    monkeypatch.setattr(PosixStorage, "write_part", slow)
    both = keepers(tmp_path)
    for rank in (0, 1):
        save(both[rank], rank, 10)
    began = time.monotonic()
    threading.Timer(0.1, opened.set).start()
    for saver in reversed(both):
        saver.close()
    assert time.monotonic() - began >= 0.1
    assert [found.step for found in open_storage(tmp_path).listed()] == [10]


def test_retention_by_the_flags_rule_and_the_saves_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``keep`` of a save goes before what the variable says."""
    monkeypatch.setenv("ELAUNCH_CHECKPOINT_KEEP", '{"last": 2}')
    both = keepers(tmp_path)

    def steps() -> list[int]:
        return [found.step for found in open_storage(tmp_path).listed()]

    for step in (10, 20, 30):
        for rank in (1, 0):
            save(both[rank], rank, step)
        both[0].wait(LONG)
    wait_until(lambda: steps() == [20, 30], LONG)
    for rank in (1, 0):
        save(both[rank], rank, 40, keep={"last": 1})
    both[0].wait(LONG)
    wait_until(lambda: steps() == [40], LONG)


def test_what_needs_an_agent_is_refused(tmp_path: Path) -> None:
    """Each node's own disk: the seals of other nodes cannot be seen."""
    both = keepers(tmp_path)
    with pytest.raises(SaveError, match="elaunch run"):
        save(both[0], 0, 10, local=True)
    both[0].abandon()
    both[0].fence(7)


def test_a_forked_process_closes_nothing(tmp_path: Path) -> None:
    """What is in flight is its parent's."""
    both = keepers(tmp_path)
    save(both[0], 0, 10)
    both[0]._pid = 0
    both[0].close()


@pytest.mark.parametrize("remote", [False, True])
def test_a_rank_that_writes_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """It marks the stage all the time, so rank 0 waits longer than for one that is mute."""
    monkeypatch.setattr(inflight, "PART_DEADLINE_S", 2.0)
    monkeypatch.setattr(queue, "WORD_S", 0.1)
    place: Location = f"memory://{uuid.uuid4().hex}" if remote else tmp_path
    both = keepers(place)
    kind = type(open_storage(place))
    write = kind.write_part

    def slow(self: Any, stage: Stage, part: Part, images: Any) -> bytes:
        if part.rank == 1:
            threading.Event().wait(4.0)
        return write(self, stage, part, images)

    monkeypatch.setattr(kind, "write_part", slow)
    for rank in (0, 1):
        save(both[rank], rank, 10)
    done = both[0].wait(LONG)
    assert done is not None and done.step == 10
    if remote:
        names = list(Objects(str(place)).sizes(""))
        assert names and not [name for name in names if "writing" in name]
    assert not [name for name in tmp_path.rglob("*") if "writing" in name.name]
    for saver in reversed(both):
        saver.close()
