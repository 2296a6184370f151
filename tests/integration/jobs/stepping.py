"""A training by ``ctx.train.steps``; rank 0 prints the digest of its weights, and its steps.

Arguments, as ``name=value``: what of the training is another than by default; ``kill=STEP`` has the
last rank kill itself in that step of round 0, ``pause=STEP`` waits there for the end of the job,
``flip=RANK`` has that rank compute a gradient with a wrong bit, ``flip=RANK.once`` only when it
computes a micro-batch for the first time, ``spoil=RANK`` changes a weight there after step 1,
``call=1`` has all ranks call each other before the loop, so that all begin anew when one dies;
``bad=STEP.LEAF`` has a loss that is not finite, ``raise=STEP.LEAF`` raises there.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import elaunch

given = dict(word.split("=", 1) for word in sys.argv[1:])


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from each of three generators, as an augmentation draws it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(given.get("samples", "50"))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sample with its target."""
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(8) + numpy.random.random()
        return x + 0.01 * noise, x.sum(0, keepdim=True).sin()


def digest(module: nn.Module) -> str:
    """Return the digest of its weights."""
    weights = b"".join(one.detach().numpy().tobytes() for one in module.parameters())
    return hashlib.sha256(weights).hexdigest()


def flip(gradient: Tensor) -> Tensor:
    """Return a gradient with one wrong bit."""
    place = (step.number, step.leaf)
    if place in flipped and given["flip"].endswith(".once"):
        return gradient
    flipped.add(place)
    wrong = gradient.clone()
    wrong.view(torch.int32)[0, 0] ^= 1
    return wrong


flipped: set[tuple[int, int | None]] = set()
with elaunch.init(announce=False) as ctx:
    rank, size = ctx.distributed.rank, ctx.distributed.size
    if "call" in given:
        ctx.distributed.barrier()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    every: Any = given.get("every")
    loop = ctx.train.steps(
        state,
        Noisy(),
        global_batch=int(given.get("batch", "12")),
        micro_batch=int(given.get("micro", "1")),
        until=int(given.get("until", "9")),
        last="short",
        on_bad_batch=given.get("on_bad", "raise"),
        check={"no": False, "yes": True, "warn": "warn"}[given.get("check", "no")],
        save_every=every if every == "auto" or every is None else int(every),
        loader={"num_workers": int(given.get("workers", "0"))},
    )
    if given.get("flip", "").partition(".")[0] == str(rank):
        model[0].weight.register_hook(flip)
    losses = []
    for step in loop:
        for x, y in step.micro_batches():
            with torch.autocast("cpu", torch.bfloat16, enabled=given.get("autocast") == "bf16"):
                loss = (model(x) - y).square().mean()
            if given.get("raise") == f"{step.number}.{step.leaf}":
                raise ValueError("these samples")
            if given.get("bad") == f"{step.number}.{step.leaf}":
                loss = loss * torch.nan
            step.backward(loss)
            step.log(most=loss.detach() * 2)
        if ctx.info.round == 0 and given.get("kill") == str(step.number) and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step.apply(optimizer, clip=0.5)
        if given.get("spoil") == str(rank) and step.number == 1:
            model[0].weight.data += 0.1
        schedule.step()
        row = f"{step.number} {step.loss!r} {step.metrics['most']!r} {step.epoch}"
        losses.append(f"{row} {digest(model)}")
        if given.get("pause") == str(step.number):
            print("paused", flush=True)
            while not ctx.preempt.reason:
                time.sleep(0.01)
    if rank == 0:
        print("weights", digest(model), loop.done, loop.preempted, flush=True)
        for line in losses:
            print("loss", line, flush=True)
