"""stage_path and commit: what somebody else's code has written."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elaunch.checkpoint.storage.storage import open_storage
from tests import programs
from tests.training.checkpoint.rig import Job, checkpoints, committed, stages, user_files

Start = Callable[..., Job]

WRITE = """
def write(path, **files):
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(content)
"""


@pytest.mark.slow
def test_a_directory_that_all_ranks_wrote_to(start: Start, tmp_path: Path) -> None:
    """Its files are moved, not copied; each is listed once; then it is not where it was."""
    script = (
        WRITE
        + """
write("out/sub", **{f"part_{rank}": str(rank)})
ctx.distributed.barrier()
number = os.stat("out/sub/part_1").st_ino
found = ck.commit("out", 120, {"who": "dcp"})
say(json.dumps([found.name, found.metadata, Path("out").exists(), ck.latest().uuid == found.uuid,
    number == os.stat(found.place / "sub/part_1").st_ino]))
"""
    )
    one, other = start(script, 2).said()
    assert one == other
    metadata = {"steps_completed": 120, "who": "dcp"}
    assert one == ["step-00000120.r0", metadata, False, True, True]
    place = checkpoints(tmp_path) / "step-00000120.r0"
    assert user_files(place) == {"sub/part_0": "0", "sub/part_1": "1"}
    storage = open_storage(checkpoints(tmp_path))
    storage.verify(storage.find("step-00000120.r0"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """Give a directory on another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        if os.stat(path).st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is only one file system")
        yield Path(path)


@pytest.mark.slow
def test_from_another_file_system(start: Start, tmp_path: Path, elsewhere: Path) -> None:
    """Copied; a directory of each rank; a single file."""
    script = (
        WRITE
        + f"""
write(f"{elsewhere}/{{rank}}", **{{f"part_{{rank}}": str(rank)}})
ck.commit(f"{elsewhere}/{{rank}}", 1)
write("{elsewhere}", model="weights") if rank == 0 else None
ctx.distributed.barrier()
ck.commit("{elsewhere}/model", 2)
say(json.dumps(os.listdir("{elsewhere}")))
"""
    )
    assert start(script, 2).said()[0] == []
    place = checkpoints(tmp_path)
    assert user_files(place / "step-00000001.r0") == {"part_0": "0", "part_1": "1"}
    assert user_files(place / "step-00000002.r0") == {"model": "weights"}


@pytest.mark.slow
def test_what_cannot_be_committed_stays_where_it_is(start: Start, tmp_path: Path) -> None:
    """Whatever is wrong: all ranks are told the same, and the files are still there."""
    script = (
        WRITE
        + """
said = []
write(f"apart_{rank}", model=str(rank))
said.append(tried(lambda: ck.commit(f"apart_{rank}", 1)))
said.append(tried(lambda: ck.commit("nowhere", 1)))
said.append(tried(lambda: ck.commit(ck.directory, 1)))
write("linked")
if rank == 0:
    os.symlink("/etc/passwd", "linked/passwd")
ctx.distributed.barrier()
said.append(tried(lambda: ck.commit("linked", 1)))
write("good", model="m")
said.append(tried(lambda: ck.commit("good", rank)))
said.append(tried(lambda: ck.commit("good", -1)))
said.append(tried(lambda: ck.commit("good", 1, {"steps_completed": 2})))
ctx.distributed.barrier()
say(json.dumps(said, default=str))
"""
    )
    one, other = start(script, 2).said()
    assert one == other
    assert all(text.startswith("SaveError: ") for text in one), one
    for text, part in zip(
        one,
        [
            "model: different content: 1 bytes (rank 0), 1 bytes (rank 1)",
            "nothing is at ",
            "holds the directory in which checkpoints are kept",
            "passwd is a symbolic link",
            "steps_completed differs: 0 on rank 0, 1 on rank 1",
            "steps_completed is -1",
            "steps_completed is 2, but the step is 1",
        ],
        strict=True,
    ):
        assert part in text
    for name in ("apart_0", "apart_1", "good"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["model"]
    place = checkpoints(tmp_path)
    assert (committed(place), stages(place)) == ([], [])


def test_a_link_is_not_what_it_leads_to(start: Start, tmp_path: Path) -> None:
    """What is behind it stays, and who writes there again does not change the checkpoint."""
    script = (
        WRITE
        + """
write("real", model="old")
os.symlink("real", "last")
os.symlink("real/model", "model")
found = [ck.commit("last", 1), ck.commit("model", 2)]
write("real", model="new")
say(json.dumps([[(each.place / "model").read_text() for each in found], sorted(os.listdir("."))]))
"""
    )
    contents, left = start(script, 1).said()[0]
    assert contents == ["old", "old"]
    assert "real" in left and not {"last", "model"} & set(left)


@pytest.mark.slow
def test_the_path_that_ranks_are_given(start: Start, tmp_path: Path) -> None:
    """One directory for all, for code that needs one; a second save needs a second."""
    script = (
        WRITE
        + """
paths = []
for step in (10, 20):
    path = ck.stage_path(step)
    if rank == 0:
        (path / "sub").mkdir()
    ctx.distributed.barrier()
    (path / "sub" / f"part_{rank}").write_text("x" * step)
    ck.commit(path, step)
    paths.append(str(path))
late = tried(lambda: ck.commit(paths[0], 30))
path = ck.stage_path(40)
wrong = tried(lambda: ck.commit(path, 50))
say(json.dumps([ctx.distributed.allgather(paths), late, wrong]))
"""
    )
    (paths, late, wrong), _ = start(script, 2).said()
    assert paths[0] == paths[1]
    assert "nothing is at" in late
    assert "was opened for step 40, not for 50" in wrong
    place = checkpoints(tmp_path)
    assert committed(place) == ["step-00000010.r0", "step-00000020.r0"]
    files = user_files(place / "step-00000020.r0")
    assert files == {"sub/part_0": "x" * 20, "sub/part_1": "x" * 20}
    manifest = json.loads((place / "step-00000020.r0" / "manifest.rank-00001.json").read_text())
    assert manifest["files"] == []


@pytest.mark.slow
def test_a_dcp_checkpoint(start: Start, tmp_path: Path) -> None:
    """As dcp.save writes it, by all ranks: into a directory of theirs, and in a block."""
    script = """
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
dist.init_process_group("gloo")
state = {"a": torch.arange(8.0), "b": torch.full((3,), 2.0)}
dcp.save(state, checkpoint_id="dcp_out")
first = ck.commit("dcp_out", 1)
with ck.store_path({"steps_completed": 2}, shard=True) as (path, _):
    dcp.save(state, checkpoint_id=path)
read = []
for uuid in (first.uuid, None):
    fresh = {"a": torch.zeros(8), "b": torch.zeros(3)}
    with ck.restore_path(uuid) as path:
        dcp.load(fresh, checkpoint_id=path)
    read.append(all(torch.equal(fresh[key], state[key]) for key in state))
dist.destroy_process_group()
say(json.dumps(read))
"""
    assert start(script, 2).said() == [[True, True]] * 2


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with a file, that nobody can write to any more."""
    path = tmp_path / "readonly"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(path)], capture_output=True)
    programs.allowed("no right to mount" if mounted.returncode != 0 else None)
    (path / "weights").write_text("w")
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_from_a_directory_that_cannot_be_written_to(start: Start, read_only: Path) -> None:
    """What is there is copied, once for all ranks of a node, and stays."""
    script = f"""
found = ck.commit({str(read_only)!r}, 10)
say(json.dumps(sorted(path.name for path in found.place.iterdir())))
"""
    said = start(script, 2).said()
    manifests = [f"manifest.rank-{rank:05d}.json" for rank in range(2)]
    assert said == [["COMMIT", *manifests, "metadata.json", "weights"]] * 2
    assert (read_only / "weights").read_text() == "w"
