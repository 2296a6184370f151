"""A load from a checkpoint at a URL: which bytes the ranks read, and what is damaged there."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint import where
from tests.training.checkpoint.groups import Raised, in_group

MIB = 1 << 20
ROWS = 32
"""Of a MiB each."""


def at_url(directory: Path) -> dict[str, str]:
    """Return the variable with a URL of files, which the ranks take for no directory."""
    return {"ELAUNCH_CHECKPOINT_DIR": f"file://{directory / 'objects'}"}


def read_by_this_process() -> int:
    """Return the bytes that all calls of read() have returned."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def sharded(rank_values: bool) -> dict[str, Any]:
    """Return a matrix of which each rank has half of the rows, and what all ranks have."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if not rank_values:
        return {"w": zeros((ROWS, MIB // 4), device_mesh=mesh, placements=[Shard(0)]), "n": 0}
    whole = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, MIB // 4).contiguous()
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": 7}


def saved_and_read(ctx: Any) -> Any:
    """Save a sharded state; return what one load of it reads, and whether it is right."""
    where.parse_location = lambda text: text  # a URL stays one
    saved = sharded(True)
    ctx.checkpoint.save(saved, 1)
    state = sharded(False)
    before = read_by_this_process()
    found = ctx.checkpoint.load(state)
    count = read_by_this_process() - before
    same = torch.equal(state["w"].to_local(), saved["w"].to_local())
    return found.step, count, same, state["n"]


@pytest.mark.ranks
def test_each_rank_reads_what_its_tensors_need(tmp_path: Path) -> None:
    """All ranks together read the checkpoint once, and no rank copies it."""
    said = in_group(saved_and_read, 2, tmp_path, env=at_url(tmp_path))
    assert not any(isinstance(one, Raised) for one in said), said
    assert [(step, same, n) for step, _, same, n in said] == [(1, True, 7)] * 2
    counts = [count for _, count, _, _ in said]
    assert max(counts) < (ROWS // 2 + 8) * MIB, counts
    assert ROWS * MIB <= sum(counts) < (ROWS + 8) * MIB, counts


def damaged(ctx: Any, directory: Path) -> Any:
    """Save twice, flip a bit of what rank 1 reads, and load, also by name."""
    where.parse_location = lambda text: text
    rank, ck = ctx.distributed.rank, ctx.checkpoint
    for step in (1, 2):
        ck.save(sharded(True), step)
    if rank == 1:
        (file,) = (directory / "objects").glob("step-00000002.*/__1_0.distcp")
        with file.open("r+b") as opened:
            opened.seek(10 * MIB)
            byte = opened.read(1)[0]
            opened.seek(10 * MIB)
            opened.write(bytes([byte ^ 1]))
    ctx.distributed.barrier()
    said = ""
    try:
        ck.load(sharded(False), which="step-00000002.r0")
    except CheckpointError as error:
        said = str(error)
    state = sharded(False)
    found = ck.load(state)
    return said, found.step, state["n"], ctx.distributed.allgather(rank)


@pytest.mark.ranks
def test_what_is_damaged_at_a_url(tmp_path: Path) -> None:
    """Is found by the rank that reads it; the next older one is taken, on all ranks."""
    said = in_group(damaged, 2, tmp_path, tmp_path, env=at_url(tmp_path))
    assert not isinstance(said[0], Raised) and said[0] == said[1], said
    error, step, number, after = said[0]
    assert "bad checksum: __1_0.distcp" in error
    assert (step, number, after) == (1, 7, [0, 1])


def cut_off(ctx: Any, directory: Path) -> Any:
    """Load by its uuid what has lost the end of an object that only rank 1 reads."""
    where.parse_location = lambda text: text
    rank, ck = ctx.distributed.rank, ctx.checkpoint
    found = ck.save(sharded(True), 1).committed
    if rank == 1:
        (file,) = (directory / "objects").glob("step-00000001.*/__1_0.distcp")
        os.truncate(file, 10 * MIB)
    ctx.distributed.barrier()
    try:
        ck.load(sharded(False), which=found.uuid)
    except CheckpointError as error:
        return str(error), ctx.distributed.allgather(rank)
    return "loaded", []


@pytest.mark.ranks
def test_an_object_that_is_too_short(tmp_path: Path) -> None:
    """All ranks name it, and are in step afterwards."""
    said = in_group(cut_off, 2, tmp_path, tmp_path, env=at_url(tmp_path))
    assert not isinstance(said[0], Raised) and said[0] == said[1], said
    error, after = said[0]
    assert "__1_0.distcp" in error and after == [0, 1]


def begun_at_url(ctx: Any, how: str) -> Any:
    """Return what one read in a new job takes, and what it has read."""
    where.parse_location = lambda text: text
    before = read_by_this_process()
    if how == "restore_path":
        with ctx.checkpoint.restore_path() as path:
            found = sum(file.stat().st_size for file in path.glob("*.distcp"))
    else:
        uuid = ctx.checkpoint.list()[-1].uuid if how == "load by its uuid" else None
        state = sharded(False)
        ctx.checkpoint.load(state, which=uuid)
        found = state["n"]
    return read_by_this_process() - before, found


def saved_for_another(ctx: Any) -> Any:
    """Save what :func:`begun_at_url` reads."""
    where.parse_location = lambda text: text
    ctx.checkpoint.save(sharded(True), 1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "how",
    ["load", pytest.param("load by its uuid", marks=pytest.mark.trial), "restore_path"],
)
def test_a_job_without_an_agent_reads_once(tmp_path: Path, how: str) -> None:
    """What it begins with is not read as a whole before, nor compared in a reading of its own."""
    assert not any(in_group(saved_for_another, 2, tmp_path, env=at_url(tmp_path)))
    said = in_group(begun_at_url, 2, tmp_path, how, env=at_url(tmp_path))
    assert not any(isinstance(one, Raised) for one in said), said
    counts = [count for count, _ in said]
    assert ROWS * MIB <= sum(counts) < (ROWS + 16) * MIB, counts
    assert all(found for _, found in said)


def begun_with_damage(ctx: Any, how: str, stays: bool) -> Any:
    """Read the latest, which is damaged; ``stays``: no file can be written, to put it aside."""
    where.parse_location = lambda text: text
    if how == "restore_path":
        with ctx.checkpoint.restore_path() as path:
            return path.name.partition(".")[0], ctx.distributed.allgather(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if stays else before[0], before[1]))
    try:
        found = ctx.checkpoint.load(sharded(False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return found.name.partition(".")[0], ctx.distributed.allgather(1)


def saved_twice(ctx: Any) -> None:
    """Save two checkpoints."""
    where.parse_location = lambda text: text
    for step in (1, 2):
        ctx.checkpoint.save(sharded(True), step)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "stays"), [("load", False), ("load", True), ("restore_path", False)]
)
def test_a_job_without_an_agent_begins_with_damage(tmp_path: Path, how: str, stays: bool) -> None:
    """The next older one is read, by all ranks, even where the damaged one cannot be put aside."""
    assert not any(in_group(saved_twice, 2, tmp_path, env=at_url(tmp_path)))
    (folder,) = (tmp_path / "objects").glob("step-00000002.*")
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    with largest.open("r+b") as opened:
        opened.seek(10 * MIB)
        byte = opened.read(1)[0]
        opened.seek(10 * MIB)
        opened.write(bytes([byte ^ 1]))
    said = in_group(begun_with_damage, 2, tmp_path, how, stays, env=at_url(tmp_path))
    assert said == [("step-00000001", [1, 1])] * 2
    assert (folder / "QUARANTINED").exists() is not stays
