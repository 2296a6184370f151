"""The storage in a directory: what is committed, what is refused, what is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.search.latest import find_latest
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Image, ShardHeader, Stage, open_storage
from elaunch.errors import CheckpointError, SaveError
from tests.checkpoint import makers, storages
from tests.opens import opened_below


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    """An empty storage of run "digits"."""
    made = open_storage(tmp_path / "ck")
    assert isinstance(made, PosixStorage)
    made.prepare("digits", given=True)
    return made


def entries(storage: PosixStorage, below: str = ".") -> list[str]:
    """Return the names in a directory of the storage."""
    return sorted(os.listdir(storage.place / below))


def refuse() -> None:
    """Be the fence of a round that is over."""
    raise SaveError("round 3 is over")


def test_a_checkpoint_of_two_ranks(storage: PosixStorage) -> None:
    at = storages.stage()
    storages.write(storage, at, {0: {"model.pt": b"w" * 5000, "e": b""}, 1: {"d/ü/x.bin": b"\x01"}})
    assert storage.listed() == []
    assert sorted(storage.manifests(at)) == [0, 1]
    extra = {"metrics": {"loss": 0.5}, "versions": {"torch": "2.13"}, "durations": {"write": 1.0}}
    done = storage.commit(at, lambda: None, extra)
    assert done.name == "step-00000120.r3" == at.final
    assert done.place == storage.place / at.final
    assert (done.step, done.round, done.uuid, done.run_id) == (120, 3, at.uuid, "digits")
    assert (done.size, done.world_size, done.metrics) == (5001, 2, {"loss": 0.5})
    assert done.document["versions"].keys() == {"elaunch", "python", "torch"}
    assert done.document["files"] == 3
    assert storage.listed() == [done]
    own.verify(storage.place / at.final, "digits")
    storage.verify(done, "digits")
    with storage.fetch(done) as path:
        assert (path / "d" / "ü" / "x.bin").read_bytes() == b"\x01"
        assert (path / "e").read_bytes() == b""
    assert find_latest(storage.place, run_id="digits").checkpoint is not None
    assert entries(storage, layout.STAGE) == []


def test_a_restart_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the save before it writes may keep that busy for minutes."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    PosixStorage(tmp_path / "new").prepare("run-1", True)
    assert synced
    synced.clear()
    PosixStorage(tmp_path / "new").prepare("run-1", True)
    assert not synced


def test_pieces_are_joined(storage: PosixStorage) -> None:
    import array

    at = storages.stage()
    numbers = array.array("d", range(1000))
    pieces = [b"head", memoryview(numbers), b"", memoryview(b"tail")]
    many = [bytes([i % 256]) for i in range(3000)]
    images = [Image("a", pieces), Image("b", many)]
    assert images[0].size == 8008
    storage.write_shard(at, storages.header(0, 1), images)
    done = storage.commit(at, lambda: None)
    with storage.fetch(done) as path:
        assert (path / "a").read_bytes() == b"head" + numbers.tobytes() + b"tail"
        assert (path / "b").read_bytes() == b"".join(many)
    storage.verify(done)


def test_merged_metadata(storage: PosixStorage) -> None:
    at = storages.stage()
    storage.write_shard(at, storages.header(0, rank_0="ok", lr={"a": 1}), [])
    storage.write_shard(at, storages.header(1, rank_1="ok", lr={"b": [2]}), [])
    done = storage.commit(at, lambda: None)
    wanted = {"steps_completed": 120, "rank_0": "ok", "rank_1": "ok", "lr": {"a": 1, "b": [2]}}
    assert done.metadata == wanted == storage.listed()[0].metadata


def test_contradicting_metadata(storage: PosixStorage) -> None:
    at = storages.stage()
    storage.write_shard(at, storages.header(0, loss=0.5), [])
    storage.write_shard(at, storages.header(1, loss=0.7), [])
    with pytest.raises(SaveError, match=r"loss is 0\.5 \(rank 0\), 0\.7 \(rank 1\)"):
        storage.commit(at, lambda: None)
    assert storage.listed() == []
    assert entries(storage, layout.STAGE) == [at.name]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_name_equal_content_is_kept_once(storage: PosixStorage, order: tuple[int, int]) -> None:
    at = storages.stage()
    for rank in order:
        below = storage.open_stage(at, rank)
        (below / "same.bin").write_bytes(b"same")
        (below / f"{rank}.bin").write_bytes(b"own")
        assert storage.own_files(at, below) == [f"{rank}.bin", "same.bin"]
        storage.write_manifest(at, storages.header(rank), storage.own_files(at, below), below)
    done = storage.commit(at, lambda: None)
    lists = [
        [file["path"] for file in json.loads((done_path(done) / name).read_text())["files"]]
        for name in (layout.manifest_name(0), layout.manifest_name(1))
    ]
    assert lists == [["0.bin", "same.bin"], ["1.bin"]]
    assert (done.size, done.document["files"]) == (10, 3)
    storage.verify(done)
    assert not [name for name in os.listdir(done_path(done)) if name.startswith(layout.PRIVATE)]


def done_path(done: object) -> Path:
    """Return the directory of a committed checkpoint."""
    return Path(str(getattr(done, "place")))  # noqa: B009


def test_one_name_different_content(storage: PosixStorage) -> None:
    at = storages.stage()
    for rank in (0, 1, 2):
        below = storage.open_stage(at, rank)
        (below / "x.bin").write_bytes(b"aa" if rank == 1 else b"bb")
        storage.write_manifest(at, storages.header(rank, 3), ["x.bin"], below)
    with pytest.raises(SaveError, match=r"x\.bin: .*\(ranks 0, 2\), .*\(rank 1\)"):
        storage.commit(at, lambda: None)
    assert storage.listed() == []


def test_a_file_where_another_has_a_directory(storage: PosixStorage) -> None:
    at = storages.stage()
    for rank, name in enumerate(["a", "a/b"]):
        below = storage.open_stage(at, rank)
        (below / name).parent.mkdir(exist_ok=True)
        (below / name).write_bytes(b"x")
        storage.write_manifest(at, storages.header(rank), [name], below)
    with pytest.raises(SaveError, match=r"a is a file of rank 0 and a directory of rank 1 \(a/b\)"):
        storage.commit(at, lambda: None)


def test_an_image_where_another_has_a_directory(storage: PosixStorage) -> None:
    at = storages.stage()
    storage.write_shard(at, storages.header(0), [Image("a", [b"x"])])
    with pytest.raises(SaveError, match="rank 1 has a file where another has a directory"):
        storage.write_shard(at, storages.header(1), [Image("a/b", [b"x"])])


def test_moved_from_elsewhere_also_from_another_file_system(
    storage: PosixStorage, tmp_path: Path
) -> None:
    other = Path("/dev/shm", f"elaunch-test-{os.getpid()}-{tmp_path.name}")
    for rank, source in enumerate([tmp_path / "mine", other]):
        (source / "sub").mkdir(parents=True)
        (source / "sub" / f"{rank}.bin").write_bytes(b"data" * 100)
    at = storages.stage()
    storage.open_stage(at)
    try:
        for rank, source in enumerate([tmp_path / "mine", other]):
            storage.write_manifest(at, storages.header(rank), storage.own_files(at, source), source)
        done = storage.commit(at, lambda: None)
    finally:
        shutil.rmtree(other)
    storage.verify(done)
    assert done.size == 800


@pytest.mark.parametrize(
    "name",
    [
        *("COMMIT", "metadata.json", "manifest.rank-00007.json", ".rank-00000", ".tmp-elaunch-1"),
        *("../x", "/x", "a/../b", "a//b", "./a", "", ".", "a\0", "\udcff", "COMMIT/x", "REMOVED"),
    ],
)
def test_names_that_cannot_be(storage: PosixStorage, name: str) -> None:
    for write in (
        lambda at: storage.write_shard(at, storages.header(0, 1), [Image(name, [b"x"])]),
        lambda at: storage.write_manifest(at, storages.header(0, 1), [name]),
    ):
        with pytest.raises(CheckpointError, match="a checkpoint's file cannot be called"):
            write(storages.stage())


def test_hidden_and_nested_names_are_fine(storage: PosixStorage) -> None:
    at = storages.stage()
    names = [".metadata", "sub/COMMIT", "sub/metadata.json", "__0_0.distcp", "été/漢.bin", "a b"]
    images = [Image(name, [name.encode()]) for name in names]
    storage.write_shard(at, storages.header(0, 1), images)
    assert storage.own_files(at) == sorted(names)
    storage.verify(storage.commit(at, lambda: None))


def test_a_name_given_twice(storage: PosixStorage) -> None:
    with pytest.raises(CheckpointError, match="more than one file called 'a'"):
        storage.write_shard(
            storages.stage(), storages.header(0, 1), [Image("a", []), Image("a", [])]
        )


@pytest.mark.parametrize("kind", ["link", "fifo", "COMMIT", "metadata.json", "linked directory"])
def test_own_files_refuses(storage: PosixStorage, tmp_path: Path, kind: str) -> None:
    at = storages.stage()
    path = storage.open_stage(at)
    if kind == "fifo":
        os.mkfifo(path / kind)
    elif "link" in kind:
        (path / kind).symlink_to(tmp_path if "dir" in kind else "/etc/hostname")
    else:
        (path / kind).write_text("")
    with pytest.raises(SaveError, match=kind.split()[0]):
        storage.own_files(at)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({1: 2}, "the key 1 is no string"),
        ({"a": {"b": object()}}, r"\['a'\]\['b'\] is a object"),
        ({"a": [1, {2: 3}]}, "the key 2 is no string"),
        ({"a": b"x"}, "is a bytes"),
    ],
)
def test_metadata_that_json_has_not(storage: PosixStorage, metadata: object, reason: str) -> None:
    bad = ShardHeader(0, 1, "digits", metadata)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=reason):
        storage.write_shard(storages.stage(), bad, [])


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "no 'steps_completed'"),
        ({"steps_completed": 121}, "is 121, the step is 120"),
        ({"steps_completed": "120"}, "is '120', the step is 120"),
    ],
)
def test_steps_completed_is_the_step(
    storage: PosixStorage, metadata: dict[str, object], reason: str
) -> None:
    at = storages.stage()
    storage.write_shard(at, ShardHeader(0, 1, "digits", metadata), [])
    with pytest.raises(SaveError, match=reason):
        storage.commit(at, lambda: None)


def test_parts_that_do_not_belong_together(storage: PosixStorage) -> None:
    at = storages.stage()
    with pytest.raises(SaveError, match="is gone"):
        storage.commit(at, lambda: None)
    storage.open_stage(at)
    with pytest.raises(SaveError, match="no rank has written"):
        storage.commit(at, lambda: None)
    storage.write_shard(at, storages.header(1, 3), [])
    with pytest.raises(SaveError, match=r"of rank 0, 2 \(world size 3\)"):
        storage.commit(at, lambda: None)
    storage.write_shard(at, storages.header(0, 2), [])
    with pytest.raises(SaveError, match="world_size is 2 for rank 0 and 3 for rank 1"):
        storage.commit(at, lambda: None)
    other = ShardHeader(0, 3, "mnist", {})
    storage.write_shard(at, other, [])
    with pytest.raises(SaveError, match="run_id is 'mnist' for rank 0 and 'digits' for rank 1"):
        storage.commit(at, lambda: None)
    stranger = storages.stage()
    storage.write_shard(stranger, storages.header(0, 1), [])
    name = layout.manifest_name(0)
    content = (storage.open_stage(stranger) / name).read_bytes()
    (storage.open_stage(at) / name).write_bytes(content)
    with pytest.raises(SaveError, match="rank 0 has written step-00000120"):
        storage.commit(at, lambda: None)


@pytest.mark.parametrize("change", ["longer", "other", "gone", "link"])
def test_files_changed_after_they_were_sealed(storage: PosixStorage, change: str) -> None:
    at = storages.stage()
    path = storage.open_stage(at)
    (path / "x.bin").write_bytes(b"123")
    os.utime(path / "x.bin", ns=(1, 1))
    storage.write_manifest(at, storages.header(0, 1), ["x.bin"])
    if change in ("gone", "link"):
        (path / "x.bin").unlink()
    if change == "link":
        (path / "x.bin").symlink_to("/etc/hostname")
    elif change != "gone":
        (path / "x.bin").write_bytes(b"1234" if change == "longer" else b"124")
    with pytest.raises(SaveError, match=r"x\.bin"):
        storage.commit(at, lambda: None)
    assert storage.listed() == []


def test_a_stale_round_is_refused_and_its_stage_stays(storage: PosixStorage) -> None:
    at = storages.stage()
    storages.write(storage, at)
    with pytest.raises(SaveError, match="round 3 is over"):
        storage.commit(at, refuse)
    assert storage.listed() == []
    assert entries(storage, layout.STAGE) == [at.name]
    assert storage.own_files(at) == ["rank0.bin", "rank1.bin"]
    storage.discard(at)
    storage.discard(at)
    assert entries(storage, layout.STAGE) == entries(storage, layout.TRASH) == []


def test_a_committed_checkpoint_is_never_replaced(storage: PosixStorage) -> None:
    late = storages.stage()
    storages.write(storage, late)
    done = storages.save(storage)
    with pytest.raises(SaveError, match="is there already, and a committed"):
        storage.commit(late, lambda: None)
    assert storage.listed() == [done]
    storage.verify(done)
    assert entries(storage, layout.STAGE) == [late.name]
    with pytest.raises(SaveError, match=r"elaunch checkpoints rm .* step-00000120\.r3"):
        storage.open_stage(storages.stage())


def test_a_stage_that_vanishes(storage: PosixStorage) -> None:
    at = storages.stage()

    class Vanishing(list[bytes]):
        """Pieces that take the stage away while they are asked for."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            storage.discard(at)
            return super().__iter__()

    with pytest.raises(SaveError, match="was removed while rank 0 wrote into it"):
        storage.write_shard(at, storages.header(0, 1), [Image("a", Vanishing([b"x"]))])
    with pytest.raises(SaveError, match="was removed while rank 0 wrote into it"):
        storage.write_manifest(at, storages.header(0, 1), ["a"])
    assert entries(storage, layout.STAGE) == []


def test_finish_commits_what_is_complete_and_clears_the_rest(storage: PosixStorage) -> None:
    complete, torn, empty, broken, live, foreign = (storages.stage(step) for step in range(6))
    for at in (complete, broken, live):
        storages.write(storage, at)
    (storage.open_stage(broken) / "rank1.bin").write_bytes(b"\x01" * 999 + b"\x02")
    storage.write_shard(torn, storages.header(0, step=1), [Image("a", [b"x"])])
    storage.open_stage(empty)
    storage.write_shard(foreign, ShardHeader(0, 2, "mnist", {}), [])
    (storage.place / layout.STAGE / "notes").mkdir()
    done = storage.finish_stages("digits", keep=[live.name])
    assert [found.uuid for found in done] == [complete.uuid]
    assert storage.listed() == done
    assert entries(storage, layout.STAGE) == sorted(["notes", live.name, foreign.name])
    assert [found.uuid for found in storage.finish_stages(None)] == [live.uuid]
    assert entries(storage, layout.STAGE) == ["notes"]
    for found in storage.listed():
        storage.verify(found, "digits")


def test_finish_in_a_directory_that_is_not_there(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "none")
    assert storage.finish_stages(None) == storage.listed() == storage.quarantined() == []
    storage.clear_trash()


def test_find_by_name_and_uuid(storage: PosixStorage) -> None:
    with pytest.raises(CheckpointError, match="there is none at all"):
        storage.find("step-00000001.r3")
    one, two = storages.save(storage, 1), storages.save(storage, 2)
    assert storage.find(one.name) == one
    assert storage.find(two.uuid) == two
    with pytest.raises(CheckpointError, match="there are 2, the newest: step-00000002"):
        storage.find("step-3")


def test_only_what_is_asked_for_is_read(storage: PosixStorage) -> None:
    """However many there are: one by its name, and the newest one."""
    for step in range(20):
        makers.own(storage.place, step)
    with opened_below(storage.place) as opened:
        assert storage.find("step-00000007.r0").step == 7
    assert opened == ["step-00000007.r0/metadata.json"]
    with opened_below(storage.place) as opened:
        assert next(storage.newest_first()).step == 19
    assert opened == [".", "step-00000019.r0/metadata.json"]
    saved = storages.save(storage, 30)
    with opened_below(storage.place) as opened:
        assert storage.holds(saved.name, saved.uuid)
        assert not storage.holds(saved.name, "another")
        assert not storage.holds("step-00000031.r3", saved.uuid)
    assert opened == [f"{saved.name}/metadata.json"] * 2


def test_listed_is_by_step_and_round_and_leaves_out_the_damaged(storage: PosixStorage) -> None:
    for step, round_ in ((9, 1), (10, 0), (9, 12), (9, 2)):
        storages.save(storage, step, round_)
    (storage.place / "step-00000011.r0").mkdir()
    (storage.place / "step-00000012.r0").write_text("")
    makers.own(storage.place, 13)
    (storage.place / "step-00000013.r0" / layout.METADATA).write_text("{")
    assert [(c.step, c.round) for c in storage.listed()] == [(9, 1), (9, 2), (9, 12), (10, 0)]


def test_remove_is_idempotent(storage: PosixStorage) -> None:
    done = storages.save(storage)
    storage.remove(done)
    storage.remove(done)
    assert storage.listed() == []
    assert entries(storage, layout.TRASH) == []
    storages.save(storage)


def test_what_was_not_deleted_is_deleted_later(storage: PosixStorage) -> None:
    done = storages.save(storage)
    os.rename(done_path(done), storage.place / layout.TRASH / "step-00000120.r3.x")
    storage.clear_trash()
    assert entries(storage, layout.TRASH) == []


def test_quarantine(storage: PosixStorage) -> None:
    for reason in ("a bit is flipped", "again"):
        done = storages.save(storage)
        (done_path(done) / "rank0.bin").write_bytes(b"\0" * 999 + b"\1")
        with pytest.raises(CheckpointError, match=r"bad checksum: rank0\.bin"):
            storage.verify(done)
        storage.quarantine(done, reason)
        storage.quarantine(done.place, reason)
    assert storage.listed() == []
    assert storage.quarantined() == [
        ("step-00000120.r3", "a bit is flipped"),
        ("step-00000120.r3.2", "again"),
    ]
    (storage.place / layout.QUARANTINE / f"step-00000120.r3{layout.REASON}").unlink()
    assert storage.quarantined()[0] == ("step-00000120.r3", "the reason is not known")


def test_verification_tells_damage_from_trouble(storage: PosixStorage) -> None:
    done = storages.save(storage)
    makers.edit_json(done_path(done) / layout.METADATA, metadata={"steps_completed": 121})
    with pytest.raises(CheckpointError, match=r"metadata\.json does not have the checksum"):
        storage.verify(done)
    with pytest.raises(CheckpointError, match="belongs to run digits"):
        storage.verify(done, "mnist")
    done = storages.save(storage, 130)
    (done_path(done) / "rank0.bin").unlink()
    with pytest.raises(CheckpointError, match=r"missing: rank0\.bin"):
        storage.verify(done)
    storage.remove(done)
    with pytest.raises(CheckpointError, match="it vanished"):
        storage.verify(done)
    with (
        pytest.raises(CheckpointError, match="another process has removed it"),
        storage.fetch(done),
    ):
        raise AssertionError("what is gone was given out")


def test_run_json(storage: PosixStorage) -> None:
    document = json.loads((storage.place / layout.RUN).read_text())
    assert (document["run_id"], document["given"]) == ("digits", True)
    storage.prepare("digits", given=True)
    storage.prepare("made-up", given=False)
    assert json.loads((storage.place / layout.RUN).read_text()) == document
    with pytest.raises(
        SaveError, match=r"belongs to run 'digits', this is run 'mnist': .*--run-id"
    ):
        storage.prepare("mnist", given=True)
    (storage.place / layout.RUN).write_text("{")
    with pytest.raises(SaveError, match="remove that file"):
        storage.prepare("digits", given=True)


def test_a_made_up_run_id_gives_way(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "a" / "b")
    for run_id, given in (("x1", False), ("x2", False), ("x2", True)):
        storage.prepare(run_id, given)
        document = json.loads((tmp_path / "a" / "b" / layout.RUN).read_text())
        assert (document["run_id"], document["given"]) == (run_id, given)


def test_the_lock(storage: PosixStorage) -> None:
    lock = storage.lock()
    with pytest.raises(SaveError, match=rf"in use by another job \(process {os.getpid()} on "):
        storage.lock()
    lock.close()
    lock.close()
    storage.lock().close()


def test_the_lock_of_a_killed_process_is_free(storage: PosixStorage) -> None:
    code = (
        "import os, sys; from elaunch.checkpoint.storage.storage import open_storage\n"
        "lock = open_storage(sys.argv[1]).lock(); print(os.getpid(), flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(storage.place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        pid = other.stdout.readline().strip()
        with pytest.raises(SaveError, match=f"process {pid} on"):
            storage.lock()
        other.kill()
    storage.lock().close()


def test_nodes_with_directories_of_their_own(tmp_path: Path) -> None:
    nodes = [open_storage(tmp_path / str(node), local=True) for node in range(2)]
    at, extra = storages.stage(), {"committed": 5.0, "started": 4.0}
    for rank, node in enumerate(nodes):
        node.prepare("digits", given=True)
        images = [Image(f"{rank}.bin", [b"x" * 10]), Image("both.bin", [b"y"])]
        node.write_shard(at, storages.header(rank), images)
    every = {rank: node.manifests(at)[rank] for rank, node in enumerate(nodes)}
    for node in nodes:
        node.adopt(at, every)
        node.commit(at, lambda: None, extra)
    places = [tmp_path / str(node) / at.final for node in range(2)]
    for name in (layout.COMMIT, layout.METADATA, layout.manifest_name(1)):
        assert (places[0] / name).read_bytes() == (places[1] / name).read_bytes()
    files = [own.read_documents(place, "digits")[rank] for rank, place in enumerate(places)]
    for rank, place in enumerate(places):
        own.check_files(place, files[rank])
        with pytest.raises(FileNotFoundError):
            own.verify(place, "digits")
    (places[0] / "1.bin").write_bytes(b"x" * 10)
    own.verify(places[0], "digits")


def test_a_stage_has_a_name_that_comes_back() -> None:
    with pytest.raises(CheckpointError, match="letters, digits"):
        Stage(1, 2, "../x")
    with pytest.raises(CheckpointError, match="whole numbers"):
        Stage(-1, 2, "x")


def test_finish_leaves_what_agents_have_in_memory(storage: PosixStorage) -> None:
    storages.finish_what_is_held(storage)
