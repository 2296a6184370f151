"""stage_path and commit: what somebody else's code has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.checkpoint.rig import Job, checkpoints, committed, user_files

Start = Callable[..., Job]


@pytest.mark.slow
def test_what_cannot_be_committed(start: Start, tmp_path: Path) -> None:
    """Whatever is wrong: all ranks are told the same."""
    script = """
said = []
Path("other").mkdir(exist_ok=True)
def staged(act, *how):
    path = ck.stage_path(1)
    if rank == 0:
        act(path)
    ctx.distributed.barrier()
    said.append(tried(lambda: ck.commit(path, *how)))
said.append(tried(lambda: ck.commit("other", 1)))
staged(lambda path: os.symlink("/etc/passwd", path / "passwd"), 1)
staged(lambda path: None, rank)
staged(lambda path: None, -1)
staged(lambda path: None, 1, {"steps_completed": 2})
say(json.dumps(said, default=str))
"""
    one, other = start(script, 2).said()
    assert one == other
    for text, part in zip(
        one,
        [
            "ContextError: commit: ranks 0, 1 on host",
            "passwd is a symbolic link",
            "steps_completed differs: 0 on rank 0, 1 on rank 1",
            "steps_completed is -1",
            "steps_completed is 2, but the step is 1",
        ],
        strict=True,
    ):
        assert part in text
    assert "is no path of stage_path() that waits for its commit" in one[0]
    assert committed(checkpoints(tmp_path)) == []


@pytest.mark.slow
def test_the_path_that_ranks_are_given(start: Start, tmp_path: Path) -> None:
    """One directory for all, for code that needs one; a second save needs a second."""
    script = """
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
    (paths, late, wrong), _ = start(script, 2).said()
    assert paths[0] == paths[1]
    assert "waits for its commit" in late
    assert "was opened for step 40, not for 50" in wrong
    place = checkpoints(tmp_path)
    assert committed(place) == ["step-00000010.r0", "step-00000020.r0"]
    files = user_files(place / "step-00000020.r0")
    assert files == {"sub/part_0": "x" * 20, "sub/part_1": "x" * 20}
    manifest = json.loads((place / "step-00000020.r0" / "manifest.rank-00001.json").read_text())
    assert manifest["files"] == []


@pytest.mark.slow
def test_a_dcp_checkpoint(start: Start, tmp_path: Path) -> None:
    """As dcp.save writes it, by all ranks: into the path that they get, and in a block."""
    script = """
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
dist.init_process_group("gloo")
state = {"a": torch.arange(8.0), "b": torch.full((3,), 2.0)}
path = ck.stage_path(1)
dcp.save(state, checkpoint_id=path)
first = ck.commit(path, 1)
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
