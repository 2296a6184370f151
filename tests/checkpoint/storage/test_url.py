"""The storage behind a URL, on fsspec's memory, a directory, and a real S3 server (moto's)."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.checksums import BLOCK
from elaunch.checkpoint.storage.objects import Objects, Ranges
from elaunch.checkpoint.storage.storage import Image, ReadBefore, ShardHeader, open_storage
from elaunch.checkpoint.storage.url import ObjectStorage
from elaunch.errors import CheckpointError, SaveError, UsageError
from tests.checkpoint import storages

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of an empty bucket of a local S3, for this process and those that it starts."""
    server_module = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        # Instances are kept, and one may be of a server that this process had before.
        s3fs.S3FileSystem.clear_instance_cache()
        if not s3fs.S3FileSystem().exists("bucket"):  # moto keeps it for a process
            s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    """An empty storage of run "digits" behind each kind of URL."""
    if request.param == "s3":
        url = f"{request.getfixturevalue('s3')}/{uuid.uuid4()}"
    else:
        url = "memory://" + uuid.uuid4().hex if request.param == "memory" else f"file://{tmp_path}"
    made = open_storage(f"{url}/ck")
    assert isinstance(made, ObjectStorage)
    made.prepare("digits", given=True)
    made.lock().close()
    return made


s3_in_trials = pytest.mark.parametrize(
    "storage", ["memory", "file", pytest.param("s3", marks=pytest.mark.trial)], indirect=True
)
"""Over S3 among the trials: what S3 itself decides is in the tests without this mark."""


def overwrite(storage: ObjectStorage, path: str, content: bytes) -> None:
    """Change an object behind the storage's back."""
    Objects(storage.place).put(path, content)


def test_only_what_is_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by its name or uuid, and the newest one: its COMMIT and its metadata."""
    storage = open_storage(f"memory://{uuid.uuid4().hex}/ck")
    storage.prepare("digits", given=True)
    saved = [storages.save(storage, step) for step in range(6)]
    read, opened = Objects.read, []

    def noted(self: Objects, path: str) -> bytes:
        opened.append(path)
        return read(self, path)

    monkeypatch.setattr(Objects, "read", noted)
    for found in (saved[2], saved[5]):
        opened.clear()
        assert storage.find(found.name) == storage.find(found.uuid) == found
        place = str(found.place).rpartition("/")[2]
        assert opened == 2 * [f"{place}/COMMIT", f"{place}/metadata.json"]
    opened.clear()
    assert next(storage.newest_first()) == saved[5]
    assert storage.holds(saved[1].name, saved[1].uuid)
    assert len(opened) == 4
    assert not storage.holds(saved[1].name, saved[2].uuid)
    assert not storage.holds(saved[1].name, "another")
    known: ReadBefore = {}
    assert storage.listed(known) == saved
    opened.clear()
    assert storage.listed(known) == saved and opened == []


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks(storage: ObjectStorage) -> None:
    at = storages.stage()
    storage.write_shard(
        at, storages.header(0), [Image("a", [b"12", memoryview(b"3")]), Image("e", [])]
    )
    below = storage.open_stage(at, 1)
    (below / "d").mkdir()
    (below / "d" / "ü.bin").write_bytes(b"x" * 10)
    (below / ".metadata").write_bytes(b"m")
    assert storage.own_files(at, below) == [".metadata", "d/ü.bin"]
    storage.write_manifest(at, storages.header(1, rank_1="ok"), storage.own_files(at, below), below)
    assert storage.listed() == []
    assert sorted(storage.manifests(at)) == [0, 1]
    done = storage.commit(at, lambda: None, {"metrics": {"loss": 0.5}})
    assert done.place == f"{storage.place}/{at.name}"
    assert (done.name, done.uuid, done.size) == (at.final, at.uuid, 14)
    assert done.metadata == {"steps_completed": 120, "rank_1": "ok"}
    assert storage.listed() == [done] == [storage.find(at.uuid)]
    storage.verify(done, "digits")
    with storage.fetch(done) as path:
        assert path.name == at.final
        found = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        assert {n: c for n, c in found.items() if not layout.is_reserved(n)} == {
            "a": b"123",
            "e": b"",
            "d/ü.bin": b"x" * 10,
            ".metadata": b"m",
        }
    assert not path.exists()
    assert storage.commit(at, lambda: None) == done  # what a second committer gets
    storage.remove(done)
    storage.remove(done)
    assert storage.listed() == []
    assert Objects(storage.place).names() == [layout.RUN]


@s3_in_trials
def test_conflicts(storage: ObjectStorage) -> None:
    at = storages.stage()
    for rank in range(2):
        below = storage.open_stage(at, rank)
        (below / "x").write_bytes(bytes([rank]))
        storage.write_manifest(at, storages.header(rank), ["x"], below)
    with pytest.raises(SaveError, match=r"x: different content: .*\(rank 0\), .*\(rank 1\)"):
        storage.commit(at, lambda: None)
    assert storage.listed() == []
    storage.discard(at)
    with pytest.raises(SaveError, match="the save was given up"):
        storage.commit(at, lambda: None)


@pytest.mark.slow
def test_never_replaced(storage: ObjectStorage) -> None:
    late = storages.stage()
    storages.write(storage, late)
    done = storages.save(storage)
    with pytest.raises(SaveError, match="never replaced"):
        storage.commit(late, lambda: None)
    with pytest.raises(SaveError, match="never replaced"):
        storage.open_stage(late)
    assert storage.listed() == [done]
    storage.verify(done)
    storage.discard(late)
    storage.discard(storages.stage())


@pytest.mark.slow
def test_finish(storage: ObjectStorage) -> None:
    complete, torn, broken, live, foreign = (storages.stage(step) for step in range(5))
    for at in (complete, broken, live):
        storages.write(storage, at)
    overwrite(storage, f"{broken.name}/rank1.bin", b"\x01" * 999 + b"\x02")
    storage.write_shard(torn, storages.header(0, step=1), [Image("a", [b"x"])])
    storage.write_shard(foreign, ShardHeader(0, 2, "mnist", {}), [])
    done = storage.finish_stages("digits", keep=[live.name])
    assert [found.uuid for found in done] == [complete.uuid]
    assert storage.listed() == done
    left = Objects(storage.place).names()
    assert left == sorted([layout.RUN, complete.name, live.name, foreign.name])
    assert [found.uuid for found in storage.finish_stages(None)] == [live.uuid]
    for found in storage.listed():
        storage.verify(found, "digits")


@pytest.mark.slow
@s3_in_trials
def test_damage_and_quarantine(storage: ObjectStorage) -> None:
    done = storages.save(storage)
    name = str(done.place).rpartition("/")[2]
    objects = Objects(storage.place)
    overwrite(storage, f"{name}/rank0.bin", b"\1" * 1000)
    with pytest.raises(CheckpointError, match=r"bad checksum: rank0\.bin"):
        storage.verify(done)
    with pytest.raises(CheckpointError, match=r"bad checksum: rank0\.bin"), storage.fetch(done):
        raise AssertionError("a damaged checkpoint was given out")
    overwrite(storage, f"{name}/rank0.bin", b"\1")
    with pytest.raises(CheckpointError, match=r"truncated: rank0\.bin has 1 bytes"):
        storage.verify(done)
    objects.delete(f"{name}/rank0.bin")
    with pytest.raises(CheckpointError, match=r"missing: rank0\.bin"):
        storage.verify(done)
    storage.quarantine(done, "a file is missing")
    storage.quarantine(done.place, "again")
    assert storage.listed() == storage.finish_stages(None) == []
    assert storage.quarantined() == [(name, "a file is missing")]
    with pytest.raises(CheckpointError, match="not committed"):
        storage.verify(done)
    storages.save(storage)


@s3_in_trials
def test_a_committed_one_that_lacks_a_manifest(storage: ObjectStorage) -> None:
    """It is damaged, and no stage: put aside by who verifies, never cleared."""
    done = storages.save(storage)
    name = str(done.place).rpartition("/")[2]
    Objects(storage.place).delete(f"{name}/{layout.manifest_name(1)}")
    assert storage.finish_stages("digits", after=9) == []
    assert "rank0.bin" in Objects(storage.place).names(name)
    [found] = storage.listed()
    with pytest.raises(CheckpointError, match="rank"):
        storage.verify(found)
    storage.quarantine(found, "a manifest is missing")
    assert storage.listed() == []


@pytest.mark.slow
@s3_in_trials
def test_one_that_cannot_be_read_now(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left, and the others are finished all the same."""
    bad, good = storages.stage(1), storages.stage(2)
    storages.write(storage, bad)
    storages.write(storage, good)
    names = Objects.names

    def failing(self: Objects, path: str = "") -> list[str]:
        if path == bad.name:
            raise OSError(5, "Input/output error", path)
        return names(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "names", failing)
        assert [found.uuid for found in storage.finish_stages("digits")] == [good.uuid]
    assert [found.uuid for found in storage.finish_stages("digits")] == [bad.uuid]


def test_removal_that_was_interrupted(storage: ObjectStorage) -> None:
    done = storages.save(storage)
    name = str(done.place).rpartition("/")[2]
    overwrite(storage, f"{name}/{layout.REMOVED}", b"{}")
    assert storage.listed() == []
    storage.clear_trash()
    assert Objects(storage.place).names() == [layout.RUN]
    with pytest.raises(CheckpointError, match="is gone"), storage.fetch(done):
        raise AssertionError("what is gone was given out")


@pytest.mark.slow
@s3_in_trials
def test_a_late_commit_of_what_was_removed(storage: ObjectStorage) -> None:
    """The chief was frozen behind its fence, the chooser committed, retention removed."""
    at = storages.stage()
    storages.write(storage, at)

    def meanwhile() -> None:
        [found] = storage.finish_stages("digits")
        storage.remove(found)

    with pytest.raises(SaveError, match="cleared by another process"):
        storage.commit(at, meanwhile)
    assert storage.listed() == []
    assert storage.finish_stages("digits") == []
    assert Objects(storage.place).names() == [layout.RUN]


@s3_in_trials
def test_another_run(storage: ObjectStorage) -> None:
    with pytest.raises(SaveError, match="belongs to run 'digits', this is run 'mnist'"):
        storage.prepare("mnist", given=True)
    document = json.loads(Objects(storage.place).read(layout.RUN))
    assert (document["run_id"], document["given"]) == ("digits", True)


def test_a_document_is_put_as_a_whole(tmp_path: Path) -> None:
    """A reader who has opened the one before reads it to its end."""
    objects = Objects(f"file://{tmp_path}")
    objects.put("below/COMMIT", b"before")
    with (tmp_path / "below" / "COMMIT").open() as file:
        objects.put("below/COMMIT", b"after")
        assert (file.read(), objects.read("below/COMMIT")) == ("before", b"after")
    assert objects.names("below") == ["COMMIT"]


@pytest.mark.slow
def test_two_committers_at_once(storage: ObjectStorage) -> None:
    at = storages.stage()
    storages.write(storage, at)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(storage.commit, at, lambda: None) for _ in range(2)]
        assert [future.result(60).uuid for future in both] == [at.uuid, at.uuid]
    [found] = storage.listed()
    storage.verify(found)


def save_one(url: str, step: int) -> None:
    """Save in a process of its own."""
    storages.save(open_storage(url), step)


@pytest.mark.trial
@pytest.mark.slow
def test_processes_share_a_bucket(s3: str) -> None:
    url = f"{s3}/{uuid.uuid4()}/ck"
    storage = open_storage(url)
    storage.prepare("digits", given=True)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=save_one, args=(url, step)) for step in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(100)
    assert [found.step for found in storage.listed()] == [1, 2]


@pytest.mark.slow
def test_a_storage_that_is_not_there(s3: str) -> None:
    """No damage is claimed, the place is named."""
    with pytest.raises(OSError, match="bucket") as raised:
        open_storage("s3://no-such-bucket/ck").prepare("digits", given=True)
    assert not isinstance(raised.value, CheckpointError)


def test_urls_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="nonsense://x cannot be used: Protocol not known"):
        open_storage("nonsense://x")


def test_without_fsspec(tmp_path: Path) -> None:
    """The error names what to install; directories need nothing."""
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from elaunch.checkpoint.storage.storage import open_storage\n"
        "open_storage(sys.argv[1]).listed()\n"
        "open_storage('s3://bucket/x')\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stderr.endswith("not installed: pip install 'elaunch[storage]'\n")


@s3_in_trials
def test_a_stage_that_the_script_has_removed(storage: ObjectStorage) -> None:
    """No empty checkpoint is made of it; the step can be saved again."""
    at = storages.stage()
    shutil.rmtree(storage.open_stage(at))
    with pytest.raises(SaveError, match=f"was removed while {at.name} was written into it"):
        storage.own_files(at)
    storage.discard(at)
    assert storage.listed() == []
    storages.save(storage)


def test_the_root_of_the_memory() -> None:
    """Its URL keeps its slashes."""
    storage = open_storage("memory:///")
    assert storage.place == "memory://"
    done = storages.save(storage)
    assert str(done.place).startswith(f"memory:///{done.name}.")
    assert done in storage.listed()
    storage.remove(done)


@s3_in_trials
def test_local_copies_do_not_stay(storage: ObjectStorage) -> None:
    at = storages.stage()
    path = storage.open_stage(at)
    (path / "a").write_bytes(b"1")
    storage.write_manifest(at, storages.header(0, 1), storage.own_files(at))
    assert os.listdir(path) == []
    storage.commit(at, lambda: None)
    assert not path.exists()


@pytest.mark.slow
@s3_in_trials
def test_finish_leaves_what_agents_have_in_memory(storage: ObjectStorage) -> None:
    storages.finish_what_is_held(storage)


@s3_in_trials
def test_two_jobs_commit_one_name(storage: ObjectStorage) -> None:
    """The second of them comes between the first one's look and its COMMIT: one has the name."""
    first, second = storages.stage(), storages.stage()
    for stage in (first, second):
        storages.write(storage, stage)
    other = ObjectStorage(storage.place)
    with pytest.raises(SaveError, match=r"step-00000120\.r3"):
        storage.commit(first, lambda: void(other.commit(second, lambda: None)))
    assert [found.uuid for found in storage.listed()] == [second.uuid]
    assert storage.find("step-00000120.r3").uuid == second.uuid
    assert storage.commit(second, lambda: None).uuid == second.uuid


def void(_: object) -> None:
    """Take a result, and return none."""


def test_ranges_of_an_object(storage: ObjectStorage) -> None:
    """Are read in whole blocks, in any order, to the object's end and no further."""
    content = os.urandom(2 * BLOCK + 100)
    overwrite(storage, "some/file", content)
    ranges = Ranges(Objects(storage.place), "some")
    assert ranges.sizes == {"file": len(content)}
    for at, end in [(0, 10), (5, BLOCK), (BLOCK + 5, 2 * BLOCK + 1), (7, 9), (2 * BLOCK, 1 << 40)]:
        assert ranges.read("file", at, end) == content[at:end]
    assert not ranges.read("file", len(content), len(content) + 1)
    with pytest.raises(FileNotFoundError):
        ranges.read("other", 0, 1)
