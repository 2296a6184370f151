"""Readers are seen by their locks, also where NFS makes byte ranges of them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.retention import readers

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
    with readers.claimed(place) as free:
        return free


@pytest.mark.parametrize("flock", [REAL_FLOCK, nfs_flock], ids=["local", "nfs"])
def test_a_reader_is_seen(place: Path, monkeypatch: pytest.MonkeyPatch, flock: Any) -> None:
    """As long as it reads, and no one begins to read what is being deleted."""
    monkeypatch.setattr(fcntl, "flock", flock)
    with readers.reading(place), readers.reading(place):
        assert not is_free(place)
    with readers.claimed(place) as free:
        assert free
        with pytest.raises(FileNotFoundError, match="being deleted"), readers.reading(place):
            pytest.fail("it is being deleted")


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
def test_who_may_not_write(place: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    """Sees readers where locks need no more than reading; on NFS it deletes nothing."""

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(reason, os.strerror(reason), str(path))
        return REAL_OPEN(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    with readers.reading(place):
        assert not is_free(place)
    assert is_free(place)
    monkeypatch.setattr(fcntl, "flock", nfs_flock)
    assert not is_free(place)


def test_no_locks_at_all(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is seen to read, and what is gone is nobody's."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with readers.reading(place):
        assert is_free(place)
    assert is_free(place / "gone")
