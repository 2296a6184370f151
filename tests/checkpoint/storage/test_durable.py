"""Files are whole under their names, whatever the system does with each call."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from elaunch.atonce import STEP, Writing
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
    assert durable.sync_file(tmp_path, "a") == entry
    assert entry.mtime_ns == (tmp_path / "a").stat().st_mtime_ns


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["takes it", "refuses the flag", "refuses a write"])
def test_whole_steps_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """As far as the storage can do that; the file is the same, and so is its entry."""
    memory = mmap.mmap(-1, 4 * STEP)
    memory[:] = random.Random(7).randbytes(1 << 20) * (len(memory) >> 20)
    view, seen, writev, set_flags = memoryview(memory), list[bool](), os.writev, fcntl.fcntl

    def noted(descriptor: int, views: list[memoryview]) -> int:
        direct = bool(set_flags(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if direct and storage == "refuses a write" and seen:
            raise OSError(errno.EINVAL, "Invalid argument")
        seen.append(direct)
        return writev(descriptor, views)

    def refused(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT and storage == "refuses the flag":
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, flags)

    monkeypatch.setattr(os, "writev", noted)
    monkeypatch.setattr(fcntl, "fcntl", refused)
    entry = durable.write_file(
        tmp_path, "a", [view[: 3 * STEP + 5], view[STEP : 2 * STEP]], Writing()
    )
    content = (tmp_path / "a").read_bytes()
    assert content == bytes(view[: 3 * STEP + 5]) + bytes(view[STEP : 2 * STEP])
    assert (entry.size, entry.checksum) == (len(content), checksum_of(tmp_path / "a"))
    direct = {"takes it": 3, "refuses the flag": 0, "refuses a write": 1}[storage]
    if storage == "takes it" and not seen[0]:
        pytest.skip("the file system of the temporary directory cannot do that")
    assert seen == [True] * direct + [False] * (4 - direct)
    seen.clear()
    assert durable.write_file(tmp_path, "b", [view[:STEP]]).size == STEP
    assert seen == [False]  # it is no save beside a training


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
        durable.sync_file(tmp_path, "a")
    assert raised.value.filename == str(tmp_path / "a")


def test_a_file_is_sealed_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may have used up the processes that a user may have; the save goes on."""
    (tmp_path / "a").write_bytes(b"x")

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert durable.sync_file(tmp_path, "a").checksum == checksum_of(tmp_path / "a")


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
    with pytest.raises(SaveError, match="a was changed while it was put on the disk"):
        durable.sync_file(tmp_path, "a")


def test_what_is_no_file_is_not_sealed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(CheckpointError, match="not a regular file: a"):
        durable.sync_file(tmp_path, "a")


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
