"""The depot in a directory: what is committed, what is refused, what is left."""

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
from elaunch.checkpoint.storage.posix import PosixDepot
from elaunch.checkpoint.storage.storage import Image, Part, Stage, open_depot
from elaunch.errors import CheckpointError, SaveError
from tests.checkpoint import depots, makers


@pytest.fixture
def depot(tmp_path: Path) -> PosixDepot:
    """An empty depot of run "digits"."""
    made = open_depot(tmp_path / "ck")
    assert isinstance(made, PosixDepot)
    made.prepare("digits", given=True)
    return made


def entries(depot: PosixDepot, below: str = ".") -> list[str]:
    """Return the names in a directory of the depot."""
    return sorted(os.listdir(depot.place / below))


def refuse() -> None:
    """Be the fence of a round that is over."""
    raise SaveError("round 3 is over")


def test_a_checkpoint_of_two_ranks(depot: PosixDepot) -> None:
    at = depots.stage()
    depots.write(depot, at, {0: {"model.pt": b"w" * 5000, "e": b""}, 1: {"d/ü/x.bin": b"\x01"}})
    assert depot.listed() == []
    assert sorted(depot.manifests(at)) == [0, 1]
    extra = {"metrics": {"loss": 0.5}, "versions": {"torch": "2.13"}, "durations": {"write": 1.0}}
    done = depot.commit(at, lambda: None, extra)
    assert done.name == "step-00000120.r3" == at.final
    assert done.place == depot.place / at.final
    assert (done.step, done.round, done.uuid, done.run_id) == (120, 3, at.uuid, "digits")
    assert (done.size, done.world_size, done.metrics) == (5001, 2, {"loss": 0.5})
    assert done.document["versions"].keys() == {"elaunch", "python", "torch"}
    assert done.document["files"] == 3
    assert depot.listed() == [done]
    own.verify(depot.place / at.final, "digits")
    depot.verify(done, "digits")
    with depot.fetch(done) as path:
        assert (path / "d" / "ü" / "x.bin").read_bytes() == b"\x01"
        assert (path / "e").read_bytes() == b""
    assert find_latest(depot.place, run_id="digits").checkpoint is not None
    assert entries(depot, layout.STAGE) == []


def test_pieces_are_joined(depot: PosixDepot) -> None:
    import array

    at = depots.stage()
    numbers = array.array("d", range(1000))
    pieces = [b"head", memoryview(numbers), b"", memoryview(b"tail")]
    many = [bytes([i % 256]) for i in range(3000)]
    images = [Image("a", pieces), Image("b", many)]
    assert images[0].size == 8008
    depot.write_part(at, depots.part(0, 1), images)
    done = depot.commit(at, lambda: None)
    with depot.fetch(done) as path:
        assert (path / "a").read_bytes() == b"head" + numbers.tobytes() + b"tail"
        assert (path / "b").read_bytes() == b"".join(many)
    depot.verify(done)


def test_merged_metadata(depot: PosixDepot) -> None:
    at = depots.stage()
    depot.write_part(at, depots.part(0, rank_0="ok", lr={"a": 1}), [])
    depot.write_part(at, depots.part(1, rank_1="ok", lr={"b": [2]}), [])
    done = depot.commit(at, lambda: None)
    wanted = {"steps_completed": 120, "rank_0": "ok", "rank_1": "ok", "lr": {"a": 1, "b": [2]}}
    assert done.metadata == wanted == depot.listed()[0].metadata


def test_contradicting_metadata(depot: PosixDepot) -> None:
    at = depots.stage()
    depot.write_part(at, depots.part(0, loss=0.5), [])
    depot.write_part(at, depots.part(1, loss=0.7), [])
    with pytest.raises(SaveError, match=r"loss is 0\.5 \(rank 0\), 0\.7 \(rank 1\)"):
        depot.commit(at, lambda: None)
    assert depot.listed() == []
    assert entries(depot, layout.STAGE) == [at.name]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_name_equal_content_is_kept_once(depot: PosixDepot, order: tuple[int, int]) -> None:
    at = depots.stage()
    for rank in order:
        below = depot.open_stage(at, rank)
        (below / "same.bin").write_bytes(b"same")
        (below / f"{rank}.bin").write_bytes(b"own")
        assert depot.own_files(at, below) == [f"{rank}.bin", "same.bin"]
        depot.seal(at, depots.part(rank), depot.own_files(at, below), below)
    done = depot.commit(at, lambda: None)
    lists = [
        [file["path"] for file in json.loads((done_path(done) / name).read_text())["files"]]
        for name in (layout.manifest_name(0), layout.manifest_name(1))
    ]
    assert lists == [["0.bin", "same.bin"], ["1.bin"]]
    assert (done.size, done.document["files"]) == (10, 3)
    depot.verify(done)
    assert not [name for name in os.listdir(done_path(done)) if name.startswith(layout.PRIVATE)]


def done_path(done: object) -> Path:
    """Return the directory of a committed checkpoint."""
    return Path(str(getattr(done, "place")))  # noqa: B009


def test_one_name_different_content(depot: PosixDepot) -> None:
    at = depots.stage()
    for rank in (0, 1, 2):
        below = depot.open_stage(at, rank)
        (below / "x.bin").write_bytes(b"aa" if rank == 1 else b"bb")
        depot.seal(at, depots.part(rank, 3), ["x.bin"], below)
    with pytest.raises(SaveError, match=r"x\.bin: .*\(ranks 0, 2\), .*\(rank 1\)"):
        depot.commit(at, lambda: None)
    assert depot.listed() == []


def test_a_file_where_another_has_a_directory(depot: PosixDepot) -> None:
    at = depots.stage()
    for rank, name in enumerate(["a", "a/b"]):
        below = depot.open_stage(at, rank)
        (below / name).parent.mkdir(exist_ok=True)
        (below / name).write_bytes(b"x")
        depot.seal(at, depots.part(rank), [name], below)
    with pytest.raises(SaveError, match=r"a is a file of rank 0 and a directory of rank 1 \(a/b\)"):
        depot.commit(at, lambda: None)


def test_an_image_where_another_has_a_directory(depot: PosixDepot) -> None:
    at = depots.stage()
    depot.write_part(at, depots.part(0), [Image("a", [b"x"])])
    with pytest.raises(SaveError, match="rank 1 has a file where another has a directory"):
        depot.write_part(at, depots.part(1), [Image("a/b", [b"x"])])


def test_moved_from_elsewhere_also_from_another_file_system(
    depot: PosixDepot, tmp_path: Path
) -> None:
    other = Path("/dev/shm", f"elaunch-test-{os.getpid()}-{tmp_path.name}")
    for rank, source in enumerate([tmp_path / "mine", other]):
        (source / "sub").mkdir(parents=True)
        (source / "sub" / f"{rank}.bin").write_bytes(b"data" * 100)
    at = depots.stage()
    depot.open_stage(at)
    try:
        for rank, source in enumerate([tmp_path / "mine", other]):
            depot.seal(at, depots.part(rank), depot.own_files(at, source), source)
        done = depot.commit(at, lambda: None)
    finally:
        shutil.rmtree(other)
    depot.verify(done)
    assert done.size == 800


@pytest.mark.parametrize(
    "name",
    [
        *("COMMIT", "metadata.json", "manifest.rank-00007.json", ".rank-00000", ".tmp-elaunch-1"),
        *("../x", "/x", "a/../b", "a//b", "./a", "", ".", "a\0", "\udcff", "COMMIT/x", "REMOVED"),
    ],
)
def test_names_that_cannot_be(depot: PosixDepot, name: str) -> None:
    for write in (
        lambda at: depot.write_part(at, depots.part(0, 1), [Image(name, [b"x"])]),
        lambda at: depot.seal(at, depots.part(0, 1), [name]),
    ):
        with pytest.raises(CheckpointError, match="a checkpoint's file cannot be called"):
            write(depots.stage())


def test_hidden_and_nested_names_are_fine(depot: PosixDepot) -> None:
    at = depots.stage()
    names = [".metadata", "sub/COMMIT", "sub/metadata.json", "__0_0.distcp", "été/漢.bin", "a b"]
    images = [Image(name, [name.encode()]) for name in names]
    depot.write_part(at, depots.part(0, 1), images)
    assert depot.own_files(at) == sorted(names)
    depot.verify(depot.commit(at, lambda: None))


def test_a_name_given_twice(depot: PosixDepot) -> None:
    with pytest.raises(CheckpointError, match="more than one file called 'a'"):
        depot.write_part(depots.stage(), depots.part(0, 1), [Image("a", []), Image("a", [])])


@pytest.mark.parametrize("kind", ["link", "fifo", "COMMIT", "metadata.json", "linked directory"])
def test_own_files_refuses(depot: PosixDepot, tmp_path: Path, kind: str) -> None:
    at = depots.stage()
    path = depot.open_stage(at)
    if kind == "fifo":
        os.mkfifo(path / kind)
    elif "link" in kind:
        (path / kind).symlink_to(tmp_path if "dir" in kind else "/etc/hostname")
    else:
        (path / kind).write_text("")
    with pytest.raises(SaveError, match=kind.split()[0]):
        depot.own_files(at)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({1: 2}, "the key 1 is no string"),
        ({"a": {"b": object()}}, r"\['a'\]\['b'\] is a object"),
        ({"a": [1, {2: 3}]}, "the key 2 is no string"),
        ({"a": b"x"}, "is a bytes"),
    ],
)
def test_metadata_that_json_has_not(depot: PosixDepot, metadata: object, reason: str) -> None:
    bad = Part(0, 1, "digits", metadata)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=reason):
        depot.write_part(depots.stage(), bad, [])


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "no 'steps_completed'"),
        ({"steps_completed": 121}, "is 121, the step is 120"),
        ({"steps_completed": "120"}, "is '120', the step is 120"),
    ],
)
def test_steps_completed_is_the_step(
    depot: PosixDepot, metadata: dict[str, object], reason: str
) -> None:
    at = depots.stage()
    depot.write_part(at, Part(0, 1, "digits", metadata), [])
    with pytest.raises(SaveError, match=reason):
        depot.commit(at, lambda: None)


def test_parts_that_do_not_belong_together(depot: PosixDepot) -> None:
    at = depots.stage()
    with pytest.raises(SaveError, match="is gone"):
        depot.commit(at, lambda: None)
    depot.open_stage(at)
    with pytest.raises(SaveError, match="no rank has sealed"):
        depot.commit(at, lambda: None)
    depot.write_part(at, depots.part(1, 3), [])
    with pytest.raises(SaveError, match=r"of rank 0, 2 \(world size 3\)"):
        depot.commit(at, lambda: None)
    depot.write_part(at, depots.part(0, 2), [])
    with pytest.raises(SaveError, match="world_size is 2 for rank 0 and 3 for rank 1"):
        depot.commit(at, lambda: None)
    other = Part(0, 3, "mnist", {})
    depot.write_part(at, other, [])
    with pytest.raises(SaveError, match="run_id is 'mnist' for rank 0 and 'digits' for rank 1"):
        depot.commit(at, lambda: None)
    stranger = depots.stage()
    depot.write_part(stranger, depots.part(0, 1), [])
    name = layout.manifest_name(0)
    content = (depot.open_stage(stranger) / name).read_bytes()
    (depot.open_stage(at) / name).write_bytes(content)
    with pytest.raises(SaveError, match="rank 0 has sealed step-00000120"):
        depot.commit(at, lambda: None)


@pytest.mark.parametrize("change", ["longer", "other", "gone", "link"])
def test_files_changed_after_they_were_sealed(depot: PosixDepot, change: str) -> None:
    at = depots.stage()
    path = depot.open_stage(at)
    (path / "x.bin").write_bytes(b"123")
    os.utime(path / "x.bin", ns=(1, 1))
    depot.seal(at, depots.part(0, 1), ["x.bin"])
    if change in ("gone", "link"):
        (path / "x.bin").unlink()
    if change == "link":
        (path / "x.bin").symlink_to("/etc/hostname")
    elif change != "gone":
        (path / "x.bin").write_bytes(b"1234" if change == "longer" else b"124")
    with pytest.raises(SaveError, match=r"x\.bin"):
        depot.commit(at, lambda: None)
    assert depot.listed() == []


def test_a_stale_round_is_refused_and_its_stage_stays(depot: PosixDepot) -> None:
    at = depots.stage()
    depots.write(depot, at)
    with pytest.raises(SaveError, match="round 3 is over"):
        depot.commit(at, refuse)
    assert depot.listed() == []
    assert entries(depot, layout.STAGE) == [at.name]
    assert depot.own_files(at) == ["rank0.bin", "rank1.bin"]
    depot.discard(at)
    depot.discard(at)
    assert entries(depot, layout.STAGE) == entries(depot, layout.TRASH) == []


def test_a_committed_checkpoint_is_never_replaced(depot: PosixDepot) -> None:
    late = depots.stage()
    depots.write(depot, late)
    done = depots.save(depot)
    with pytest.raises(SaveError, match="is there already, and a committed"):
        depot.commit(late, lambda: None)
    assert depot.listed() == [done]
    depot.verify(done)
    assert entries(depot, layout.STAGE) == [late.name]
    with pytest.raises(SaveError, match=r"elaunch checkpoints rm .* step-00000120\.r3"):
        depot.open_stage(depots.stage())


def test_a_stage_that_vanishes(depot: PosixDepot) -> None:
    at = depots.stage()

    class Vanishing(list[bytes]):
        """Pieces that take the stage away while they are asked for."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            depot.discard(at)
            return super().__iter__()

    with pytest.raises(SaveError, match="was removed while rank 0 wrote into it"):
        depot.write_part(at, depots.part(0, 1), [Image("a", Vanishing([b"x"]))])
    with pytest.raises(SaveError, match="was removed while rank 0 wrote into it"):
        depot.seal(at, depots.part(0, 1), ["a"])
    assert entries(depot, layout.STAGE) == []


def test_finish_commits_what_is_complete_and_clears_the_rest(depot: PosixDepot) -> None:
    complete, torn, empty, broken, live, foreign = (depots.stage(step) for step in range(6))
    for at in (complete, broken, live):
        depots.write(depot, at)
    (depot.open_stage(broken) / "rank1.bin").write_bytes(b"\x01" * 999 + b"\x02")
    depot.write_part(torn, depots.part(0, step=1), [Image("a", [b"x"])])
    depot.open_stage(empty)
    depot.write_part(foreign, Part(0, 2, "mnist", {}), [])
    (depot.place / layout.STAGE / "notes").mkdir()
    done = depot.finish_stages("digits", keep=[live.name])
    assert [found.uuid for found in done] == [complete.uuid]
    assert depot.listed() == done
    assert entries(depot, layout.STAGE) == sorted(["notes", live.name, foreign.name])
    assert [found.uuid for found in depot.finish_stages(None)] == [live.uuid]
    assert entries(depot, layout.STAGE) == ["notes"]
    for found in depot.listed():
        depot.verify(found, "digits")


def test_finish_in_a_directory_that_is_not_there(tmp_path: Path) -> None:
    depot = open_depot(tmp_path / "none")
    assert depot.finish_stages(None) == depot.listed() == depot.quarantined() == []
    depot.clear_trash()


def test_find_by_name_and_uuid(depot: PosixDepot) -> None:
    with pytest.raises(CheckpointError, match="there is none at all"):
        depot.find("step-00000001.r3")
    one, two = depots.save(depot, 1), depots.save(depot, 2)
    assert depot.find(one.name) == one
    assert depot.find(two.uuid) == two
    with pytest.raises(CheckpointError, match="there are 2, the newest: step-00000002"):
        depot.find("step-3")


def test_listed_is_by_step_and_round_and_leaves_out_the_damaged(depot: PosixDepot) -> None:
    for step, round_ in ((9, 1), (10, 0), (9, 12), (9, 2)):
        depots.save(depot, step, round_)
    (depot.place / "step-00000011.r0").mkdir()
    (depot.place / "step-00000012.r0").write_text("")
    makers.own(depot.place, 13)
    (depot.place / "step-00000013.r0" / layout.METADATA).write_text("{")
    assert [(c.step, c.round) for c in depot.listed()] == [(9, 1), (9, 2), (9, 12), (10, 0)]


def test_remove_is_idempotent(depot: PosixDepot) -> None:
    done = depots.save(depot)
    depot.remove(done)
    depot.remove(done)
    assert depot.listed() == []
    assert entries(depot, layout.TRASH) == []
    depots.save(depot)


def test_what_was_not_deleted_is_deleted_later(depot: PosixDepot) -> None:
    done = depots.save(depot)
    os.rename(done_path(done), depot.place / layout.TRASH / "step-00000120.r3.x")
    depot.clear_trash()
    assert entries(depot, layout.TRASH) == []


def test_quarantine(depot: PosixDepot) -> None:
    for reason in ("a bit is flipped", "again"):
        done = depots.save(depot)
        (done_path(done) / "rank0.bin").write_bytes(b"\0" * 999 + b"\1")
        with pytest.raises(CheckpointError, match=r"bad checksum: rank0\.bin"):
            depot.verify(done)
        depot.quarantine(done, reason)
        depot.quarantine(done.place, reason)
    assert depot.listed() == []
    assert depot.quarantined() == [
        ("step-00000120.r3", "a bit is flipped"),
        ("step-00000120.r3.2", "again"),
    ]
    (depot.place / layout.QUARANTINE / f"step-00000120.r3{layout.REASON}").unlink()
    assert depot.quarantined()[0] == ("step-00000120.r3", "the reason is not known")


def test_verification_tells_damage_from_trouble(depot: PosixDepot) -> None:
    done = depots.save(depot)
    makers.edit_json(done_path(done) / layout.METADATA, metadata={"steps_completed": 121})
    with pytest.raises(CheckpointError, match=r"metadata\.json does not have the checksum"):
        depot.verify(done)
    with pytest.raises(CheckpointError, match="belongs to run digits"):
        depot.verify(done, "mnist")
    done = depots.save(depot, 130)
    (done_path(done) / "rank0.bin").unlink()
    with pytest.raises(CheckpointError, match=r"missing: rank0\.bin"):
        depot.verify(done)
    depot.remove(done)
    with pytest.raises(CheckpointError, match="it vanished"):
        depot.verify(done)
    with pytest.raises(CheckpointError, match="another process has removed it"), depot.fetch(done):
        raise AssertionError("what is gone was given out")


def test_run_json(depot: PosixDepot) -> None:
    document = json.loads((depot.place / layout.RUN).read_text())
    assert (document["run_id"], document["given"]) == ("digits", True)
    depot.prepare("digits", given=True)
    depot.prepare("made-up", given=False)
    assert json.loads((depot.place / layout.RUN).read_text()) == document
    with pytest.raises(
        SaveError, match=r"belongs to run 'digits', this is run 'mnist': .*--run-id"
    ):
        depot.prepare("mnist", given=True)
    (depot.place / layout.RUN).write_text("{")
    with pytest.raises(SaveError, match="remove that file"):
        depot.prepare("digits", given=True)


def test_a_made_up_run_id_gives_way(tmp_path: Path) -> None:
    depot = open_depot(tmp_path / "a" / "b")
    for run_id, given in (("x1", False), ("x2", False), ("x2", True)):
        depot.prepare(run_id, given)
        document = json.loads((tmp_path / "a" / "b" / layout.RUN).read_text())
        assert (document["run_id"], document["given"]) == (run_id, given)


def test_the_lock(depot: PosixDepot) -> None:
    lock = depot.lock()
    with pytest.raises(SaveError, match=rf"in use by another job \(process {os.getpid()} on "):
        depot.lock()
    lock.close()
    lock.close()
    depot.lock().close()


def test_the_lock_of_a_killed_process_is_free(depot: PosixDepot) -> None:
    code = (
        "import os, sys; from elaunch.checkpoint.storage.storage import open_depot\n"
        "lock = open_depot(sys.argv[1]).lock(); print(os.getpid(), flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(depot.place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        pid = other.stdout.readline().strip()
        with pytest.raises(SaveError, match=f"process {pid} on"):
            depot.lock()
        other.kill()
    depot.lock().close()


def test_nodes_with_directories_of_their_own(tmp_path: Path) -> None:
    nodes = [open_depot(tmp_path / str(node), local=True) for node in range(2)]
    at, extra = depots.stage(), {"committed": 5.0, "started": 4.0}
    for rank, node in enumerate(nodes):
        node.prepare("digits", given=True)
        images = [Image(f"{rank}.bin", [b"x" * 10]), Image("both.bin", [b"y"])]
        node.write_part(at, depots.part(rank), images)
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
