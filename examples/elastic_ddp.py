"""Torch Elastic's example, exact in mid-epoch: DDP on handwritten digits, for any number of nodes.

The shape is that of the original: a State, load_checkpoint, save_checkpoint, an elastic sampler.
Start it on each of two to five nodes, kill some of them, add others, while it trains::

    elaunch run --nnodes 2:5 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node1:29400 \\
        --checkpoint-dir ckpt --checkpoint-glob 'step_*.pt' examples/elastic_ddp.py
    torchrun --nproc-per-node 2 examples/elastic_ddp.py --checkpoint-dir ckpt

Each sample is trained on once per epoch, whatever happens in it: the sampler counts the samples
done by all ranks together, and that number is saved with the model. The batch is one over all
workers, so that their number changes how fast it goes, and not what is learned.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elaunch


class State:
    """All that a checkpoint holds, as the objects that are trained with."""

    def __init__(self, train_set: TensorDataset, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)]
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.sampler = elaunch.ElasticDistributedSampler(train_set)
        self.step = 0

    def capture_snapshot(self) -> dict[str, Any]:
        """Return what ``apply_snapshot`` needs; equal on all ranks."""
        parts = ("model", "optimizer", "sampler")
        return {"step": self.step, **{part: getattr(self, part).state_dict() for part in parts}}

    def apply_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot that any number of ranks has captured."""
        self.step = snapshot["step"]
        for part in ("model", "optimizer", "sampler"):
            getattr(self, part).load_state_dict(snapshot[part])


def save_checkpoint(state: State, directory: Path) -> None:
    """Commit the state as ``step_<step>.pt``: whole on the disk first, then renamed."""
    path = directory / f"step_{state.step:08d}.pt"
    temporary = directory / f".{path.name}.tmp"
    with temporary.open("wb") as file:
        torch.save(state.capture_snapshot(), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(state: State, directory: Path, device: torch.device) -> None:
    """Apply elaunch's choice, the same on all ranks; under other launchers the newest file."""
    path = elaunch.latest_checkpoint()
    if elaunch.info().checkpoint_dir is None:
        path = max(directory.glob("step_*.pt"), default=None)
    if path is not None:
        state.apply_snapshot(torch.load(path, map_location=device, weights_only=True))
    if dist.get_rank() == 0:
        place = f"step {state.step} epoch {state.sampler.epoch} offset {state.sampler.offset}"
        print(f"starts at {place} with {dist.get_world_size()} workers", flush=True)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set: pixels in 0..1, digits, and the samples' own numbers."""
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, digits, test_size=357, random_state=0, stratify=digits)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    numbers = torch.arange(len(y))
    return TensorDataset(x.float(), y, numbers), TensorDataset(x_test.float(), y_test)


def train(state: State, args: argparse.Namespace, device: torch.device) -> None:
    """Train to the last epoch; every rank calls it."""
    rank, world, round = dist.get_rank(), dist.get_world_size(), elaunch.info().round
    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size} is not a multiple of {world} workers")
    ddp, sampler = DistributedDataParallel(state.model), state.sampler
    words = {"batch_size": args.batch_size // world, "num_workers": args.loader_workers}
    loader = DataLoader(sampler.dataset, sampler=sampler, **words)
    seen = open(args.seen / f"{round}.{rank}", "a") if args.seen else None  # noqa: SIM115
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for x, y, numbers in loader:
            state.optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x.to(device)), y.to(device)).backward()
            state.optimizer.step()
            sampler.advance(len(x))
            state.step += 1
            time.sleep(args.step_seconds)
            if seen:
                record = {"step": state.step, "epoch": epoch, "world": world}
                print(json.dumps(record | {"numbers": numbers.tolist()}), file=seen, flush=True)
            if rank == 0 and state.step % args.save_every == 0:
                save_checkpoint(state, args.checkpoint_dir)


@elaunch.record
def main() -> None:
    """Parse the arguments, join the process group, train, test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=60, help="over all workers")
    directory = os.environ.get("ELAUNCH_CHECKPOINT_DIR", "checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, default=directory)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes of the loader")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slow each step down")
    parser.add_argument("--seen", type=Path, metavar="DIR", help="write the samples' numbers here")
    args = parser.parse_args()
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train_set, test_set = load_data()
    state = State(train_set, device)
    load_checkpoint(state, args.checkpoint_dir, device)
    train(state, args, device)
    if dist.get_rank() == 0:
        x, y = test_set.tensors
        right = (state.model(x.to(device)).argmax(1).cpu() == y).double().mean().item()
        print(f"finished: step {state.step} test accuracy {right:.2%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
