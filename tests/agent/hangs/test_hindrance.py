"""What hinders a rank, as its machine shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.agent.hangs import hindrance
from elaunch.agent.hangs.hindrance import Hindrances


def test_this_machine_shows_its_processor_time() -> None:
    """Nothing is named of a moment in which nothing was counted."""
    first = hindrance.count()
    assert first.ticks > 0 and first.stolen <= first.ticks
    assert "stolen" not in first.since(first, os.getpid())


def test_what_is_little_is_not_named() -> None:
    """Steal of 12 %, a limit that held it up for 12 s of 60."""
    before = Hindrances(0.0, 100, 1000, 1.0)
    pid = os.getpid()
    assert Hindrances(60.0, 101, 2000, 1.5).since(before, pid) == ""
    assert Hindrances(60.0, 220, 2000, 13.0).since(before, pid) == (
        "12 % of its node's processor time was stolen by other machines, "
        "its cgroup's CPU limit has held it up for 12 s of 1m 00s"
    )


@pytest.mark.parametrize(
    ("group", "mount", "text"),
    [
        ("4:cpu,cpuacct:/job", "cgroup cgroup rw,cpu,cpuacct", "throttled_time 2500000000"),
        ("0::/job", "cgroup2 cgroup2 rw", "usage_usec 9\nthrottled_usec 2500000"),
    ],
    ids=["v1", "v2"],
)
def test_the_time_of_a_cgroups_limit(tmp_path: Path, group: str, mount: str, text: str) -> None:
    """Version 1 counts nanoseconds, version 2 microseconds."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.stat").write_text(f"nr_periods 4\n{text}\n")
    (tmp_path / "cgroup").write_text(f"{group}\n")
    (tmp_path / "mountinfo").write_text(f"30 25 0:26 / {tmp_path} rw shared:9 - {mount}\n")
    assert hindrance._throttled(tmp_path) == 2.5
    assert hindrance._throttled(tmp_path / "none") == 0.0


def test_the_share_that_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that is gone nothing is known."""
    fields = {"VmSwap": "  300 kB", "VmRSS": "  700 kB"}
    monkeypatch.setattr("elaunch.proc.status", lambda pid: fields if pid else {})
    now = hindrance.count()
    assert now.since(now, 1) == "30 % of its memory is swapped out"
    assert now.since(now, 0) == ""
