"""What is done in a checkpoint directory before a checkpoint is chosen there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from msgspec import structs

from elaunch.agent.resume import directory, latest
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.resume.latest import DirectoryProbe
from elaunch.checkpoint import layout, shelves
from elaunch.checkpoint.ownership import holding_jobs
from elaunch.checkpoint.records import Image, Keep, PassedOver, ShardHeader, Stage
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Committed, Storage, open_storage
from elaunch.config import Settings, resolve
from elaunch.errors import SaveError
from elaunch.rendezvous.decide.view import Search
from tests.launching import wait_until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return the settings of the run "digits"."""
    script = tmp_path / "train.py"
    script.write_text("")
    line = {"checkpoint-dir": str(tmp_path / "ck")}
    found = resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)
    return structs.replace(found, run_id="digits", run_id_given=True)


@pytest.fixture
def storage(settings: Settings) -> Storage:
    """Return the run's directory, made ready."""
    assert settings.checkpoint_dir is not None
    made = open_storage(settings.checkpoint_dir)
    made.prepare("digits", given=True)
    return made


def staged(
    storage: Storage,
    step: int,
    ranks: int = 2,
    run_id: str = "digits",
    keep: dict[str, Any] | None = None,
) -> Stage:
    """Leave a stage with the parts of the first ``ranks`` of two."""
    stage = Stage(step, 0, f"u{step}")
    for rank in range(ranks):
        part = ShardHeader(rank, 2, run_id, {"steps_completed": step}, keep=keep)
        storage.write_shard(stage, part, [Image(f"part-{rank}", [b"%04d" % step])])
    return stage


def chosen(settings: Settings, finisher: DirectoryFinisher) -> str | None:
    """Return the name of the checkpoint that the next round gets."""
    found = latest.look(settings, finisher, Search())
    assert found.problem is None, found.problem
    checkpoint = found.search.checkpoint
    return None if checkpoint is None else Path(checkpoint.path).name


def test_what_was_complete_is_committed_and_chosen(settings: Settings, storage: Storage) -> None:
    """Its committer had died; a later one that is not whole is cleared."""
    storage.commit(staged(storage, 10), lambda: None)
    staged(storage, 20)
    staged(storage, 30, ranks=1)
    finisher = DirectoryFinisher(settings)
    assert chosen(settings, finisher) == "step-00000020.r0"
    assert os.listdir(Path(storage.place) / ".stage") == []
    finisher.close()


def held_names(storage: Storage) -> list[str]:
    """Return the names of the checkpoints that are there."""
    return [found.name for found in storage.listed()]


@pytest.mark.parametrize("by", ["call", "flag"])
def test_what_is_committed_for_the_dead_is_kept_by_rule(
    settings: Settings, storage: Storage, by: str
) -> None:
    """By that of the save itself, else by the flags'; a pinned one stays."""
    for step in (10, 20, 30):
        storage.commit(staged(storage, step), lambda: None)
    shelves.pin(storage.place, "step-00000010.r0")
    flags = Keep(last=1) if by == "call" else Keep(last=2)
    staged(storage, 40, keep={"last": 2} if by == "call" else None)
    finisher = DirectoryFinisher(structs.replace(settings, checkpoint_keep=flags))
    assert chosen(settings, finisher) == "step-00000040.r0"
    finisher.close()
    kept = ["step-00000010.r0", "step-00000030.r0", "step-00000040.r0"]
    assert held_names(storage) == kept
    staged(storage, 50, keep={"last": "x"} if by == "call" else None)
    finisher = DirectoryFinisher(structs.replace(settings, checkpoint_keep=Keep()))
    assert chosen(settings, finisher) == "step-00000050.r0"
    finisher.close()
    assert held_names(storage) == [*kept, "step-00000050.r0"]  # no rule, or none that is one


def test_what_is_committed_at_a_url_is_kept_by_rule(settings: Settings) -> None:
    """The names there have a uuid, which pins and rules do not know."""
    storage = open_storage(f"memory://{os.getpid()}-rule/ck")
    storage.prepare("digits", given=True)
    for step in (10, 20):
        storage.commit(staged(storage, step), lambda: None)
    shelves.pin(storage.place, "step-00000010.r0")
    staged(storage, 30, keep={"last": 1})
    at_url = structs.replace(settings, checkpoint_dir=storage.place)
    finisher = DirectoryFinisher(at_url)
    assert chosen(at_url, finisher) == "step-00000030.r0.u30"
    finisher.close()
    assert held_names(storage) == ["step-00000010.r0", "step-00000030.r0"]


def test_the_newest_at_a_url_is_read_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first round; what the job writes itself is not read by later searches at all."""
    storage = open_storage(f"memory://{os.getpid()}-once/ck")
    storage.prepare("digits", given=True)
    storage.commit(staged(storage, 10), lambda: None)
    at_url = structs.replace(settings, checkpoint_dir=storage.place)
    finisher = DirectoryFinisher(at_url)
    opened, open_file = list[str](), MemoryFileSystem.open

    def counting(system: MemoryFileSystem, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "rb" and "/part-" in path:
            opened.append(path.rpartition("/")[2])
        return open_file(system, path, mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "open", counting)
    for _ in range(3):
        assert chosen(at_url, finisher) == "step-00000010.r0.u10"
    assert sorted(opened) == ["part-0", "part-1"]
    storage.commit(staged(storage, 20), lambda: None)
    assert chosen(at_url, finisher) == "step-00000020.r0.u20"
    assert len(opened) == 2
    finisher.close()


def test_what_the_round_resumes_from_stays(settings: Settings, storage: Storage) -> None:
    """Newer ones that cannot be read just now count, and are not resumed from."""
    for step in (10, 20, 40):
        storage.commit(staged(storage, step), lambda: None)
    staged(storage, 30, keep={"last": 1})
    (Path(storage.place) / "step-00000040.r0" / "part-1").write_bytes(b"bits")
    finisher = DirectoryFinisher(settings)
    finisher.finish(Path(storage.place), None)
    finisher.retire("step-00000010.r0")
    finisher.close()
    assert held_names(storage) == ["step-00000010.r0", "step-00000030.r0", "step-00000040.r0"]


def test_no_round_waits_for_what_is_removed(
    settings: Settings, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next search does not, either; the end of the job does."""
    goes, asked, real = threading.Event(), threading.Semaphore(0), PosixStorage.remove

    def slow(disk: PosixStorage, found: Committed) -> None:
        asked.release()
        assert goes.wait(60)
        real(disk, found)

    monkeypatch.setattr(PosixStorage, "remove", slow)
    storage.commit(staged(storage, 10), lambda: None)
    finisher = DirectoryFinisher(structs.replace(settings, checkpoint_keep=Keep(last=1)))
    staged(storage, 20)
    assert chosen(settings, finisher) == "step-00000020.r0"
    assert asked.acquire(timeout=60)
    staged(storage, 30)
    assert chosen(settings, finisher) == "step-00000030.r0"
    threading.Timer(0.1, goes.set).start()
    finisher.close()
    assert held_names(storage) == ["step-00000020.r0", "step-00000030.r0"]


def test_what_this_agent_still_writes_is_left_alone(settings: Settings, storage: Storage) -> None:
    """A thread of its own that the storage holds up would write into nothing."""
    stage = staged(storage, 30, ranks=1)
    finisher = DirectoryFinisher(settings)
    finisher.unfinished = lambda: [stage.name]
    assert chosen(settings, finisher) is None
    assert os.listdir(Path(storage.place) / ".stage") == [stage.name]
    finisher.close()


def test_what_is_damaged_is_put_aside(settings: Settings, storage: Storage) -> None:
    """The next older one is taken, at no cost but the search; the reason is kept."""
    for step in (10, 20, 30):
        storage.commit(staged(storage, step), lambda: None)
    (Path(storage.place) / "step-00000030.r0" / "part-1").write_bytes(b"bits")
    (Path(storage.place) / "step-00000020.r0" / "part-0").unlink()
    finisher = DirectoryFinisher(settings)
    assert chosen(settings, finisher) == "step-00000010.r0"
    reasons = dict(storage.quarantined())
    assert "checksum" in reasons["step-00000030.r0"]
    assert "part-0" in reasons["step-00000020.r0"]
    assert [found.name for found in storage.listed()] == ["step-00000010.r0"]
    finisher.close()


@pytest.mark.slow
def test_many_damaged_ones_do_not_hold_up_the_round(
    settings: Settings,
    storage: Storage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are moved at once, and the disk is waited for once."""
    storage.commit(staged(storage, 10), lambda: None)
    place = Path(storage.place)
    whole = place / "step-00000010.r0"
    for step in range(20, 420):
        torn = place / layout.step_name(step, 0)
        torn.mkdir()
        (torn / layout.METADATA).write_bytes((whole / layout.METADATA).read_bytes())
    synced, sync = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), sync(file)))
    monkeypatch.setattr(directory, "ASIDE_S", 60.0)  # a busy machine takes longer
    finisher = DirectoryFinisher(settings)
    assert chosen(settings, finisher) == whole.name
    assert 0 < len(synced) < 20
    assert len(storage.quarantined()) == 400
    assert {reason for _, reason in storage.quarantined()} == {"not committed: COMMIT is missing"}
    assert "390 more are damaged: put into quarantine" in caplog.text
    finisher.close()


def test_no_round_waits_for_what_is_put_aside(
    settings: Settings, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next search goes on with it."""
    storage.commit(staged(storage, 10), lambda: None)
    storage.commit(staged(storage, 20), lambda: None)
    (Path(storage.place) / "step-00000020.r0" / layout.COMMIT).unlink()
    made = DirectoryFinisher(settings)
    monkeypatch.setattr(directory, "ASIDE_S", 0.0)
    assert chosen(settings, made) == "step-00000010.r0" and storage.quarantined() == []
    monkeypatch.undo()
    assert chosen(settings, made) == "step-00000010.r0"
    assert [name for name, _ in storage.quarantined()] == ["step-00000020.r0"]
    made.close()


def test_what_another_run_wrote_is_left_alone(settings: Settings, storage: Storage) -> None:
    """Damaged or not."""
    storage.commit(staged(storage, 10, run_id="other"), lambda: None)
    (Path(storage.place) / "step-00000010.r0" / "part-1").write_bytes(b"bits")
    finisher = DirectoryFinisher(settings)
    assert chosen(settings, finisher) is None
    assert storage.quarantined() == []
    finisher.close()


def test_two_jobs_in_one_directory(settings: Settings, storage: Storage) -> None:
    """The second one is told who has it, and touches nothing."""
    stage = staged(storage, 10)
    other = storage.lock()
    finisher = DirectoryFinisher(settings)
    found = latest.look(settings, finisher, Search())
    assert found.problem is not None
    assert f"in use by another job (process {os.getpid()}" in found.problem
    assert os.listdir(Path(storage.place) / ".stage") == [stage.name]
    other.close()
    assert chosen(settings, finisher) == "step-00000010.r0"
    with pytest.raises(SaveError):
        storage.lock()
    finisher.close()
    storage.lock().close()


def test_a_directory_that_elaunch_does_not_write_into(settings: Settings, tmp_path: Path) -> None:
    """Nothing is put there, and two jobs may have it."""
    (tmp_path / "ck").mkdir(exist_ok=True)
    finisher = DirectoryFinisher(settings)
    assert chosen(settings, finisher) is None
    assert os.listdir(tmp_path / "ck") == []


def test_an_agent_of_the_same_job_of_several_nodes(
    settings: Settings, storage: Storage, tmp_path: Path
) -> None:
    """One of them has the lock, and all of them the directory; a job of another id has not."""
    line = {"nnodes": "2", "rdzv-endpoint": "localhost:29400", "rdzv-backend": "c10d"}
    line |= {"rdzv-id": "digits", "checkpoint-dir": str(storage.place)}
    script = [str(tmp_path / "train.py")]
    several = resolve(line, script, {"PATH": os.environ["PATH"]}, tmp_path)
    held = storage.lock()
    DirectoryFinisher(several).lock(storage)
    path = Path(storage.place) / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run_id": "another"}))
    with pytest.raises(SaveError, match="another job"):
        DirectoryFinisher(several).lock(storage)
    held.close()


def test_an_agent_whose_store_has_begun_anew_twice(
    settings: Settings, storage: Storage, tmp_path: Path
) -> None:
    """It holds the lock and has not saved since; who hosts the store now is new and knows one id.

    Which one, the newest that it has read or the one of its last round, is no matter.
    """
    line = {"nnodes": "2", "rdzv-endpoint": "localhost:29400", "rdzv-backend": "c10d"}
    line |= {"rdzv-id": "digits", "checkpoint-dir": str(storage.place)}
    script = [str(tmp_path / "train.py")]
    several = resolve(line, script, {"PATH": os.environ["PATH"]}, tmp_path)
    holder = DirectoryFinisher(several)
    holder.enter("one")
    holder.lock(storage)
    for job in ("two", "three"):
        holder.enter(job)
    for seen in ("one", "two", "three"):
        hosts = DirectoryFinisher(several)
        found = latest.look(several, hosts, Search(jobs=frozenset(["four", seen])))
        assert found.problem is None
        hosts.close()
    holder.close()


def test_another_job_of_the_same_id(
    settings: Settings, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another rendezvous: told apart by the plans' words, once a round has begun."""
    line = {"nnodes": "2", "rdzv-endpoint": "localhost:29400", "rdzv-backend": "c10d"}
    line |= {"rdzv-id": "digits", "checkpoint-dir": str(storage.place)}
    script = [str(tmp_path / "train.py")]
    several = resolve(line, script, {"PATH": os.environ["PATH"]}, tmp_path)
    monkeypatch.setattr("elaunch.agent.resume.directory.LOCK_S", 0.2)
    first, same, other = (DirectoryFinisher(several) for _ in range(3))
    first.lock(storage)  # the search before its first plan is published
    first.enter("one")
    same.jobs.update(["new", "one"])
    other.enter("two")
    same.lock(storage)
    assert isinstance(storage.place, Path)
    wait_until(partial(holding_jobs, storage.place), what="the holder is named")  # in a thread
    with pytest.raises(SaveError, match="another job"):
        other.lock(storage)
    first.close()
    other.lock(storage)
    other.close()


def test_one_that_cannot_be_read_stays(
    settings: Settings, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole, and it is no reason to end the job."""
    done = storage.commit(staged(storage, 10), lambda: None)

    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(done.place))

    monkeypatch.setattr("elaunch.checkpoint.formats.own.verify", unreadable)
    place = Path(storage.place)
    DirectoryFinisher(settings).put_aside(
        place, [PassedOver(Path(done.place), "unreadable")], "digits"
    )
    assert storage.listed() == [done]


def test_storage_that_hangs_does_not_hold_up_the_end(
    settings: Settings, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the lock nor for the mark of the probe; what is asked of it ends one day."""
    hung, asked = threading.Event(), threading.Semaphore(0)

    def hang(*_: object) -> None:
        asked.release()
        hung.wait()

    monkeypatch.setattr("elaunch.checkpoint.ownership.DirectoryLock.close", hang)
    monkeypatch.setattr("elaunch.checkpoint.probe.remove_mark", hang)
    monkeypatch.setattr("elaunch.agent.resume.directory.CLOSE_S", 0.05)
    monkeypatch.setattr("elaunch.agent.resume.latest.CLOSE_S", 0.05)
    finisher, probing = DirectoryFinisher(settings), DirectoryProbe(settings, lambda _: None)
    finisher.lock(storage)
    finisher.close()
    monkeypatch.setattr(probing, "_marked", True)
    probing.close()
    assert asked.acquire(timeout=60)
    assert asked.acquire(timeout=60)
    hung.set()


def moved_away(root: Path) -> None:
    """Have an empty directory there, as when the file system is unmounted."""
    root.rename(root.with_name("away"))
    root.mkdir()


def remade(root: Path) -> None:
    """Have another one there, as when a worker has made it anew."""
    moved_away(root)
    open_storage(root).prepare("digits", given=True)


@pytest.mark.parametrize("go", [shutil.rmtree, moved_away, remade])
@pytest.mark.parametrize("by", ["look", "lock"])
def test_a_directory_that_has_gone(
    settings: Settings, storage: Storage, go: Callable[[Path], None], by: str
) -> None:
    """Nobody starts afresh in what is there instead: neither the next round nor its workers."""
    finisher, place = DirectoryFinisher(settings), Path(storage.place)
    if by == "look":
        assert chosen(settings, finisher) is None
    else:
        finisher.lock(storage)
    go(place)
    left = sorted(place.glob("*"))
    found = latest.look(settings, finisher, Search())
    assert found.problem is not None
    assert f"{place} is not the directory that this job began with" in found.problem
    assert found.exit_code == 74
    with pytest.raises(SaveError, match="is not the directory that this job began with"):
        finisher.lock(storage)
    assert sorted(place.glob("*")) == left
    finisher.close()


def test_a_pipe_in_the_place_of_a_document_holds_no_round_up(
    settings: Settings, storage: Storage
) -> None:
    """Nobody ever writes to it: the search goes on without what is there."""
    path = Path(storage.place) / "step-00000020.r0"
    path.mkdir()
    (path / layout.COMMIT).write_text("{}")
    os.mkfifo(path / layout.METADATA)
    done = threading.Event()

    def search() -> None:
        latest.look(settings, DirectoryFinisher(settings), Search())
        done.set()

    threading.Thread(target=search, daemon=True).start()
    assert done.wait(20.0)
