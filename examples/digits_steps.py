"""Train on scikit-learn's handwritten digits by ``ctx.train.steps``: on any ranks the same weights.

Kill any rank, give another number of ranks the next time, start it under another launcher: the last
line has the same digest, bit by bit::

    elaunch run --nproc-per-node 3 --max-restarts 9 --checkpoint-dir ckpt examples/digits_steps.py
    torchrun --nproc-per-node 2 examples/digits_steps.py
    python examples/digits_steps.py

There is no process group, no sampler, and no call that loads, saves, or asks whether to end.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import elaunch


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: 8x8 pixels in 0..1, the same split on every rank."""
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, digits, test_size=0.2, random_state=0, stratify=digits)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    return TensorDataset(x.float(), y), TensorDataset(x_test.float(), y_test)


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return what is trained; the seed makes it the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of the test set that is classified right."""
    x, y = test.tensors
    model.eval()
    with torch.no_grad():
        found = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return found


def main() -> None:
    """Train for some epochs; every rank calls it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="that a step takes longer")
    args = parser.parse_args()
    train, test = load_data()
    model, optimizer, schedule = build()
    with elaunch.init(name="digits_steps") as ctx:
        rank = ctx.distributed.rank
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        loop = ctx.train.steps(
            state,
            train,
            global_batch=96,
            micro_batch=8,
            epochs=args.epochs,
            save_every=args.save_every,
            keep=elaunch.Keep(last=2),
        )
        if rank == 0 and loop.done:
            print(f"goes on after step {loop.done}", flush=True)
        for step in loop:
            for x, y in step.micro_batches():
                step.backward(nn.functional.cross_entropy(model(x), y))
            step.apply(optimizer, clip=1.0)
            schedule.step()
            step.log(rate=schedule.get_last_lr()[0])
            time.sleep(args.step_seconds)
            if step.is_last_of_epoch and rank == 0:
                found = accuracy(model, test)
                ctx.train.report_validation_metrics(step.number, {"accuracy": found})
                print(f"epoch {step.epoch}: loss {step.loss:.4f} accuracy {found:.3f}", flush=True)
        if rank == 0 and not loop.preempted:
            weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            print(f"{loop.done} steps: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
