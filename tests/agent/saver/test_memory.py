"""Segments: kept, grown, bounded, and not given out while somebody reads them."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path

import pytest

from elaunch.agent.saver import memory as keepermemory
from elaunch.agent.saver.memory import CheckpointMemory, Segment
from elaunch.errors import SaveError, UsageError
from elaunch.proc import available

MIB = 1 << 20


def test_a_segment_is_touched_and_its_descriptor_is_its_memory() -> None:
    """Who maps the descriptor sees the same bytes, also after the agent has let go of them."""
    segment = Segment(4 * MIB)
    assert os.fstat(segment.fd).st_blocks * 512 >= 4 * MIB
    with mmap.mmap(segment.fd, segment.size) as theirs:
        theirs[:4] = b"tens"
        assert bytes(segment.view[:4]) == b"tens"
        segment.close()
        segment.close()
        assert theirs[:4] == b"tens"


def test_the_same_is_lent_again() -> None:
    """It is a little larger than asked for, so that the next one fits as well."""
    memory = CheckpointMemory(64 * MIB)
    first = memory.lease("worker 0", 16 * MIB)
    assert memory.lease("worker 0", 17 * MIB) is first
    assert memory.lease("worker 1", 1) is not first
    assert memory.find("worker 0") is first
    grown = memory.lease("worker 0", 20 * MIB)
    assert grown is not first
    assert first.fd == -1
    memory.close()
    assert memory.taken == 0


def test_the_bound_is_for_all_together() -> None:
    """What is there stays; a smaller part fits still, exactly."""
    memory = CheckpointMemory(8 * MIB)
    first = memory.lease("worker 0", 4 * MIB)
    with pytest.raises(SaveError, match=r"a part of 8\.00 MiB: .*--checkpoint-memory"):
        memory.lease("worker 1", 8 * MIB)
    assert memory.find("worker 0") is first
    rest = 8 * MIB - first.size
    assert memory.lease("worker 1", rest).size == rest
    memory.close()


def test_one_that_is_read_is_not_lent() -> None:
    """Another is made; the old one counts until it is released."""
    memory = CheckpointMemory(64 * MIB)
    first = memory.lease("worker 0", MIB)
    memory.hold(first)
    second = memory.lease("worker 0", MIB)
    assert second is not first
    assert first.fd >= 0
    assert memory.taken == first.size + second.size
    memory.release(first)
    assert first.fd == -1
    assert memory.taken == second.size
    memory.hold(second)
    memory.free("worker 0")
    assert memory.find("worker 0") is None
    assert memory.taken == second.size
    memory.release(second)
    assert memory.taken == 0


def test_without_a_flag_half_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at once, when the first is made."""
    monkeypatch.setattr(keepermemory, "available", lambda: 4 * MIB)
    memory = CheckpointMemory(None)
    with pytest.raises(SaveError, match=r"2\.00 MiB \(half of what was available\)"):
        memory.lease("worker 0", 3 * MIB)
    assert memory.lease("worker 0", MIB).size >= MIB
    memory.close()


def test_a_flag_that_is_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at start, with both numbers; without the flag, or without knowing, nothing is."""
    monkeypatch.setattr(keepermemory, "available", lambda: 4 * MIB)
    keepermemory.check_limit(4 * MIB)
    with pytest.raises(UsageError, match=r"--checkpoint-memory 8\.00 MiB: .* 4\.00 MiB available"):
        keepermemory.check_limit(8 * MIB)

    def unknown() -> int:
        raise OSError("no MemAvailable")

    monkeypatch.setattr(keepermemory, "available", unknown)
    keepermemory.check_limit(8 * MIB)


def segments() -> set[str]:
    """Return the descriptors of this process that are segments."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if "elaunch-checkpoint" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


def test_memory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's reason is told, and no descriptor is left."""

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = segments()
    with pytest.raises(SaveError, match="No space left"):
        CheckpointMemory(8 * MIB).lease("worker 0", MIB)
    assert not segments() - before


def proc(tmp_path: Path, version: int, limit: str) -> Path:
    """Lay out /proc/self and a memory cgroup with 100 MiB in use, 30 of them file cache."""
    group = tmp_path / "cgroup" / "job"
    group.mkdir(parents=True)
    names = ("memory.max", "memory.current", "inactive_file")
    kind, line = "cgroup2 cgroup2 rw", "0::/job\n"
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        kind, line = "cgroup cgroup rw,memory", "4:memory:/job\n"
    (group / names[0]).write_text(limit)
    (group / names[1]).write_text(str(100 * MIB))
    (group / "memory.stat").write_text(f"anon 1\n{names[2]} {30 * MIB}\n")
    (tmp_path / "cgroup.txt").write_text(line)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(line)
    mount = f"30 24 0:26 / {tmp_path / 'cgroup'} rw - {kind}\n"
    (tmp_path / "self" / "mountinfo").write_text(mount)
    return tmp_path / "self"


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_available_in_a_cgroup(tmp_path: Path, version: int) -> None:
    """The cgroup's rest, in which cache that can go does not count; or the machine's."""
    meminfo = tmp_path / "meminfo"
    own = proc(tmp_path, version, str(200 * MIB))
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable: {500 * 1024} kB\n")
    assert available(own, meminfo) == 130 * MIB
    meminfo.write_text(f"MemAvailable: {50 * 1024} kB\n")
    assert available(own, meminfo) == 50 * MIB


def test_a_cgroup_without_a_limit(tmp_path: Path) -> None:
    """The machine's memory counts; where neither is known, that is said."""
    own = proc(tmp_path, 2, "max\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 2048 kB\n")
    assert available(own, meminfo) == 2 * MIB
    meminfo.write_text("nothing\n")
    with pytest.raises(OSError, match="MemAvailable"):
        available(own, meminfo)


def test_here() -> None:
    """This machine has some."""
    assert available() > MIB


def test_segments_are_made_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits here until the other is begun; what is asked meanwhile is answered."""
    both, real = threading.Barrier(3, timeout=60.0), keepermemory.Segment

    def slow(size: int) -> Segment:
        both.wait()
        both.wait()
        return real(size)

    monkeypatch.setattr(keepermemory, "Segment", slow)
    memory = CheckpointMemory(10 * MIB)
    made: list[Segment] = []
    threads = [
        threading.Thread(target=lambda name=name: made.append(memory.lease(name, 4 * MIB)))
        for name in ("worker 0", "worker 1")
    ]
    for thread in threads:
        thread.start()
    both.wait()
    assert memory.taken >= 8 * MIB and memory.find("worker 0") is None
    with pytest.raises(SaveError, match="no memory for a part"):
        memory.lease("worker 2", 4 * MIB)
    both.wait()
    for thread in threads:
        thread.join()
    assert {memory.find("worker 0"), memory.find("worker 1")} == set(made)
    memory.close()
    assert memory.taken == 0


def test_one_that_cannot_be_made_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CheckpointMemory(8 * MIB)

    def broken(size: int) -> Segment:
        raise SaveError(f"no memory of {size} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(keepermemory, "Segment", broken)
        with pytest.raises(SaveError, match="no memory of"):
            memory.lease("worker 0", 4 * MIB)
    assert memory.taken == 0
    memory.lease("worker 0", 4 * MIB)
    memory.close()
