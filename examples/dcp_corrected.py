"""The usual introduction to torch.distributed.checkpoint, with what is wrong in it put right.

As it is printed (``save_state_dict(state, storage_writer="checkpoint_dir/")`` and so on) it does
not run, or does something else than it says::

    printed                                       here
    init_process_group("nccl")                    gloo where there is no GPU
    cuda.set_device(dist.get_rank())              LOCAL_RANK: rank 8 is device 0 of the second node
    save_state_dict(…, storage_writer="dir/")     dcp.save(…, checkpoint_id=dir): a string is no
    load_state_dict(…, storage_reader="dir/")     writer (AttributeError), and the names deprecated
    from ….state_dict import SHARDED_STATE_DICT   there is no such name: get_state_dict()
    "optimizer": optimizer.state_dict()           get_state_dict(): loaded by number into a fresh
                                                  Adam it restores nothing, without a word
    "checkpoint_dir/" each time                   a directory per step: a crash in the second save
                                                  mixes two checkpoints, or loses both

Run it by elaunch or by torchrun; kill a worker and it goes on from the newest checkpoint::

    elaunch run --nproc-per-node 2 --max-restarts 3 --checkpoint-dir ck examples/dcp_corrected.py
    torchrun --nproc-per-node 2 examples/dcp_corrected.py ck
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, SAVE_EVERY = 200, 20

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# DCP exchanges its plans on the CPU: beside nccl there must be gloo.
dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
device = "cuda" if cuda else "cpu"
directory = Path(os.environ.get("ELAUNCH_CHECKPOINT_DIR") or sys.argv[1])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def snapshot(step: int) -> dict:
    """Return what is saved, or loaded into: sharded, by the names of the parameters."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": torch.tensor([step])}


# elaunch tells what to resume from; an empty answer is one, too.
finished = [mark.parent for mark in directory.glob("step_*/.metadata")]  # written last
chosen = os.environ.get("ELAUNCH_RESUME_FROM", max(map(str, finished), default=""))
step = 0
if chosen:
    state = snapshot(0)
    dcp.load(state, checkpoint_id=chosen)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    step = state["step"].item()
    if dist.get_rank() == 0:
        print(f"resumed from step {step}", flush=True)

while step < STEPS:
    step += 1
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(device)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    if step % SAVE_EVERY == 0:
        dcp.save(snapshot(step), checkpoint_id=directory / f"step_{step:08d}")

dist.barrier()
dist.destroy_process_group()
