"""What others put into a checkpoint directory that they may write to leads to nobody's files."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from elaunch.checkpoint import layout, probe, shelves
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.errors import SaveError, UsageError
from elaunch.files import NotOwnError, own_directory
from tests import warm
from tests.checkpoint import storages

NAMES = [layout.STAGE, layout.TRASH, layout.QUARANTINE, layout.PINS, layout.PROBE, layout.LOCK]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a directory with somebody's files, all of them old."""
    place = tmp_path / "victim"
    for name in ("thesis.txt", "sub/data.bin", "gather.x/a", "step-00000001.r0.u/COMMIT"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"mine")
        os.utime(place / name, (1.0, 1.0))
    return place


def content(place: Path) -> dict[str, bytes]:
    """Return all files and directories below a place, with what they hold."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else b""
        for path in place.rglob("*")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (layout.STAGE, layout.LOCK) else pytest.mark.trial)
        for name in NAMES
    ],
)
def test_a_job_does_not_begin(name: str, victim: Path, tmp_path: Path) -> None:
    """With 2, before any worker has started; the error names the link."""
    place, before = tmp_path / "ck", content(victim)
    place.mkdir()
    aim = victim / "thesis.txt" if name == layout.LOCK else victim
    (place / name).symlink_to(aim)
    run = [sys.executable, "-m", "elaunch", "run", "--checkpoint-dir", str(place)]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = warm.run([*run, "--no-python", "touch", str(tmp_path / "ran")], environ)
    assert done.returncode == 2, done.stderr
    assert f"{place / name} is not elaunch's: it is a symbolic link; remove it" in done.stderr
    assert content(victim) == before and not (tmp_path / "ran").exists()


Deed = Callable[[PosixStorage], object]
DEEDS: list[tuple[str, Deed]] = [
    (layout.TRASH, lambda storage: storage.clear_trash()),
    (layout.TRASH, lambda storage: storage.remove(storage.listed()[0])),
    (layout.TRASH, lambda storage: storage.discard(left(storage))),
    (layout.TRASH, lambda storage: storage.prepare("digits", True)),
    (layout.STAGE, lambda storage: storage.prepare("digits", True)),
    (layout.STAGE, lambda storage: storage.open_stage(storages.stage(200))),
    (layout.STAGE, lambda storage: storages.save(storage, 200)),
    (layout.STAGE, lambda storage: storage.finish_stages("digits")),
    (layout.QUARANTINE, lambda storage: storage.quarantine(storage.listed()[0], "bits")),
    (layout.QUARANTINE, lambda storage: shelves.put_all_aside(storage.place, [])),
    (layout.PINS, lambda storage: shelves.pin(storage.place, "step-00000120.r3")),
    (layout.PINS, lambda storage: shelves.unpin(storage.place, "step-00000120.r3")),
    (layout.PINS, lambda storage: shelves.pinned(storage.place)),
    (layout.PROBE, lambda storage: probe.leave_mark(storage.place, "n")),
    (layout.LOCK, lambda storage: storage.lock()),
]


def left(storage: PosixStorage) -> Stage:
    """Return a stage that one rank has written."""
    stage = storages.stage(300)
    storages.write(storage, stage, {0: {"a": b"x"}})
    return stage


@pytest.mark.parametrize("number", range(len(DEEDS)))
def test_what_is_planted_while_a_job_runs(number: int, victim: Path, tmp_path: Path) -> None:
    """Each deed is refused; the checkpoint stays."""
    name, deed = DEEDS[number]
    storage, before = PosixStorage(tmp_path / "ck"), content(victim)
    storage.prepare("digits", True)
    storages.save(storage)
    place = storage.place / name
    if place.is_dir():
        place.rename(tmp_path / "was")
    place.symlink_to(victim / "thesis.txt" if name == layout.LOCK else victim)
    with pytest.raises((NotOwnError, UsageError), match="it is a symbolic link"):
        deed(storage)
    assert content(victim) == before
    assert [found.step for found in storage.listed()] == [120]


def test_a_name_is_swapped_while_the_trash_is_emptied(victim: Path, tmp_path: Path) -> None:
    """Whatever is there at the moment: nothing behind the link goes."""
    place, before = tmp_path / "ck", content(victim)
    (place / layout.TRASH).mkdir(parents=True)
    over = threading.Event()

    def swap() -> None:
        trash, aside = place / layout.TRASH, place / "aside"
        while not over.is_set():
            for step in (
                partial(trash.rename, aside),
                partial(trash.symlink_to, victim),
                trash.unlink,
                partial(aside.rename, trash),
            ):
                with contextlib.suppress(OSError):  # another trash has been made meanwhile
                    step()

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(500):
            with contextlib.suppress(OSError):
                (place / f"{number}" / "sub").mkdir(parents=True)
                shelves.throw_away(place, place / f"{number}")
                shelves.empty_trash(place)
    finally:
        over.set()
        thread.join()
    assert content(victim) == before


def test_links_in_place_of_a_checkpoint_and_of_a_stage(victim: Path, tmp_path: Path) -> None:
    """They alone are removed."""
    storage, before = PosixStorage(tmp_path / "ck"), content(victim)
    storage.prepare("digits", True)
    found = storages.save(storage)
    Path(found.place).rename(tmp_path / "was")
    Path(found.place).symlink_to(victim)
    storage.remove(found)
    stage = storages.stage()
    path = storage.place / layout.STAGE / stage.name
    path.symlink_to(victim)
    with pytest.raises(NotOwnError):
        storage.open_stage(stage)
    with pytest.raises(SaveError, match="not committed"):
        storage.commit(stage, lambda: None)
    assert storage.finish_stages("digits", after=stage.round) == []
    (storage.place / layout.TRASH / "x").symlink_to(victim)
    storage.clear_trash()
    assert content(victim) == before
    assert os.listdir(storage.place / layout.STAGE) == os.listdir(storage.place / layout.TRASH)


def test_whole_checkpoints_behind_a_link_are_not_committed(tmp_path: Path) -> None:
    """A stage of somebody else's, complete, to which a link leads."""
    theirs, ours = PosixStorage(tmp_path / "theirs"), PosixStorage(tmp_path / "ours")
    for storage in (theirs, ours):
        storage.prepare("digits", True)
    stage = storages.stage()
    storages.write(theirs, stage)
    before = content(theirs.place)
    (ours.place / layout.STAGE / stage.name).symlink_to(theirs.place / layout.STAGE / stage.name)
    assert ours.finish_stages("digits") == [] == ours.listed()
    assert content(theirs.place) == before


def test_another_name_of_a_file_is_no_lock(victim: Path, tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "ck")
    storage.prepare("digits", True)
    os.link(victim / "thesis.txt", storage.place / layout.LOCK)
    with pytest.raises(NotOwnError, match="another name of one"):
        storage.lock()
    (storage.place / layout.LOCK).unlink()
    os.mkfifo(storage.place / layout.LOCK)
    with pytest.raises(NotOwnError, match="no regular file"):
        storage.lock()
    assert (victim / "thesis.txt").read_bytes() == b"mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give directories away")
def test_a_directory_of_another_user(tmp_path: Path) -> None:
    """It is refused, unless the directory around it is his, too."""
    directory = tmp_path / "ck" / layout.TRASH
    directory.mkdir(parents=True)
    os.chown(directory, 1234, 1234)
    with pytest.raises(NotOwnError, match="it belongs to the user with uid 1234"):
        shelves.empty_trash(directory.parent)
    with pytest.raises(UsageError, match=r"\.trash is not elaunch's: it belongs to the user"):
        probe.check(directory.parent, local=False, frees=False)
    os.chown(directory.parent, 1234, 1234)
    with own_directory(directory) as path:
        assert path.samefile(directory)
