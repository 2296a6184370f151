"""A directory that goes away while a job writes into it: nothing is saved in what is there then."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.ownership import Origin
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Image, open_storage
from elaunch.errors import SaveError
from tests import programs
from tests.checkpoint import storages

GONE = r"ck is not the directory that this job began with \(run\.json is gone; was it unmounted"


def removed(root: Path) -> None:
    """Remove it."""
    shutil.rmtree(root)


def emptied(root: Path) -> None:
    """Have an empty one in its place, as below a mount point."""
    root.rename(root.with_name("away"))
    root.mkdir()


def made_a_file(root: Path) -> None:
    """Have a file in its place."""
    shutil.rmtree(root)
    root.touch()


def taken_by_another_job(root: Path) -> None:
    """Have that of another job in its place."""
    emptied(root)
    open_storage(root).prepare("digits", given=True)


@pytest.mark.parametrize("go", [removed, emptied, made_a_file, taken_by_another_job])
def test_nothing_is_saved_in_another_directory(tmp_path: Path, go: Callable[[Path], None]) -> None:
    """Whatever was begun there, and whichever process writes: it is as if it had never been."""
    root, at, later = tmp_path / "ck", storages.stage(), storages.stage(130)
    storage, worker = PosixStorage(root), PosixStorage(root)
    storage.prepare("digits", given=True)
    storages.save(worker, 110)
    below = storage.open_stage(at, 0)
    (below / "x").write_bytes(b"x")
    storages.write(storage, at)
    go(root)
    left = sorted(root.rglob("*")) if root.is_dir() else []
    calls: list[Callable[[], object]] = [
        lambda: storage.open_stage(later),
        lambda: storage.open_stage(later, 1),
        lambda: worker.write_shard(later, storages.header(0, 1, 130), [Image("x", [b"x"])]),
        lambda: storage.own_files(at),
        lambda: storage.write_manifest(at, storages.header(0, 1), ["x"]),
        lambda: storage.adopt(at, {0: b"{}"}),
        lambda: storage.commit(at, lambda: None),
    ]
    for call in calls:
        with pytest.raises(SaveError, match="is not the directory that this job began with") as got:
            call()
        assert str(got.value).startswith(str(root))
        assert str(got.value).endswith("nothing is saved there")
        assert got.value.__cause__ is None
    storage.discard(at)
    assert (sorted(root.rglob("*")) if root.is_dir() else []) == left


def test_what_comes_back_is_written_into_again(tmp_path: Path) -> None:
    """By whoever has seen it before; a link to it is as good."""
    root = tmp_path / "ck"
    storage = PosixStorage(root)
    storage.prepare("digits", given=True)
    emptied(root)
    with pytest.raises(SaveError, match=GONE):
        storages.save(storage)
    root.rmdir()
    root.symlink_to(tmp_path / "away")
    storages.save(storage)
    assert [found.step for found in PosixStorage(tmp_path / "away").listed()] == [120]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system at ``ck``."""
    root = tmp_path / "ck"
    root.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)]
    refused = subprocess.run(argv, capture_output=True).returncode != 0
    programs.allowed("no right to mount" if refused else None)
    yield root
    subprocess.run(["umount", "-l", str(root)], capture_output=True)


def test_unmounted_while_it_is_written(mounted: Path) -> None:
    """What is below the mount point stays empty, and nothing is said that is not so."""
    storage = PosixStorage(mounted)
    storage.prepare("digits", given=True)
    at, image = storages.stage(), Image("x", [b"x"])
    storage.write_shard(at, storages.header(0), [image])
    opened = storage.open_stage

    def pulled(*args: object) -> Path:
        path = opened(at)
        subprocess.run(["umount", "-l", str(mounted)], check=True)
        return path

    storage.open_stage = pulled  # type: ignore[method-assign]
    with pytest.raises(SaveError, match=GONE):
        storage.write_shard(at, storages.header(1), [image])
    with pytest.raises(SaveError, match=GONE):
        storage.commit(at, lambda: None)
    storage.discard(at)
    assert os.listdir(mounted) == []


def test_replaced_right_before_the_commit(tmp_path: Path) -> None:
    """With the stage: it is not that which prepare made, whatever is in it."""
    root, at = tmp_path / "ck", storages.stage()
    storage = PosixStorage(root)
    storage.prepare("digits", given=True)
    storages.write(storage, at)
    with pytest.raises(SaveError, match=GONE):
        storage.commit(at, lambda: (root / layout.RUN).unlink())
    assert storage.listed() == []


def test_whose_it_is_may_change(tmp_path: Path) -> None:
    """A run id that was made up gives way to another one; the directory is the same."""
    root, at = tmp_path / "ck", storages.stage()
    storage = PosixStorage(root)
    storage.prepare("made-up", given=False)
    storages.write(storage, at)
    for run_id, given in (("another", False), ("digits", True), ("late", False)):
        PosixStorage(root).prepare(run_id, given)
    assert storage.commit(at, lambda: None).step == 120
    storage.prepare("digits", given=True)
    storages.save(storage, 130)


def test_one_that_another_machine_has_just_made(tmp_path: Path) -> None:
    """It is waited for, the first time: caches of network file systems hide it for a while."""
    root = tmp_path / "ck"
    maker = threading.Timer(0.2, lambda: PosixStorage(root).prepare("digits", given=True))
    maker.start()
    storage = PosixStorage(root, patience=60)
    storages.save(storage)
    maker.join()
    removed(root)
    with pytest.raises(SaveError, match=GONE):  # at once
        storages.save(storage, 130)
    with pytest.raises(SaveError, match=GONE):
        storages.save(PosixStorage(root), 130)


def test_a_document_that_says_nothing(tmp_path: Path) -> None:
    """It is no proof that the directory is the same; a first look takes it as it is."""
    root = tmp_path / "ck"
    PosixStorage(root).prepare("digits", given=True)
    origin = Origin(root)
    assert origin.lost() == ""
    (root / layout.RUN).write_text("{}")
    assert "(run.json has schema None" in origin.lost()
    (root / layout.RUN).write_text('{"schema": 1, "run_id": "digits"}')
    assert "(run.json is that of another one" in origin.lost()
    assert Origin(root).lost() == ""
