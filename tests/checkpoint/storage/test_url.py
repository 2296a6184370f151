"""The depot behind a URL, on fsspec's memory, a directory, and a real S3 server (moto's)."""

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
from elaunch.checkpoint.storage.objects import Objects
from elaunch.checkpoint.storage.storage import Image, Part, open_depot
from elaunch.checkpoint.storage.url import FsspecDepot
from elaunch.errors import CheckpointError, SaveError, UsageError
from tests.checkpoint import depots

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

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def depot(request: pytest.FixtureRequest, tmp_path: Path) -> FsspecDepot:
    """An empty depot of run "digits" behind each kind of URL."""
    if request.param == "s3":
        url = f"{request.getfixturevalue('s3')}/{uuid.uuid4()}"
    else:
        url = "memory://" + uuid.uuid4().hex if request.param == "memory" else f"file://{tmp_path}"
    made = open_depot(f"{url}/ck")
    assert isinstance(made, FsspecDepot)
    made.prepare("digits", given=True)
    made.lock().close()
    return made


def overwrite(depot: FsspecDepot, path: str, content: bytes) -> None:
    """Change an object behind the depot's back."""
    Objects(depot.place).put(path, content)


def test_a_checkpoint_of_two_ranks(depot: FsspecDepot) -> None:
    at = depots.stage()
    depot.write_part(at, depots.part(0), [Image("a", [b"12", memoryview(b"3")]), Image("e", [])])
    below = depot.open_stage(at, 1)
    (below / "d").mkdir()
    (below / "d" / "ü.bin").write_bytes(b"x" * 10)
    (below / ".metadata").write_bytes(b"m")
    assert depot.own_files(at, below) == [".metadata", "d/ü.bin"]
    depot.seal(at, depots.part(1, rank_1="ok"), depot.own_files(at, below), below)
    assert depot.listed() == []
    assert sorted(depot.manifests(at)) == [0, 1]
    done = depot.commit(at, lambda: None, {"metrics": {"loss": 0.5}})
    assert done.place == f"{depot.place}/{at.name}"
    assert (done.name, done.uuid, done.size) == (at.final, at.uuid, 14)
    assert done.metadata == {"steps_completed": 120, "rank_1": "ok"}
    assert depot.listed() == [done] == [depot.find(at.uuid)]
    depot.verify(done, "digits")
    with depot.fetch(done) as path:
        assert path.name == at.final
        found = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        assert {n: c for n, c in found.items() if not layout.is_reserved(n)} == {
            "a": b"123",
            "e": b"",
            "d/ü.bin": b"x" * 10,
            ".metadata": b"m",
        }
    assert not path.exists()
    assert depot.commit(at, lambda: None) == done  # what a second committer gets
    depot.remove(done)
    depot.remove(done)
    assert depot.listed() == []
    assert Objects(depot.place).names() == [layout.RUN]


def test_conflicts(depot: FsspecDepot) -> None:
    at = depots.stage()
    for rank in range(2):
        below = depot.open_stage(at, rank)
        (below / "x").write_bytes(bytes([rank]))
        depot.seal(at, depots.part(rank), ["x"], below)
    with pytest.raises(SaveError, match=r"x: different content: .*\(rank 0\), .*\(rank 1\)"):
        depot.commit(at, lambda: None)
    assert depot.listed() == []
    depot.discard(at)
    with pytest.raises(SaveError, match="the save was given up"):
        depot.commit(at, lambda: None)


def test_never_replaced(depot: FsspecDepot) -> None:
    late = depots.stage()
    depots.write(depot, late)
    done = depots.save(depot)
    with pytest.raises(SaveError, match="never replaced"):
        depot.commit(late, lambda: None)
    with pytest.raises(SaveError, match="never replaced"):
        depot.open_stage(late)
    assert depot.listed() == [done]
    depot.verify(done)
    depot.discard(late)
    depot.discard(depots.stage())


def test_finish(depot: FsspecDepot) -> None:
    complete, torn, broken, live, foreign = (depots.stage(step) for step in range(5))
    for at in (complete, broken, live):
        depots.write(depot, at)
    overwrite(depot, f"{broken.name}/rank1.bin", b"\x01" * 999 + b"\x02")
    depot.write_part(torn, depots.part(0, step=1), [Image("a", [b"x"])])
    depot.write_part(foreign, Part(0, 2, "mnist", {}), [])
    done = depot.finish_stages("digits", keep=[live.name])
    assert [found.uuid for found in done] == [complete.uuid]
    assert depot.listed() == done
    left = Objects(depot.place).names()
    assert left == sorted([layout.RUN, complete.name, live.name, foreign.name])
    assert [found.uuid for found in depot.finish_stages(None)] == [live.uuid]
    for found in depot.listed():
        depot.verify(found, "digits")


def test_damage_and_quarantine(depot: FsspecDepot) -> None:
    done = depots.save(depot)
    name = str(done.place).rpartition("/")[2]
    objects = Objects(depot.place)
    overwrite(depot, f"{name}/rank0.bin", b"\1" * 1000)
    with pytest.raises(CheckpointError, match=r"bad checksum: rank0\.bin"):
        depot.verify(done)
    with pytest.raises(CheckpointError, match=r"bad checksum: rank0\.bin"), depot.fetch(done):
        raise AssertionError("a damaged checkpoint was given out")
    overwrite(depot, f"{name}/rank0.bin", b"\1")
    with pytest.raises(CheckpointError, match=r"truncated: rank0\.bin has 1 bytes"):
        depot.verify(done)
    objects.delete(f"{name}/rank0.bin")
    with pytest.raises(CheckpointError, match=r"missing: rank0\.bin"):
        depot.verify(done)
    depot.quarantine(done, "a file is missing")
    depot.quarantine(done.place, "again")
    assert depot.listed() == depot.finish_stages(None) == []
    assert depot.quarantined() == [(name, "a file is missing")]
    with pytest.raises(CheckpointError, match="not committed"):
        depot.verify(done)
    depots.save(depot)


def test_a_committed_one_that_lacks_a_manifest(depot: FsspecDepot) -> None:
    """It is damaged, and no stage: put aside by who verifies, never cleared."""
    done = depots.save(depot)
    name = str(done.place).rpartition("/")[2]
    Objects(depot.place).delete(f"{name}/{layout.manifest_name(1)}")
    assert depot.finish_stages("digits", after=9) == []
    assert "rank0.bin" in Objects(depot.place).names(name)
    [found] = depot.listed()
    with pytest.raises(CheckpointError, match="rank"):
        depot.verify(found)
    depot.quarantine(found, "a manifest is missing")
    assert depot.listed() == []


def test_one_that_cannot_be_read_now(depot: FsspecDepot, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left, and the others are finished all the same."""
    bad, good = depots.stage(1), depots.stage(2)
    depots.write(depot, bad)
    depots.write(depot, good)
    names = Objects.names

    def failing(self: Objects, path: str = "") -> list[str]:
        if path == bad.name:
            raise OSError(5, "Input/output error", path)
        return names(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "names", failing)
        assert [found.uuid for found in depot.finish_stages("digits")] == [good.uuid]
    assert [found.uuid for found in depot.finish_stages("digits")] == [bad.uuid]


def test_removal_that_was_interrupted(depot: FsspecDepot) -> None:
    done = depots.save(depot)
    name = str(done.place).rpartition("/")[2]
    overwrite(depot, f"{name}/{layout.REMOVED}", b"{}")
    assert depot.listed() == []
    depot.clear_trash()
    assert Objects(depot.place).names() == [layout.RUN]
    with pytest.raises(CheckpointError, match="is gone"), depot.fetch(done):
        raise AssertionError("what is gone was given out")


def test_a_late_commit_of_what_was_removed(depot: FsspecDepot) -> None:
    """The chief was frozen behind its fence, the chooser committed, retention removed."""
    at = depots.stage()
    depots.write(depot, at)

    def meanwhile() -> None:
        [found] = depot.finish_stages("digits")
        depot.remove(found)

    with pytest.raises(SaveError, match="cleared by another process"):
        depot.commit(at, meanwhile)
    assert depot.listed() == []
    assert depot.finish_stages("digits") == []
    assert Objects(depot.place).names() == [layout.RUN]


def test_another_run(depot: FsspecDepot) -> None:
    with pytest.raises(SaveError, match="belongs to run 'digits', this is run 'mnist'"):
        depot.prepare("mnist", given=True)
    document = json.loads(Objects(depot.place).read(layout.RUN))
    assert (document["run_id"], document["given"]) == ("digits", True)


def test_two_committers_at_once(depot: FsspecDepot) -> None:
    at = depots.stage()
    depots.write(depot, at)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(depot.commit, at, lambda: None) for _ in range(2)]
        assert [future.result(60).uuid for future in both] == [at.uuid, at.uuid]
    [found] = depot.listed()
    depot.verify(found)


def save_one(url: str, step: int) -> None:
    """Save in a process of its own."""
    depots.save(open_depot(url), step)


@pytest.mark.slow
def test_processes_share_a_bucket(s3: str) -> None:
    url = f"{s3}/{uuid.uuid4()}/ck"
    depot = open_depot(url)
    depot.prepare("digits", given=True)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=save_one, args=(url, step)) for step in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(100)
    assert [found.step for found in depot.listed()] == [1, 2]


def test_a_storage_that_is_not_there(s3: str) -> None:
    """No damage is claimed, the place is named."""
    with pytest.raises(OSError, match="bucket") as raised:
        open_depot("s3://no-such-bucket/ck").prepare("digits", given=True)
    assert not isinstance(raised.value, CheckpointError)


def test_urls_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="nonsense://x cannot be used: Protocol not known"):
        open_depot("nonsense://x")


def test_without_fsspec(tmp_path: Path) -> None:
    """The error names what to install; directories need nothing."""
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from elaunch.checkpoint.storage.storage import open_depot\n"
        "open_depot(sys.argv[1]).listed()\n"
        "open_depot('s3://bucket/x')\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stderr.endswith("not installed: pip install 'elaunch[storage]'\n")


def test_a_stage_that_the_script_has_removed(depot: FsspecDepot) -> None:
    """No empty checkpoint is made of it; the step can be saved again."""
    at = depots.stage()
    shutil.rmtree(depot.open_stage(at))
    with pytest.raises(SaveError, match=f"was removed while {at.name} was written into it"):
        depot.own_files(at)
    depot.discard(at)
    assert depot.listed() == []
    depots.save(depot)


def test_the_root_of_the_memory() -> None:
    """Its URL keeps its slashes."""
    depot = open_depot("memory:///")
    assert depot.place == "memory://"
    done = depots.save(depot)
    assert str(done.place).startswith(f"memory:///{done.name}.")
    assert done in depot.listed()
    depot.remove(done)


def test_local_copies_do_not_stay(depot: FsspecDepot) -> None:
    at = depots.stage()
    path = depot.open_stage(at)
    (path / "a").write_bytes(b"1")
    depot.seal(at, depots.part(0, 1), depot.own_files(at))
    assert os.listdir(path) == []
    depot.commit(at, lambda: None)
    assert not path.exists()
