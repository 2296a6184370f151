"""FSDP2, and tensor parallel with it, by ``ctx.checkpoint``: saved, and loaded on other ranks.

``save(block=False)`` stops the training only while each rank copies its shards into memory of its
agent, which writes them out. A worker that is killed right after it loses nothing::

    elaunch run --nproc-per-node 4 --rdzv-id run --checkpoint-dir ck examples/sharded_save.py 2d
    elaunch run --nproc-per-node 2 --rdzv-id run --checkpoint-dir ck examples/sharded_save.py 2d
    elaunch run --nproc-per-node 1 --rdzv-id run --checkpoint-dir ck examples/sharded_save.py
    elaunch checkpoints ls ck

Each of them goes on where the one before has ended: four ranks on a mesh of 2 x 2, two, one. There
are no step directories to choose, no optimizer.state_dict() to forget, and nothing to find.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import elaunch

MORE_STEPS, SAVE_EVERY = 20, 5


def build(two_dimensional: bool) -> nn.Module:
    """Return the model, sharded over all ranks in one dimension or in two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    ranks = dist.get_world_size()
    if not two_dimensional:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        return model
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


dist.init_process_group("gloo")
with elaunch.init() as ctx:
    model = build("2d" in sys.argv)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": 0, "rng": elaunch.rng_state()}
    if ctx.checkpoint.load(state) and dist.get_rank() == 0:
        print(f"resumed from step {state['step']}", flush=True)
    for _ in range(MORE_STEPS):
        state["step"] += 1
        generator = torch.Generator().manual_seed(state["step"])
        inputs = torch.randn(64, 16, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state["step"] % SAVE_EVERY == 0:
            ctx.checkpoint.save(state, state["step"], block=False, keep=elaunch.Keep(last=3))
        if dist.get_rank() == 0:
            print(f"step {state['step']} loss {loss.item():.6f}", flush=True)
    ctx.checkpoint.wait()
dist.destroy_process_group()
