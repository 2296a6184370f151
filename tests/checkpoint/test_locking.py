"""The lock of a directory and the processes that are forked from its owner."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.checkpoint.ownership import DirectoryLock
from elaunch.errors import SaveError

OWNER = """
import os, sys
from pathlib import Path
from elaunch.checkpoint.ownership import DirectoryLock

given_back = DirectoryLock(Path(sys.argv[1] + ".other"))
given_back.close()
lock = DirectoryLock(Path(sys.argv[1]))
if os.fork() == 0:
    lock.close()  # as at the end of a block: it is its parent's
    print("forked", flush=True)
sys.stdin.read()
print("still here", flush=True)
"""


def test_what_is_forked_does_not_keep_it(tmp_path: Path) -> None:
    """Nor does it give its parent's lock back; it outlives the parent, which is killed."""
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        assert owner.stdout.readline() == "forked\n"
        with pytest.raises(SaveError, match=f"process {owner.pid} on"):
            DirectoryLock(path)
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        DirectoryLock(path).close()
        owner.stdin.close()
        assert owner.stdout.read() == "still here\n"


def test_a_disk_that_is_full_does_not_keep_it(tmp_path: Path) -> None:
    """Nobody has the lock if it cannot be written down who has."""
    path, limits = tmp_path / ".lock", resource.getrlimit(resource.RLIMIT_FSIZE)
    open_before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            DirectoryLock(path, "job")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == open_before
    DirectoryLock(path, "job").close()
