"""Counts of OOM kills, of made-up machines and of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.proc import oom_kill_count, shm_free

V1_MOUNT = "32 31 0:29 {root} {point} rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "38 31 0:41 {root} {point} rw - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "31 23 0:28 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu\n"


def machine(directory: Path, groups: str, mount: str, root: str, file: str, text: str) -> Path:
    """Make a /proc/self with one mounted hierarchy and one file in it."""
    point = directory / "a mount"
    proc = directory / "proc"
    (point / file).parent.mkdir(parents=True)
    (point / file).write_text(text)
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    escaped = str(point).replace(" ", "\\040")
    (proc / "mountinfo").write_text(OTHER + mount.format(root=root, point=escaped))
    return proc


@pytest.mark.parametrize(
    ("groups", "mount", "root", "file", "expected"),
    [
        ("5:cpu:/\n4:memory:/job\n0::/\n", V1_MOUNT, "/", "job/memory.oom_control", 3),
        ("4:hugetlb,memory:/docker/1\n", V1_MOUNT, "/docker/1", "memory.oom_control", 3),
        ("0::/user.slice/job\n", V2_MOUNT, "/", "user.slice/job/memory.events", 3),
        ("0::/\n", V2_MOUNT, "/", "memory.events", 3),
        ("1:name=systemd:/x\n0::/j\n", V2_MOUNT, "/", "j/memory.events", 3),
        ("0::/job\n", V2_MOUNT, "/", "elsewhere/memory.events", None),
        ("0::/job\n", V1_MOUNT, "/", "job/memory.events", None),
        ("", V2_MOUNT, "/", "memory.events", None),
        ("nonsense", V2_MOUNT, "/", "memory.events", None),
    ],
)
def test_oom_kill_count(
    tmp_path: Path, groups: str, mount: str, root: str, file: str, expected: int | None
) -> None:
    """Both versions, with and without a cgroup namespace."""
    text = "low 0\noom 9\noom_kill 3\noom_group_kill 1\n"
    assert oom_kill_count(machine(tmp_path, groups, mount, root, file, text)) == expected


def test_files_without_the_count(tmp_path: Path) -> None:
    """Old kernels, and no /proc at all."""
    proc = machine(tmp_path, "0::/\n", V2_MOUNT, "/", "memory.events", "oom 1\n")
    assert oom_kill_count(proc) is None
    assert oom_kill_count(tmp_path / "none") is None


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup v1 below this process's own, with 64 MiB."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
    group = Path(f"/sys/fs/cgroup/memory{own}/elaunch-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    yield group
    group.rmdir()


def test_a_real_oom_kill_is_counted(small_cgroup: Path) -> None:
    """A process that wants more than its cgroup has is killed, and the count grows."""
    code = (
        "import pathlib, subprocess, sys\n"
        "from elaunch.proc import oom_kill_count\n"
        "pathlib.Path(sys.argv[1]).write_text('0')\n"
        "before = oom_kill_count()\n"
        "end = subprocess.run([sys.executable, '-c', 'b = bytearray(b\"x\" * (200 << 20))'])\n"
        "print(before, end.returncode, oom_kill_count())\n"
    )
    tasks = str(small_cgroup / "cgroup.procs")
    done = subprocess.run([sys.executable, "-c", code, tasks], capture_output=True, text=True)
    assert done.stdout == "0 -9 1\n", done.stderr


def test_shm_free(tmp_path: Path) -> None:
    """In bytes; None where there is no such directory."""
    free = shm_free("/")
    assert free is not None and free >= 0
    assert shm_free(str(tmp_path / "none")) is None
