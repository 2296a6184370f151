"""Save and resume in DDP: the ranks share the work of writing, and all of them load.

Run it, kill -9 any worker while it trains, and it ends with the same parameters, bit by bit; under
torchrun, and alone, when the command is given again::

    elaunch run --nproc-per-node 2 --max-restarts 3 --checkpoint-dir ckpt examples/ddp_checkpoint.py
    ELAUNCH_CHECKPOINT_DIR=ckpt torchrun --nproc-per-node 2 examples/ddp_checkpoint.py
    ELAUNCH_CHECKPOINT_DIR=ckpt python examples/ddp_checkpoint.py

One file for ``torch.load``, without DDP's ``module.``::

    elaunch checkpoints export ckpt latest model.pt
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elaunch


def start() -> torch.device:
    """Join the process group, if a launcher made one, and return this worker's device."""
    # LOCAL_RANK, not RANK: on the second node of two, rank 8 owns that node's device 0.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, **({} if dist.is_torchelastic_launched() else alone))
    return device


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's data of a step: the step says which, so nothing has to be saved of it."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(32, 8, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def main() -> None:
    """Train to the last step; every rank calls it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.0, help="that a step takes")
    args = parser.parse_args()
    device = start()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    with elaunch.init(name="ddp_checkpoint") as ctx:
        rank = ctx.distributed.rank
        # All ranks load, then wrap. The other way round works as well.
        found = ctx.checkpoint.load(state)
        ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        if rank == 0:
            print(f"starts at step {found.step}", flush=True)
        for step in range(found.step + 1, args.steps + 1):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x.to(device)), y.to(device)).backward()
            optimizer.step()
            time.sleep(args.seconds)
            if step % 10 == 0 or step == args.steps:
                # Returns when it is committed: no barrier is needed before somebody loads it.
                ctx.checkpoint.save(state, step, keep=elaunch.Keep(last=3))
                if step < args.steps and ctx.preempt.should_preempt():
                    return
        ctx.checkpoint.check_same(state)
        weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
        if rank == 0:
            print(f"ends at step {args.steps}: {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
