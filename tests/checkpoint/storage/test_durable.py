"""Files are whole under their names, whatever the system does with each call."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from elaunch.checkpoint.storage import durable
from elaunch.checkpoint.storage.checksums import checksum_of
from elaunch.errors import CheckpointError, SaveError


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take any part of what it is given."""
    chance = random.Random(7)

    def short(descriptor: int, views: Sequence[memoryview]) -> int:
        joined = b"".join(views)
        return os.write(descriptor, joined[: chance.randint(1, len(joined))])

    monkeypatch.setattr(os, "writev", short)
    pieces = [chance.randbytes(chance.randint(0, 50)) for _ in range(2000)]
    entry = durable.write_file(tmp_path, "a", pieces)
    content = b"".join(pieces)
    assert (tmp_path / "a").read_bytes() == content
    assert entry.checksum == checksum_of(tmp_path / "a")
    assert entry.size == len(content)


def test_large_pieces_have_the_same_checksum(tmp_path: Path) -> None:
    pieces = [os.urandom(20 * 2**20), b"", os.urandom(3)]
    entry = durable.write_file(tmp_path, "a", [memoryview(piece) for piece in pieces])
    assert entry.checksum == checksum_of(tmp_path / "a")
    assert durable.seal_file(tmp_path, "a") == entry
    assert entry.mtime_ns == (tmp_path / "a").stat().st_mtime_ns


@pytest.mark.parametrize("call", ["writev", "fsync", "replace"])
def test_a_failure_names_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def fail(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left") as raised:
        durable.write_file(tmp_path, "a", [b"new" * 2**20])
    assert raised.value.errno == errno.ENOSPC
    assert call == "replace" or raised.value.filename == str(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_failed_fsync_of_a_sealed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x")

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") as raised:
        durable.seal_file(tmp_path, "a")
    assert raised.value.filename == str(tmp_path / "a")


def test_directories_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems refuse the call for directories; errors of the disk are errors."""
    codes = [errno.EINVAL, errno.EIO]

    def fail(_descriptor: int) -> None:
        raise OSError(codes.pop(0), "fsync")

    monkeypatch.setattr(os, "fsync", fail)
    durable.sync_directory(tmp_path)
    with pytest.raises(OSError, match="fsync") as raised:
        durable.sync_directory(tmp_path)
    assert raised.value.filename == str(tmp_path)


def test_a_file_that_changes_while_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    sync = os.fsync

    def write_and_sync(descriptor: int) -> None:
        with (tmp_path / "a").open("ab") as file:
            file.write(b"y")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", write_and_sync)
    with pytest.raises(SaveError, match="a was changed while it was sealed"):
        durable.seal_file(tmp_path, "a")


def test_what_is_no_file_is_not_sealed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(CheckpointError, match="not a regular file: a"):
        durable.seal_file(tmp_path, "a")


def test_parents_are_made_below_what_is_there_only(tmp_path: Path) -> None:
    durable.make_parents(tmp_path, "a/b/c")
    durable.make_parents(tmp_path, "a/b/d")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        durable.make_parents(tmp_path / "gone", "a/b")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        durable.make_parents(tmp_path, "file/x")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_patience(code: int) -> None:
    tries = []

    def read() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(code, "not yet")
        return "there"

    assert durable.read_patiently(read, 60) == "there"
    tries.clear()
    with pytest.raises(OSError, match="not yet"):
        durable.read_patiently(read, 0)


def test_patience_is_for_what_may_come() -> None:
    def read() -> None:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        durable.read_patiently(read, 60)
