"""Commits that are killed, frozen, raced and starved: never torn, never replaced, never lost."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.storage import commit
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Committed, Image
from elaunch.errors import CheckpointError, SaveError
from tests import programs, warm
from tests.checkpoint import storages

ROOT = Path(__file__).parents[3]
Killed = Callable[[str], list[PosixStorage]]

# Does what argv says with the storage; in the child of each fork SIGKILL comes in the place of the
# k-th call of what changes the disk, so right after the one before.
KILLED = """
import itertools, os, shutil, signal, sys
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.checkpoint.shelves import throw_away
from tests.checkpoint import storages

def act(place, what):
    storage = open_storage(place)
    if what == "save":
        storages.save(storage, 130)
    elif what == "seal":
        storages.save_scripts_files(storage, 130)
    elif what == "finish":
        storage.finish_stages(None)
    elif what == "remove":
        storage.remove(storage.listed()[0])
    elif what == "quarantine":
        storage.quarantine(storage.listed()[0], "for the test")

def arm(k):
    calls = itertools.count(1)  # one for all threads
    def wrap(call):
        def counted(*args, **kwargs):
            if next(calls) == k:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return counted
    for name in "rename replace fsync unlink rmdir mkdir writev".split():
        setattr(os, name, wrap(getattr(os, name)))

def main(template, work, what):
    place = os.path.join(work, "ck")
    for k in itertools.count(1):
        shutil.copytree(template, place, symlinks=True)
        child = os.fork()
        if child == 0:
            arm(k)
            act(place, what)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        end = "done" if status == 0 else "killed"
        assert end == "done" or os.WTERMSIG(status) == signal.SIGKILL, status
        os.rename(place, os.path.join(work, f"{k:04d}.{end}"))
        if end == "done":
            return

main(*sys.argv[1:])
"""


@pytest.fixture
def killed_everywhere(storage: PosixStorage) -> Iterator[Callable[[str], list[PosixStorage]]]:
    """Return the storages that are left by a process killed at each step of what it does.

    In memory: the kernel does what was called before the kill, and fsync costs nothing there.
    """
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="elaunch-test-", dir=where) as folder:
        yield lambda what: kill_everywhere(Path(folder), storage.place, what)


def kill_everywhere(work: Path, template: Path, what: str) -> list[PosixStorage]:
    """Do it, again and again, until it comes to its end."""
    argv = [sys.executable, "-c", KILLED, str(template), str(work), what]
    subprocess.run(argv, check=True, timeout=120, cwd=ROOT)
    left = sorted(work.iterdir())
    assert left[-1].name.endswith(".done")
    assert sum(path.name.endswith(".killed") for path in left) >= 5
    return [PosixStorage(path) for path in left]


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    """A storage with a checkpoint of step 120."""
    made = PosixStorage(tmp_path / "ck")
    made.prepare("digits", given=True)
    storages.save(made)
    return made


def check_whole(storage: PosixStorage, listed: list[Committed]) -> None:
    """Assert that each checkpoint is whole, and that nothing else is in the way."""
    for found in listed:
        own.verify(Path(str(found.place)), "digits")
    assert os.listdir(storage.place / layout.STAGE) == []
    names = {name for name in os.listdir(storage.place) if not name.startswith(".")}
    assert names == {layout.RUN, *(found.name for found in listed)}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["save", "seal"])
def test_a_save_killed_at_each_step(
    storage: PosixStorage, killed_everywhere: Killed, what: str
) -> None:
    old = storage.listed()[0]
    outcomes = set()
    for left in killed_everywhere(what):
        before = left.listed()
        for found in before:
            left.verify(found, "digits")
        left.finish_stages("digits")
        after = left.listed()
        check_whole(left, after)
        assert after[0].uuid == old.uuid
        assert {found.uuid for found in before} <= {found.uuid for found in after}
        outcomes.add((len(before), len(after)))
        storages.save(left, 140)  # the next one is not in its way
    # Not yet complete and cleared; complete and committed by the next; committed.
    assert outcomes == {(1, 1), (1, 2), (2, 2)}


@pytest.mark.slow
def test_finishing_killed_at_each_step(storage: PosixStorage, killed_everywhere: Killed) -> None:
    at, torn = storages.stage(130), storages.stage(140)
    storages.write(storage, at)
    storage.write_shard(torn, storages.header(0, 2, 140), [Image("a", [b"x"])])
    for left in killed_everywhere("finish"):
        left.finish_stages("digits")
        assert [found.step for found in left.listed()] == [120, 130]
        check_whole(left, left.listed())


@pytest.mark.slow
def test_removing_killed_at_each_step(storage: PosixStorage, killed_everywhere: Killed) -> None:
    storages.save(storage, 130)
    steps = set()
    for left in killed_everywhere("remove"):
        steps.add(tuple(found.step for found in left.listed()))
        left.finish_stages("digits")
        left.clear_trash()
        check_whole(left, left.listed())
        assert os.listdir(left.place / layout.TRASH) == []
    assert steps == {(120, 130), (130,)}


@pytest.mark.slow
def test_a_quarantine_killed_at_each_step(storage: PosixStorage, killed_everywhere: Killed) -> None:
    storages.save(storage, 130)
    for left in killed_everywhere("quarantine"):
        aside = left.quarantined()
        assert len(aside) + len(left.listed()) == 2
        check_whole(left, left.listed())
        assert all(name == "step-00000120.r3" for name, _reason in aside)


@pytest.mark.slow
def test_two_committers_at_once(tmp_path: Path) -> None:
    """A late chief and who finishes stages: one commits, the other takes it for a success."""
    for trial in range(30):
        storage = PosixStorage(tmp_path / str(trial))
        storage.prepare("digits", given=True)
        at = storages.stage()
        storages.write(storage, at)
        start = threading.Barrier(3)

        def chief(storage: PosixStorage = storage, start: threading.Barrier = start) -> Committed:
            start.wait(10)
            return storage.commit(at, lambda: None)  # noqa: B023

        def chooser(storage: PosixStorage = storage, start: threading.Barrier = start) -> object:
            start.wait(10)
            return storage.finish_stages("digits")

        with ThreadPoolExecutor() as pool:
            late, chosen = pool.submit(chief), pool.submit(chooser)
            other = pool.submit(chief)
            assert late.result(60).uuid == other.result(60).uuid == at.uuid
            chosen.result(60)
        [found] = storage.listed()
        assert found.uuid == at.uuid
        check_whole(storage, [found])


def test_a_chief_that_is_frozen_in_its_fence(storage: PosixStorage) -> None:
    """Its claim is taken over; when it wakes, its stage is committed, or another one is."""
    at = storages.stage(130)
    storages.write(storage, at)
    taken_over: list[Committed] = []
    found = storage.commit(at, lambda: taken_over.extend(storage.finish_stages("digits")))
    assert [found] == taken_over
    check_whole(storage, storage.listed())


def test_a_chief_whose_stage_was_cleared_meanwhile(storage: PosixStorage) -> None:
    at = storages.stage(130)
    storages.write(storage, at)
    with pytest.raises(SaveError, match="another process has cleared the stage"):
        storage.commit(at, lambda: (storage.finish_stages("digits", after=4), None)[1])
    check_whole(storage, storage.listed())


def test_a_chief_whose_step_was_saved_again_meanwhile(storage: PosixStorage) -> None:
    at = storages.stage(130)
    storages.write(storage, at)

    def clear_and_save() -> None:
        storage.finish_stages("digits", after=4)
        storages.save(storage, 130)

    with pytest.raises(SaveError, match="never replaced"):
        storage.commit(at, clear_and_save)
    assert storage.listed()[-1].uuid != at.uuid
    check_whole(storage, storage.listed())


def test_a_stage_that_cannot_be_read_now_is_left(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose it is is not known then: it may be another run's, and is not cleared."""
    at = storages.stage(20)
    storages.write(storage, at)

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(commit, "read_stage", broken)
        assert storage.finish_stages("digits", after=4) == []
    assert (Path(storage.place) / ".stage" / at.name).is_dir()
    assert storage.finish_stages("digits", after=4) == []
    assert not (Path(storage.place) / ".stage" / at.name).exists()


def test_a_claim_that_nobody_finishes(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committer may live: said in bounded time, and the claim is left to it, or to finish."""
    monkeypatch.setattr(commit, "_SETTLE", 0.1)
    at = storages.stage(130)
    storages.write(storage, at)
    path = storage.place / layout.STAGE / at.name
    path.rename(path.with_name(layout.claim_name(at.name)))
    with pytest.raises(
        SaveError, match=r"another process is at work on .* and not done yet"
    ) as caught:
        storage.commit(at, lambda: None)
    assert caught.value.stays
    storage.discard(at)
    assert [found.uuid for found in storage.finish_stages("digits")] == [at.uuid]
    check_whole(storage, storage.listed())


def test_manifests_that_another_machine_sees_late(tmp_path: Path) -> None:
    """Attribute caches of network file systems: the chief knows that they were written."""
    storage = PosixStorage(tmp_path / "ck", patience=60)
    storage.prepare("digits", given=True)
    at = storages.stage(130)
    path = storage.open_stage(at)
    storages.write(storage, at)
    late = [layout.manifest_name(1), "rank0.bin"]
    for name in late:
        (path / name).rename(tmp_path / name)

    def appear() -> None:
        for name in late:
            shutil.move(tmp_path / name, path / name)

    timer = threading.Timer(0.2, appear)
    timer.start()
    found = storage.commit(at, lambda: None)
    timer.join()
    storage.verify(found)
    check_whole(storage, [found])


@pytest.mark.slow
@pytest.mark.parametrize("late", [["manifest.rank-00001.json"], ["rank0.bin"], ["all"]])
def test_a_dead_rounds_parts_that_are_seen_late(tmp_path: Path, late: list[str]) -> None:
    """Nobody says that they were written; they are waited for where another machine may have."""
    storage = PosixStorage(tmp_path / "ck", patience=60)
    storage.prepare("digits", given=True)
    at = storages.stage(130)
    path = storage.open_stage(at)
    storages.write(storage, at)
    names = [name.name for name in path.iterdir()] if late == ["all"] else late
    for name in names:
        (path / name).rename(tmp_path / name)

    def appear() -> None:
        for name in names:
            shutil.move(tmp_path / name, path / name)

    timer = threading.Timer(0.5, appear)
    timer.start()
    done = storage.finish_stages("digits")
    timer.join()
    assert [found.uuid for found in done] == [at.uuid]
    check_whole(storage, done)


@pytest.mark.slow
def test_a_dead_rounds_torn_stage_costs_no_minute(tmp_path: Path) -> None:
    """Nor any time at all where this machine has written all that is there."""
    begun = time.monotonic()
    for alone in (True, False):
        storage = PosixStorage(tmp_path / "ck", patience=3600)
        storage.prepare("digits", given=True)
        at = storages.stage(130)
        path = storage.open_stage(at)
        storages.write(storage, at)
        (path / layout.manifest_name(1)).unlink()
        assert storage.finish_stages("digits", alone=alone) == [] and not path.exists()
        assert alone is (time.monotonic() - begun < commit.LATE_S)


@pytest.mark.slow
def test_what_is_on_the_disk_when(storage: PosixStorage, tmp_path: Path) -> None:
    """Fsync of each file before its rename, of its directory after, COMMIT last."""
    programs.needed("strace")
    code = (
        "import sys; from elaunch.checkpoint.storage.storage import open_storage\n"
        "from tests.checkpoint import storages\n"
        "storage = open_storage(sys.argv[1]); at = storages.stage(130)\n"
        "storages.write(storage, at, {0: {'a': b'1'}, 1: {'sub/b': b'2' * 2**21}})\n"
        "storage.commit(at, lambda: None)\n"
    )
    log = tmp_path / "strace"
    calls = "fsync,fdatasync,rename,renameat,renameat2,write,writev,pwrite64,pwritev"
    argv = ["strace", "-f", "-y", "-s0", "-o", str(log), "-e", f"trace={calls}"]
    argv += [sys.executable, "-c", code, str(storage.place)]
    traced = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100)
    programs.allowed(traced.stderr if "ptrace" in traced.stderr else None)
    assert traced.returncode == 0, traced.stderr
    check_order(log.read_text(), str(storage.place))


def whole_lines(trace: str) -> Iterator[str]:
    """Yield strace's lines in the order of their ends: another thread may come in between."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        pid = line.split()[0]
        if line.endswith("<unfinished ...>"):
            begun[pid] = line.removesuffix("<unfinished ...>")
        elif " resumed>" in line:
            yield begun.pop(pid) + line.partition(" resumed>")[2]
        else:
            yield line


def check_order(trace: str, root: str) -> None:
    """Assert that nothing was renamed before its content was on the disk, and what came after."""
    dirty: set[str] = set()  # written to since the last fsync
    unsynced: set[str] = set()  # directories in which something was renamed since
    renamed: list[str] = []
    for line in whole_lines(trace):
        call, _, rest = line.partition("(")
        names = re.findall(r'[<"](/[^>"]+)[>"]', rest) or re.findall(r"<(/[^>]+)>", line)
        if not names or not names[0].startswith(root):
            continue
        if call.split()[-1].startswith(("write", "pwrite")):
            dirty.add(names[0])
        elif "sync" in line:
            dirty.discard(names[0])
            unsynced.discard(names[0])
        elif "rename" in call:
            source, target = names[0], names[1]
            assert not [name for name in dirty if name == source or name.startswith(f"{source}/")]
            if layout.parse_step_name(os.path.basename(target)):
                below = [name for name in unsynced if name.startswith(source)]
                assert not below, "directories of the checkpoint are not on the disk"
            unsynced.add(os.path.dirname(target))
            renamed.append(os.path.basename(target))
    expected = ["a", "manifest.rank-00000.json", "b", "manifest.rank-00001.json"]
    assert renamed[:4] == expected
    assert [n for n in renamed[4:] if ".commit-" not in n] == [
        layout.METADATA,
        layout.COMMIT,
        "step-00000130.r3",
    ]
    assert root not in unsynced


@pytest.mark.parametrize("budget", [8, 300, 450, 520])
def test_a_full_disk(tmp_path: Path, budget: int) -> None:
    """A tmpfs of 1 MiB: an OSError that names the file; what was there stays, nothing torn."""
    with_mount(tmp_path, lambda small: fill(small, budget))


def fill(small: Path, budget: int) -> None:
    """Save 500 KiB with ``budget`` KiB of the disk left."""
    storage = PosixStorage(small / "ck")
    storage.prepare("digits", given=True)
    old = storages.save(storage)
    state = os.statvfs(small)
    with (small / "ballast").open("wb") as ballast:
        ballast.write(b"x" * (state.f_bavail * state.f_frsize - budget * 1024))
    at = storages.stage(130)
    images = [Image(f"{i}.bin", [os.urandom(125_000)]) for i in range(4)]
    try:
        storage.write_shard(at, storages.header(0, 1, 130), images)
        storage.commit(at, lambda: None)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        assert str(error.filename).startswith(str(small))
        assert storage.listed() == [old]
        storage.discard(at)
        starve(small)
        storage.remove(old)  # what makes room must work without room
        assert storage.listed() == []
    else:
        assert budget > 500
    for found in storage.listed():
        storage.verify(found)
    (small / "ballast").unlink()
    (small / "rest").unlink(missing_ok=True)
    storages.save(storage, 140)


def starve(small: Path) -> None:
    """Leave no byte."""
    with contextlib.suppress(OSError), (small / "rest").open("wb", buffering=0) as rest:
        while True:
            rest.write(b"x" * 1024)


def with_mount(tmp_path: Path, use: Callable[[Path], None]) -> None:
    """Call ``use`` with a small tmpfs, in a process that has mounts of its own."""
    programs.allowed("only root may mount a small tmpfs" if os.geteuid() else None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mount_small(tmp_path)
            use(tmp_path / "small")
            code = 0
        except BaseException:
            import traceback

            (tmp_path / "error").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    error = tmp_path / "error"
    assert status == 0, error.read_text() if error.exists() else status


def mount_small(tmp_path: Path) -> None:
    """Mount a tmpfs of 1 MiB that only this process sees."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    small = tmp_path / "small"
    small.mkdir()
    newns, private, recursive = 0x20000, 1 << 18, 0x4000
    calls = [
        lambda: libc.unshare(newns),
        lambda: libc.mount(b"none", b"/", None, private | recursive, None),
        lambda: libc.mount(b"tmpfs", os.fsencode(small), b"tmpfs", 0, b"size=1m"),
    ]
    for call in calls:
        if call() != 0:
            raise OSError(ctypes.get_errno(), "cannot mount a tmpfs here")


@pytest.mark.slow
def test_a_reader_while_many_writers_commit(tmp_path: Path) -> None:
    """16 processes commit and remove; whatever a reader sees is whole."""
    storage = PosixStorage(tmp_path / "ck")
    storage.prepare("digits", given=True)
    code = (
        "import sys; from elaunch.checkpoint.storage.storage import open_storage\n"
        "from tests.checkpoint import storages\n"
        "storage, writer = open_storage(sys.argv[1]), int(sys.argv[2])\n"
        "done = [storages.save(storage, step, writer) for step in range(1, 9)]\n"
        "[storage.remove(found) for found in done[:4]]\n"
    )
    writers = [
        warm.Popen([sys.executable, "-c", code, str(storage.place), str(writer)], os.environ, ROOT)
        for writer in range(16)
    ]
    seen = 0
    try:
        while any(writer.poll() is None for writer in writers):
            listed = storage.listed()
            seen += len(listed)
            for found in random.Random(seen).sample(listed, min(3, len(listed))):
                try:
                    storage.verify(found, "digits")
                except CheckpointError as error:
                    assert str(error) == "it vanished while it was read"
                    assert not Path(str(found.place)).exists()
        assert [writer.wait(60) for writer in writers] == [0] * 16
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert seen > 0
    assert len(storage.listed()) == 16 * 4
    check_whole(storage, storage.listed())
