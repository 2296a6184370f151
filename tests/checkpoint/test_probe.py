"""A look at a directory before it is relied upon: rights, room, and whether others see it."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.checkpoint import layout, probe
from elaunch.errors import UsageError
from tests import netns

HOST = os.uname().nodename


def checkpoint(place: Path, step: int, size: int | None, data: int = 100) -> Path:
    """Write what looks like a committed checkpoint that says it has ``size`` bytes."""
    path = place / layout.step_name(step, 0)
    path.mkdir(parents=True)
    (path / "data").write_bytes(bytes(data))
    if size is not None:
        (path / layout.METADATA).write_text(f'{{"size": {size}}}')
    return path


def test_a_directory_is_made_and_left_as_it_was(tmp_path: Path) -> None:
    """Its parents too; a second look finds nothing to do."""
    place = tmp_path / "new" / "ck"
    assert probe.check(place, local=False, frees=False) == ""
    assert probe.check(place, local=False, frees=False) == ""
    assert os.listdir(place) == []


@pytest.mark.parametrize(
    ("size", "frees", "told"),
    [
        (1000, False, None),
        (2**62, True, "takes"),
        (2**62, False, "error"),
    ],
)
def test_the_newest_must_have_room_once_more(
    tmp_path: Path, size: int, frees: bool, told: str | None
) -> None:
    """By what it says of itself; where old ones are removed a lack is a remark."""
    checkpoint(tmp_path, 9, 2**62)
    checkpoint(tmp_path, 10, size)
    if told == "error":
        with pytest.raises(UsageError) as caught:
            probe.check(tmp_path, local=False, frees=frees)
        assert f"--checkpoint-dir {tmp_path}: " in str(caught.value)
        assert f"free on {HOST}, and the newest checkpoint, step-00000010.r0, takes" in str(
            caught.value
        )
        assert "--checkpoint-keep-last" in str(caught.value)
        return
    remark = probe.check(tmp_path, local=False, frees=frees)
    assert (told in remark) if told else remark == ""


@pytest.mark.parametrize(("size", "local"), [(None, False), (2**62, True)])
def test_its_size_where_it_does_not_say_or_is_a_part(
    tmp_path: Path, size: int | None, local: bool
) -> None:
    """The files themselves are counted."""
    checkpoint(tmp_path, 10, size)
    assert probe.check(tmp_path, local=local, frees=False) == ""


def test_little_room_is_a_remark(tmp_path: Path) -> None:
    """Room for the newest, and not for a fifth more."""
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    checkpoint(tmp_path, 10, int(free / 1.1))
    assert "and the newest checkpoint, step-00000010.r0, takes" in (
        probe.check(tmp_path, local=False, frees=False)
    )


def test_a_part_of_the_path_is_a_file(tmp_path: Path) -> None:
    """Found by whoever comes to make the directory."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "ck"):
        with pytest.raises(UsageError, match=rf"{place} cannot be written on .*file; give a"):
            probe.check(place, local=False, frees=False)


def test_links_and_long_names(tmp_path: Path) -> None:
    """What is wrong with them is told, and no exception of the system's gets out."""
    (tmp_path / "lost").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"lost cannot be made on .*which is not there; mend the"):
        probe.check(tmp_path / "lost", local=False, frees=False)
    with pytest.raises(UsageError, match=r"File name too long: give a shorter one"):
        probe.check(tmp_path / ("x" * 300), local=False, frees=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_rights(tmp_path: Path) -> None:
    """Named with the host and what to do."""
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match=f"cannot be written on {HOST}: Permission denied"):
        probe.check(tmp_path, local=False, frees=False)


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EROFS, "mounted read-only"),
        (errno.EIO, "give a directory that can be written"),
    ],
)
def test_what_storage_says_is_told_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, fix: str
) -> None:
    """And nothing is left behind by the attempt."""

    def write(_: int, __: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(UsageError) as caught:
        probe.check(tmp_path, local=False, frees=False)
    assert fix in str(caught.value) and os.strerror(code) in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[list[str]]:
    """Return the words that run a shell with a mount namespace of its own."""
    netns.needed()
    yield ["unshare", "--mount", "sh", "-ec"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mount", "told"),
    [
        ("size=64k", "No space left on device: make room"),
        ("nr_inodes=1", "No inodes left on device, so it takes no more files: make room"),
        ("ro", "Read-only file system: it is mounted read-only"),
    ],
)
def test_a_real_mount(mounted: list[str], tmp_path: Path, mount: str, told: str) -> None:
    """A tmpfs that is full, one without inodes, and one that is read-only."""
    fill = "" if mount == "ro" else f"head -c 65536 /dev/zero > {tmp_path}/full || true;"
    look = (
        "from pathlib import Path; from elaunch.checkpoint import probe\n"
        f"probe.check(Path('{tmp_path}'), False, False)"
    )
    shell = f'mount -t tmpfs -o {mount} tmpfs {tmp_path}; {fill} exec python -c "$1"'
    argv = [*mounted, shell, "sh", look]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=_environ())
    assert f"--checkpoint-dir {tmp_path} cannot be written on {HOST}: {told}" in done.stderr


def _environ() -> dict[str, str]:
    import sys

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}


# ── is it one directory? ─────────────────────────────────────────────────────────────────────────


def test_marks_are_seen_where_the_directory_is_the_same(tmp_path: Path) -> None:
    """At once; another directory has none of them."""
    for nonce in ("aa", "bb"):
        probe.leave_mark(tmp_path, nonce)
    assert probe.unseen(tmp_path, {"aa", "bb"}, patience=0.0) == frozenset()
    (tmp_path / "other").mkdir()
    assert probe.unseen(tmp_path / "other", {"aa", "bb"}, patience=0.0) == {"aa", "bb"}
    assert probe.unseen(tmp_path / "nowhere", {"aa"}, patience=0.0) == {"aa"}


def test_a_mark_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """As behind an attribute cache."""
    probe.leave_mark(tmp_path, "aa")
    looked = threading.Event()

    def late() -> None:
        looked.wait(30.0)
        probe.leave_mark(tmp_path, "bb")

    thread = threading.Thread(target=late)
    thread.start()
    threading.Timer(0.3, looked.set).start()
    assert probe.unseen(tmp_path, {"aa", "bb"}, patience=30.0) == frozenset()
    thread.join()


def test_the_last_one_leaves_nothing(tmp_path: Path) -> None:
    """Each takes its own mark back; a second time does nothing."""
    for nonce in ("aa", "bb"):
        probe.leave_mark(tmp_path, nonce)
    probe.remove_mark(tmp_path, "aa")
    assert os.listdir(tmp_path / ".probe") == ["bb"]
    for _ in range(2):
        probe.remove_mark(tmp_path, "bb")
    assert os.listdir(tmp_path) == []


def test_marks_of_agents_killed_long_ago_go(tmp_path: Path) -> None:
    """Those of a job that may still run do not."""
    probe.leave_mark(tmp_path, "old")
    probe.leave_mark(tmp_path, "young")
    now = (tmp_path / ".probe" / "old").stat().st_mtime
    for name, age in (("old", 400), ("young", 300)):
        os.utime(tmp_path / ".probe" / name, (now, now - age * 86_400))
    nonce = uuid.uuid4().hex
    probe.leave_mark(tmp_path, nonce)
    assert set(os.listdir(tmp_path / ".probe")) == {"young", nonce}
