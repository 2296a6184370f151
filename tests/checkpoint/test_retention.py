"""What may go and what must stay; the removal itself on a shelf that fails on demand."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint import layout, retention, shelves
from elaunch.checkpoint.records import Committed, Keep, ReadBefore
from elaunch.checkpoint.retention import Retiring, decide
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Storage
from tests.checkpoint import makers, storages
from tests.opens import opened_below
from tests.tables import each

NAN, INF = math.nan, math.inf


def made(step: int, round_: int = 0, **metrics: float) -> Committed:
    """Return a committed checkpoint that is nowhere."""
    name = layout.step_name(step, round_)
    return Committed(name, Path("/c") / name, step, round_, f"u{step}", {}, 10, metrics=metrics)


def left(listed: Iterable[Committed], rule: Keep, protected: Iterable[str] = ()) -> list[str]:
    """Return steps (and rounds) that stay, from old to new: "120.r3"."""
    listed = list(listed)
    gone = {found.name for found, _ in decide(listed, rule, set(protected))}
    staying = sorted((c for c in listed if c.name not in gone), key=lambda c: c.age)
    return [f"{c.step}.r{c.round}" if c.round else str(c.step) for c in staying]


TENS = [made(step) for step in range(10, 101, 10)]
GRADED = [made(1, loss=3.0), made(2, loss=1.0), made(3, loss=2.0), made(4, acc=9.0), made(5)]


@each(
    ("listed", "rule", "protected", "stays"),
    [
        (TENS, Keep(), [], "10 20 30 40 50 60 70 80 90 100"),
        (TENS, Keep(last=3), [], "80 90 100"),
        (TENS, Keep(last=99), [], "10 20 30 40 50 60 70 80 90 100"),
        (TENS, Keep(last=1), [], "100"),
        (TENS, Keep(every=30), [], "30 60 90 100"),
        (TENS, Keep(every=1000), [], "100"),
        (TENS, Keep(last=2, every=50), [], "50 90 100"),
        (TENS, Keep(last=1), ["step-00000020.r0"], "20 100"),
        (TENS, Keep(last=1), ["step-00000020.r7", "other"], "100"),
        (GRADED, Keep(best="loss"), [], "2 5"),
        (GRADED, Keep(best="loss", mode="max"), [], "1 5"),
        (GRADED, Keep(best="acc", mode="max"), [], "4 5"),
        (GRADED, Keep(best="nobody reported this"), [], "5"),
        (GRADED, Keep(last=2, best="loss"), [], "2 4 5"),
        ([made(1, loss=NAN), made(2, loss=8.0), made(3)], Keep(best="loss"), [], "2 3"),
        ([made(1, loss=INF), made(2, loss=8.0), made(3)], Keep(best="loss"), [], "2 3"),
        ([made(1, loss=INF), made(2)], Keep(best="loss"), [], "2"),
        ([made(1, acc=INF), made(2)], Keep(best="acc", mode="max"), [], "1 2"),
        ([made(1, loss=NAN), made(2, loss=NAN)], Keep(best="loss"), [], "2"),
        ([made(1, loss=1), made(2, loss=1), made(3, loss=2)], Keep(best="loss"), [], "2 3"),
        # of one step: the later round is newer, and each counts
        ([made(9), made(9, 2), made(9, 1)], Keep(last=1), [], "9.r2"),
        ([made(9), made(9, 2), made(9, 1)], Keep(last=2), [], "9.r1 9.r2"),
        ([made(9), made(9, 2), made(8, 5)], Keep(every=9), [], "9 9.r2"),
        ([made(0), made(7), made(8)], Keep(every=5), [], "0 8"),
        ([], Keep(last=1), [], ""),
        ([made(4)], Keep(last=1), [], "4"),
    ],
)
def test_what_stays(listed: list[Committed], rule: Keep, protected: list[str], stays: str) -> None:
    """The table; the order in which they are listed plays no part."""
    assert left(listed, rule, protected) == stays.split()
    assert left(reversed(listed), rule, protected) == stays.split()


def test_a_text_for_a_metric_is_never_the_best() -> None:
    """``metadata.json`` may say anything."""
    odd = made(1, loss=cast(Any, "0.1"))
    assert left([odd, made(2, loss=5.0), made(3)], Keep(best="loss")) == ["2", "3"]


CHECKPOINTS = st.lists(
    st.builds(
        lambda step, round_, loss: made(step, round_, **({} if loss is None else {"loss": loss})),
        st.integers(0, 40),
        st.integers(0, 3),
        st.none() | st.floats(),
    ),
    unique_by=lambda found: found.name,
    max_size=12,
)
PART = st.none() | st.integers(1, 15)
RULES = st.builds(Keep, PART, PART, st.none() | st.just("loss"), st.sampled_from(["min", "max"]))


@pytest.mark.slow
@given(CHECKPOINTS, RULES, st.data())
def test_what_never_goes(listed: list[Committed], rule: Keep, data: st.DataObject) -> None:
    """The newest, what is protected, what a part of the rule keeps; and nothing unlisted goes."""
    names = [found.name for found in listed]
    protected = data.draw(st.sets(st.sampled_from(names))) if names else set()
    going = [found for found, _ in decide(listed, rule, protected)]
    gone = {found.name for found in going}
    ordered = sorted(listed, key=lambda found: found.age)
    assert gone <= set(names) - protected and len(gone) == len(going)
    assert going == sorted(going, key=lambda found: found.age)
    if ordered:
        assert ordered[-1].name not in gone
    if not rule:
        assert not gone
    if rule.last is not None:
        assert not gone & {found.name for found in ordered[-rule.last :]}
    if rule.every is not None:
        assert not gone & {found.name for found in listed if found.step % rule.every == 0}
    if rule.best is not None:
        numbers = [f for f in listed if math.isfinite(f.metrics.get("loss", math.nan))]
        worth = [f.metrics["loss"] for f in numbers if f.name not in gone]
        pick = min if rule.mode == "min" else max
        if numbers and not any(math.isinf(f.metrics.get("loss", 0.0)) for f in listed):
            assert pick(worth) == pick(f.metrics["loss"] for f in numbers)


@pytest.mark.slow
@given(CHECKPOINTS, RULES)
def test_once_is_enough(listed: list[Committed], rule: Keep) -> None:
    """What stays, stays at the next look."""
    gone = {found.name for found, _ in decide(listed, rule, ())}
    assert decide([found for found in listed if found.name not in gone], rule, ()) == []


class Shelf:
    """A storage that holds records only; ``fails`` maps names to the error of their removal."""

    def __init__(self, place: Path, listed: Iterable[Committed]) -> None:
        self.place = place
        self.there = list(listed)
        self.fails: dict[str, OSError] = {}
        self.problem: OSError | None = None
        self.cleared = 0

    def listed(self, known: ReadBefore | None = None) -> list[Committed]:
        """Return what is there."""
        del known
        if self.problem:
            raise self.problem
        return sorted(self.there, key=lambda found: found.age)

    def remove(self, found: Committed) -> None:
        """Take one away."""
        if found.name in self.fails:
            raise self.fails[found.name]
        self.there.remove(found)

    def clear_trash(self) -> None:
        """Count the calls."""
        self.cleared += 1

    @property
    def storage(self) -> Storage:
        """As those take it that need no more of a storage than this."""
        return cast(Storage, self)

    @property
    def steps(self) -> list[int]:
        """What is left."""
        return [found.step for found in self.listed()]


def test_what_may_go_is_removed(tmp_path: Path) -> None:
    """By the rule, but for what is pinned or protected."""
    shelf = Shelf(tmp_path, TENS)
    shelves.pin(tmp_path, "step-00000010.r0")
    removed = Retiring(shelf.storage, Keep(last=2)).apply(None, {"step-00000030.r0"})
    assert removed == [layout.step_name(step, 0) for step in (20, 40, 50, 60, 70, 80)]
    assert shelf.steps == [10, 30, 90, 100]
    shelves.unpin(tmp_path, "step-00000010.r0")
    assert Retiring(shelf.storage, Keep(last=2)).apply(None, ()) == [
        "step-00000010.r0",
        "step-00000030.r0",
    ]
    assert Retiring(shelf.storage, Keep()).apply(None, ()) == []


def test_a_removal_that_fails_is_told_and_the_rest_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save never fails for it."""
    shelf = Shelf(tmp_path, TENS[:4])
    shelf.fails["step-00000020.r0"] = PermissionError(errno.EACCES, "Permission denied", "x")
    with caplog.at_level(logging.WARNING, "elaunch"):
        assert Retiring(shelf.storage, Keep(last=1)).apply(None, ()) == [
            "step-00000010.r0",
            "step-00000030.r0",
        ]
    assert "step-00000020.r0 cannot be removed: [Errno 13]" in caplog.text
    shelf.problem = OSError(errno.EIO, "Input/output error", "y")
    assert Retiring(shelf.storage, Keep(last=1)).apply(None, ()) == []
    assert "cannot tell which checkpoints may go" in caplog.text


def test_room_is_made_from_the_oldest_on_and_no_more_than_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coming checkpoint counts as one of the newest, and one always stays."""
    shelf = Shelf(tmp_path, TENS[:5])

    def free(_: Path | str) -> float:
        return 100.0 + 10.0 * (5 - len(shelf.there))

    monkeypatch.setattr(retention, "free_bytes", free)
    # A write has failed: one goes, though by the estimate there is room.
    assert Retiring(shelf.storage, Keep(last=2)).make_room(None, 100, ()) == ["step-00000010.r0"]
    assert shelf.cleared == 1 and len(shelf.there) == 4
    assert Retiring(shelf.storage, Keep(last=2)).make_room(None, 120, ()) == ["step-00000020.r0"]
    assert len(Retiring(shelf.storage, Keep(last=2)).make_room(None, 10**9, ())) == 2
    assert shelf.steps == [50]
    assert Retiring(shelf.storage, Keep(last=1)).make_room(None, 10**9, ()) == []
    assert Retiring(shelf.storage, Keep()).make_room(None, 10**9, ()) == []


def test_in_a_real_directory(tmp_path: Path) -> None:
    """What goes is gone from the disk; what somebody reads stays for this time."""
    storage = PosixStorage(tmp_path)
    storage.prepare("digits", given=True)
    for step in (10, 20, 30, 40):
        storages.save(storage, step)
    with retention.reading(tmp_path / "step-00000020.r3"):
        assert Retiring(storage, Keep(last=1)).apply(None, ()) == [
            "step-00000010.r3",
            "step-00000030.r3",
        ]
    assert [found.step for found in storage.listed()] == [20, 40]
    assert os.listdir(tmp_path / layout.TRASH) == []
    assert Retiring(storage, Keep(last=1)).apply(None, ()) == ["step-00000020.r3"]
    storage.verify(storage.listed()[0])


@pytest.mark.slow
def test_what_was_read_once_is_not_read_again(tmp_path: Path) -> None:
    """However many checkpoints there are, a commit opens its own, and what it removes."""
    storage = PosixStorage(tmp_path)
    storage.prepare("digits", given=True)
    for step in range(100):
        makers.own(tmp_path, step)
    retiring = Retiring(storage, Keep(last=1, every=10, best="loss"))
    retiring.apply(None, ())
    assert len(storage.listed()) == 11
    for step in (100, 101):
        done = storages.save(storage, step)
        with opened_below(tmp_path) as opened:
            retiring.apply(None, {done.name})
        read = [path for path in opened if path.startswith("step-")]
        assert [path for path in read if not path.endswith(layout.COMMIT)] == [
            f"{done.name}/metadata.json"
        ]
    os.rename(tmp_path / "step-00000100.r3", tmp_path / "aside")  # another process's work
    again = storages.save(storage, 100)
    with opened_below(tmp_path) as opened:
        assert retiring.apply(Keep(every=1), ()) == []
    assert [path for path in opened if path.startswith("step-")] == [f"{again.name}/metadata.json"]


def test_the_room_of_a_file_system(tmp_path: Path) -> None:
    """What this user may use; nobody knows of a URL."""
    room = os.statvfs(tmp_path)
    assert 0 < retention.free_bytes(tmp_path) <= room.f_blocks * room.f_frsize
    assert retention.free_bytes("memory://x") == math.inf


REAL_FLOCK, REAL_OPEN = fcntl.flock, os.open


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a checkpoint of which only COMMIT is there."""
    (tmp_path / layout.COMMIT).write_text("{}")
    return tmp_path


def nfs_flock(descriptor: int, kind: int) -> None:
    """Lock as the Linux client of NFS does: flock(2), "NFS details"."""
    mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    if kind & fcntl.LOCK_EX and mode == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    REAL_FLOCK(descriptor, kind)


def is_free(place: Path) -> bool:
    """Return what who wants to delete is told."""
    with retention.claimed(place) as free:
        return free


@pytest.mark.parametrize("flock", [REAL_FLOCK, nfs_flock], ids=["local", "nfs"])
def test_a_reader_is_seen(place: Path, monkeypatch: pytest.MonkeyPatch, flock: Any) -> None:
    """As long as it reads, and no one begins to read what is being deleted."""
    monkeypatch.setattr(fcntl, "flock", flock)
    with retention.reading(place), retention.reading(place):
        assert not is_free(place)
    with retention.claimed(place) as free:
        assert free
        with pytest.raises(FileNotFoundError, match="being deleted"), retention.reading(place):
            pytest.fail("it is being deleted")


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
def test_who_may_not_write(place: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    """Sees readers where locks need no more than reading; on NFS it deletes nothing."""

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(reason, os.strerror(reason), str(path))
        return REAL_OPEN(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    with retention.reading(place):
        assert not is_free(place)
    assert is_free(place)
    monkeypatch.setattr(fcntl, "flock", nfs_flock)
    assert not is_free(place)


def test_no_locks_at_all(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is seen to read, and what is gone is nobody's."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with retention.reading(place):
        assert is_free(place)
    assert is_free(place / "gone")


@pytest.mark.parametrize("locks", [retention.reading, retention.claimed])
def test_a_pipe_in_the_place_of_the_commit_holds_nobody_up(
    tmp_path: Path, locks: Callable[[Path], AbstractContextManager[object]]
) -> None:
    """Nobody ever opens its other end; what is wrong with it others say."""
    os.mkfifo(tmp_path / layout.COMMIT)
    done = threading.Event()

    def lock() -> None:
        with locks(tmp_path):
            done.set()

    threading.Thread(target=lock, daemon=True).start()
    assert done.wait(20.0)
