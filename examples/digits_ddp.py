"""Train a small network on scikit-learn's handwritten digits with DDP, and survive being killed.

Plain PyTorch, run by elaunch, by torchrun or alone::

    elaunch run --nproc-per-node 2 --max-restarts 3 \\
        --checkpoint-dir ckpt --checkpoint-glob 'step_*.pt' examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py --checkpoint-dir ckpt
    python examples/digits_ddp.py

Three habits make a restart exact. A checkpoint is written under a temporary name and renamed, so
no reader sees half a file. It holds the data position as a count of samples over all ranks, so none
is skipped or seen twice. All ranks resume from one choice: elaunch's, or the newest file, to which
nobody adds before every rank has joined the first step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    return device


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: 8x8 pixels in 0..1, the same split on every rank."""
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    return TensorDataset(x.float(), y), TensorDataset(x_test.float(), y_test)


def save(directory: Path, state: dict) -> None:
    """Commit ``state`` as ``step_<step>.pt``: whole on the disk first, then renamed."""
    path = directory / f"step_{state['step']:08d}.pt"
    temporary = directory / f".{path.name}.tmp"
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def find_checkpoint(directory: Path | None) -> Path | None:
    """Return the checkpoint to resume from: the launcher's choice, else the newest file."""
    chosen = os.environ.get("ELAUNCH_RESUME_FROM")
    if chosen is not None and os.environ.get("ELAUNCH_CHECKPOINT_DIR"):
        return Path(chosen) if chosen else None
    return max(directory.glob("step_*.pt"), default=None) if directory else None


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Return the share of test samples classified correctly; every rank counts a part."""
    x, y = (part[dist.get_rank() :: dist.get_world_size()].to(device) for part in test.tensors)
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).sum()
    counts = torch.stack([correct, torch.tensor(len(y), device=device)]).double()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train to the last epoch, from a checkpoint where there is one; every rank calls it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size} is not a multiple of {world} workers")
    train_set, test_set = load_data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = first_epoch = offset = 0
    if checkpoint := find_checkpoint(args.checkpoint_dir):
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, first_epoch, offset = state["step"], state["epoch"], state["offset"]
        if rank == 0:
            print(f"resumed from {checkpoint.name}: step {step} epoch {first_epoch}", flush=True)
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=0, drop_last=True)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        # The sampler deals the epoch's order round robin: a `world`-th of `offset` was this rank's.
        rest = list(sampler)[offset // world :]
        for x, y in DataLoader(train_set, args.batch_size // world, sampler=rest, drop_last=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            step, offset = step + 1, offset + args.batch_size
            time.sleep(args.step_seconds)
            if rank == 0 and step % args.log_every == 0:
                print(f"step {step} epoch {epoch} loss {loss.item():.4f}", flush=True)
            if rank == 0 and args.checkpoint_dir and step % args.save_every == 0:
                progress = {"step": step, "epoch": epoch, "offset": offset}
                tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(args.checkpoint_dir, tensors | progress)
        offset = 0
    result = accuracy(model, test_set, device)
    if rank == 0:
        print(f"finished: step {step} test accuracy {result:.2%}", flush=True)


def main() -> None:
    """Parse the arguments, train, leave the process group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="over all workers")
    directory = os.environ.get("ELAUNCH_CHECKPOINT_DIR") or None
    parser.add_argument("--checkpoint-dir", type=Path, default=directory, help="none: no saves")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slow each step down")
    args = parser.parse_args()
    if args.checkpoint_dir:
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    device = start()
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
