"""A log file system that answers nobody holds up a restart once, and not for each worker."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import programs
from tests.integration.jobs import FORK
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow

WORKERS = 4
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
def hang() -> Iterator[Callable[[Path], ExitStack]]:
    """Return what has a directory hang, until what it returns is closed: nobody serves its FUSE."""
    programs.allowed("only root can mount" if os.getuid() else None)
    programs.allowed(None if Path("/dev/fuse").exists() else "the kernel has no FUSE")
    libc, until = ctypes.CDLL(None, use_errno=True), ExitStack()

    def mount(path: Path) -> ExitStack:
        target, device = os.fsencode(path), os.open("/dev/fuse", os.O_RDWR)
        until.callback(os.close, device)  # whoever waits gets an error
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        assert libc.mount(b"hangs", target, b"fuse", 0, options) == 0, ctypes.get_errno()
        until.callback(libc.umount2, target, _DETACH)
        return until

    with until:
        yield mount


def test_a_restart_of_many_workers(
    elaunch: Launcher, tmp_path: Path, hang: Callable[[Path], ExitStack]
) -> None:
    """No worker adds a wait, and the job is done."""
    place, logs, script = tmp_path / "place", tmp_path / "logs", tmp_path / "job.py"
    place.mkdir()
    script.write_text(SCRIPT)
    flags = [*FORK, f"--nproc-per-node={WORKERS}", "--max-restarts=1", f"--log-dir={logs}"]
    running = elaunch.start(["run", *flags, "--tee=3", script, place])
    wait_until(lambda: len(list(place.iterdir())) == WORKERS)
    with hang(logs):
        (place / "go").touch()
        wait_until(lambda: (place / "again").exists())
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert 0 < done.stderr.count("the file system does not answer for 2 s") < WORKERS, done.stderr
