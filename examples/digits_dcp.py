"""Train on scikit-learn's handwritten digits with FSDP2 and sharded checkpoints (DCP).

Every rank holds, and writes, its shard only. Run by elaunch, by torchrun or alone::

    elaunch run --nproc-per-node 2 --max-restarts 3 --checkpoint-dir ckpt examples/digits_dcp.py
    torchrun --nproc-per-node 2 examples/digits_dcp.py --checkpoint-dir ckpt
    python examples/digits_dcp.py

``torch.distributed.checkpoint`` writes ``.metadata`` last: a directory without it was never
finished. Saving twice into one directory can mix two checkpoints without an error, so each step has
its own. Shards are resharded on loading: another number of workers may resume.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def start() -> torch.device:
    """Join the process group and return this worker's device."""
    # LOCAL_RANK, not RANK: on the second node of two, rank 8 owns that node's device 0.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # DCP exchanges its plans on the CPU: beside nccl there must be gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    return device


def load_data(device: torch.device) -> list[torch.Tensor]:
    """Return train pixels, test pixels, train digits, test digits; the same on every rank."""
    pixels, digits = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    x, x_test, y, y_test = (torch.as_tensor(part, device=device) for part in parts)
    return [x.float(), x_test.float(), y, y_test]


def save(directory: Path, state: dict[str, Any]) -> None:
    """Write ``state`` into the step's own directory; every rank calls it."""
    path = directory / f"step_{state['progress']['step']:08d}"
    if dist.get_rank() == 0:
        # What is here was begun by a round that died in the middle.
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=path)


def find_checkpoint(directory: Path | None) -> Path | None:
    """Return the directory to resume from: the launcher's choice, else the newest finished one."""
    chosen = os.environ.get("ELAUNCH_RESUME_FROM")
    if chosen is not None and os.environ.get("ELAUNCH_CHECKPOINT_DIR"):
        return Path(chosen) if chosen else None
    finished = directory.glob("step_*/.metadata") if directory else ()
    return max((mark.parent for mark in finished), default=None)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, **progress: int) -> dict[str, Any]:
    """Return all that a restart needs; ``progress`` is the same on every rank."""
    # Not optimizer.state_dict(): loaded into a fresh optimizer it restores nothing, silently.
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "progress": progress}


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train to the last epoch, from a checkpoint where there is one; every rank calls it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size} is not a multiple of {world} workers")
    x, x_test, y, y_test = load_data(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    done = 0
    if checkpoint := find_checkpoint(args.checkpoint_dir):
        state = snapshot(model, optimizer, step=0)
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        done = state["progress"]["step"]
        if rank == 0:
            print(f"resumed from {checkpoint.name}: step {done}", flush=True)
    per_epoch = len(x) // args.batch_size
    steps = args.epochs * per_epoch
    for step in range(done + 1, steps + 1):
        # The batch follows from the step alone, whatever the number of workers.
        epoch, position = divmod(step - 1, per_epoch)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        batch = order[position * args.batch_size :][: args.batch_size][rank::world]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        time.sleep(args.step_seconds)
        if rank == 0 and step % args.log_every == 0:
            print(f"step {step} epoch {epoch} loss {loss.item():.4f}", flush=True)
        if args.checkpoint_dir and step % args.save_every == 0:
            save(args.checkpoint_dir, snapshot(model, optimizer, step=step))
    with torch.no_grad():
        result = (model(x_test).argmax(1) == y_test).double().mean().item()
    if rank == 0:
        print(f"finished: step {steps} test accuracy {result:.2%}", flush=True)


def main() -> None:
    """Parse the arguments, train, leave the process group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="over all workers")
    directory = os.environ.get("ELAUNCH_CHECKPOINT_DIR") or None
    parser.add_argument("--checkpoint-dir", type=Path, default=directory, help="none: no saves")
    parser.add_argument("--save-every", type=int, default=40, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slow each step down")
    args = parser.parse_args()
    train(args, start())
    dist.barrier()  # nobody takes its groups apart while another still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
