"""What is opened where anything may be, and what is refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.files import NotRegularError, open_regular


def test_a_regular_file(tmp_path: Path) -> None:
    """As by ``open``; a link to one is followed unless that is not wanted."""
    (tmp_path / "there").write_bytes(b"content")
    (tmp_path / "link").symlink_to("there")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"
    with pytest.raises(OSError, match="link"):
        open_regular(str(tmp_path / "link"), os.O_NOFOLLOW)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "gone")


def test_what_would_never_end(tmp_path: Path) -> None:
    """A FIFO that nobody writes to, a device, a directory: each by what it is, and none stays."""
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    for path, what in (
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "a directory"),
    ):
        with pytest.raises(NotRegularError, match=f"it is {what}: '{path}'"):
            open_regular(path)
    assert os.listdir("/proc/self/fd") == before
