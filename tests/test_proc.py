"""elaunch.proc: what this machine's kernel shows, and made-up cgroups of other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch import proc

V1 = "31 23 0:28 / {point} rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "38 31 0:41 / {point} rw - cgroup2 cgroup2 rw\n"
ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("place", ["job", "", "job/pod/leaf"])
@pytest.mark.parametrize(
    ("mount", "files", "expected"),
    [
        (V1, {"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "100000\n"}, 1),
        (V1, {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 1),
        (V1, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, ALL),
        (V1, {"cpu.cfs_quota_us": "100000\n"}, ALL),
        (V2, {"cpu.max": "150000 100000\n"}, 1),
        (V2, {"cpu.max": "max 100000\n"}, ALL),
        (V2, {"cpu.max": "nonsense\n"}, ALL),
        (V2, {"cpu.max": "100000000 100\n"}, ALL),
        (V2, {}, ALL),
    ],
)
def test_cpus(tmp_path: Path, mount: str, files: dict[str, str], expected: int, place: str) -> None:
    """Of a cgroup with and without a quota, in both versions; never more than there are.

    A quota counts for a process of the cgroup itself and of one far below, but for none above.
    """
    leaf = tmp_path / "job/pod/leaf"
    leaf.mkdir(parents=True)
    for group in (leaf, *list(leaf.parents)[:3]):
        (group / "cgroup.procs").touch()
    for name, text in files.items():
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "cgroup").write_text(f"{'3:cpu,cpuacct' if mount == V1 else '0:'}:/{place}\n")
    (tmp_path / "mountinfo").write_text(mount.format(point=tmp_path))
    assert proc.cpus(tmp_path) == (expected if place else ALL)


FREEZER = "31 23 0:28 / {point} rw - cgroup cgroup rw,freezer\n"


@pytest.mark.parametrize(
    ("mount", "file", "text", "frozen"),
    [
        (FREEZER, "freezer.state", "FROZEN\n", True),
        (FREEZER, "freezer.state", "FREEZING\n", True),
        (FREEZER, "freezer.state", "THAWED\n", False),
        (V2, "cgroup.events", "populated 1\nfrozen 1\n", True),
        (V2, "cgroup.events", "populated 1\nfrozen 0\n", False),
        (V2, "other", "", False),
    ],
)
def test_is_frozen(tmp_path: Path, mount: str, file: str, text: str, frozen: bool) -> None:
    """By cgroups of both versions; one of which nothing can be read is not."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / file).write_text(text)
    process = tmp_path / "7"
    process.mkdir()
    (process / "cgroup").write_text(f"{'3:freezer' if mount == FREEZER else '0:'}:/job\n")
    (process / "mountinfo").write_text(mount.format(point=tmp_path))
    assert proc.is_frozen(7, tmp_path) is frozen
    assert not proc.is_frozen(8, tmp_path)


def test_cpus_of_a_real_cgroup() -> None:
    """A process with the time of one CPU has one, however many it may run on."""
    parent = proc.cgroup_file("cpu", "cpu.cfs_quota_us", "cpu.max")
    if parent is None or parent.name == "cpu.max":
        pytest.skip("no CPU controller of cgroup v1 here")
    group = parent.with_name(f"elaunch-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    try:
        below = group / "below"
        below.mkdir()
        (group / "cpu.cfs_quota_us").write_text("100000")
        code = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
        code += "from elaunch import proc; print(proc.cpus(), len(os.sched_getaffinity(0)))"
        for one in (group, below):
            argv = [sys.executable, "-c", code, str(one / "cgroup.procs")]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            assert done.stdout.split() == ["1", str(ALL)]
    finally:
        below.rmdir()
        group.rmdir()
