"""A log file system that answers nobody holds up a restart once, and not for each worker."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.integration.jobs import SPAWN
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow

WORKERS = 16
LIMIT = 25.0
"""Seconds for the restart; two seconds for each worker would be more."""
_DETACH = 2  # MNT_DETACH of umount2(2)
SCRIPT = """\
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    (place / os.environ["RANK"]).touch()
    while not (place / "go").exists() or os.environ["RANK"] != "0":
        time.sleep(0.02)
    sys.exit(1)
(place / "again").touch()
"""


@pytest.fixture
def hang() -> Iterator[Callable[[Path], None]]:
    """Return what has a directory hang: FUSE is mounted there, and nobody serves it."""
    programs.allowed("only root can mount" if os.getuid() else None)
    programs.allowed(None if Path("/dev/fuse").exists() else "the kernel has no FUSE")
    libc, mounted, device = (
        ctypes.CDLL(None, use_errno=True),
        list[bytes](),
        os.open("/dev/fuse", 2),
    )

    def mount(path: Path) -> None:
        target = os.fsencode(path)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        assert libc.mount(b"hangs", target, b"fuse", 0, options) == 0, ctypes.get_errno()
        mounted.append(target)

    yield mount
    for target in mounted:
        libc.umount2(target, _DETACH)
    os.close(device)


def test_a_restart_of_many_workers(
    elaunch: Launcher, tmp_path: Path, hang: Callable[[Path], None]
) -> None:
    """It takes a few seconds, whatever the number of workers, and the job is done."""
    place, logs, script = tmp_path / "place", tmp_path / "logs", tmp_path / "job.py"
    place.mkdir()
    script.write_text(SCRIPT)
    flags = [*SPAWN, f"--nproc-per-node={WORKERS}", "--max-restarts=1", f"--log-dir={logs}"]
    running = elaunch.start(["run", *flags, "--tee=3", script, place])
    wait_until(lambda: len(list(place.iterdir())) == WORKERS)
    hang(logs)
    began = time.monotonic()
    (place / "go").touch()
    wait_until(lambda: (place / "again").exists())
    assert time.monotonic() - began < LIMIT, running.output("stderr")
    done = running.wait()
    assert done.returncode == 0, done.stderr
