"""Sharded tensors of which several ranks have copies: a save with copies that differ is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.test_in_step import tried


def drifted(ctx: Any, block: bool) -> Any:
    """Save DTensors, then with one rank's copy changed, then after that is mended."""
    rank, save, world = ctx.distributed.rank, ctx.checkpoint.save, dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2))
    whole = DTensor.from_local(torch.ones(40), flat, [Replicate()], run_check=False)
    hybrid = DTensor.from_local(
        torch.full((4, 3), float(rank % 2)), grid, [Replicate(), Shard(0)], run_check=False
    )
    sharded = DTensor.from_local(torch.full((2,), float(rank)), flat, [Shard(0)], run_check=False)
    state = {"whole": whole, "hybrid": hybrid, "sharded": sharded, "plain": torch.ones(3)}
    save(state, 1, block=block)
    said = []
    for step, tensor in ((2, whole), (3, hybrid)):
        if rank == world - 1:
            tensor.to_local().add_(1)
        said.append(tried(lambda step=step: save(state, step, block=block)))
        if rank == world - 1:
            tensor.to_local().sub_(1)
    save(state, 4, block=block)
    first = tried(lambda: save({"new": whole, "x": rank // 9}, 5, block=block))
    ctx.checkpoint.wait()
    return said, first, [found.step for found in ctx.checkpoint.list()]


@pytest.mark.ranks
@pytest.mark.parametrize("agent", [False, True], ids=["block", "memory"])
def test_copies_that_differ(tmp_path: Path, agent: bool) -> None:
    """All ranks name the key and who differs; what is sharded and no copy may be anything."""
    said = in_group(drifted, 4, tmp_path, not agent, agent=agent)
    assert said == [said[0]] * 4 and not isinstance(said[0], Raised), said
    (whole, hybrid), first, steps = said[0]
    assert "whole is sharded, and the copies of a shard differ (ranks 0-2; rank 3)" in whole
    assert "hybrid is sharded, and the copies of a shard differ (rank 1; rank 3)" in hybrid
    assert "make the copies equal first" in whole and "PerRank(value.to_local())" in whole
    assert first == "" and steps == [1, 4, 5]


def drifted_model(ctx: Any) -> Any:
    """Train two replicas of a sharded model apart, as DiLoCo does, and save it."""
    rank = ctx.distributed.rank
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    ctx.checkpoint.save({"model": model}, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(1 + rank // 2)
    return tried(lambda: ctx.checkpoint.save({"model": model}, 2))


@pytest.mark.ranks
def test_a_hybrid_model_that_has_drifted(tmp_path: Path) -> None:
    """Of the second replica's values nothing would be kept."""
    said = in_group(drifted_model, 4, tmp_path)
    assert said == [said[0]] * 4, said
    assert "model.weight is sharded, and the copies of a shard differ (rank 0; rank 2)" in said[0]
