"""Network file systems are told from local ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.checkpoint.storage.posix import is_remote


@pytest.mark.parametrize(
    ("kind", "remote"),
    [("ext4", False), ("tmpfs", False), ("nfs4", True), ("lustre", True), ("fuse.sshfs", True)],
)
def test_kinds(tmp_path: Path, kind: str, remote: bool) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = [
        "22 1 0:999 / /other rw shared:1 - nfs other:/ rw",
        f"23 1 {number} / /mnt rw,relatime shared:1 master:2 - {kind} server:/x rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(lines))
    assert is_remote(tmp_path, tmp_path / "mountinfo") is remote


def test_here(tmp_path: Path) -> None:
    assert is_remote(tmp_path) is False
    assert is_remote(tmp_path, tmp_path / "none") is False
