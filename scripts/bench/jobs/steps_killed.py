"""Train by ``ctx.train.steps``; in step 50 of round 0 the last rank kills itself.

It stamps ``killed`` before. Each other rank leaves ``steps``: its process, and when it had applied
each step, on the monotonic clock. The model is small, so that next to nothing of the time is spent
on the micro-batches that the others take over; each rank's setup takes SETUP seconds, as that of a
large model would. ``digest`` is that of the weights at the end.

Argument: ``undisturbed``, if no rank is to be killed.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import torch
from stamp import leave, prepare, rank, write
from torch import nn
from torch.utils.data import TensorDataset

import elaunch

KILLED, UNTIL = 50, 1000
SETUP, PACE = 3.0, 0.01
STEP, MICRO = 48, 4
DATA = TensorDataset(*torch.randn(2, 4 * STEP, 64, generator=torch.Generator().manual_seed(0)))


def build() -> nn.Module:
    """Return the model, after a while."""
    torch.manual_seed(0)
    time.sleep(SETUP)
    return nn.Linear(64, 64)


def main() -> None:
    """Run one worker."""
    with elaunch.init(announce=False) as ctx:
        model, applied = build(), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        last = rank() == ctx.distributed.size - 1 and not ctx.info.round and not sys.argv[1:]
        loop = ctx.train.steps(
            {"model": model, "optimizer": optimizer},
            DATA,
            global_batch=STEP,
            micro_batch=MICRO,
            until=UNTIL,
            save_every=None,
        )
        for step in loop:
            time.sleep(PACE)  # until the new process is ready there must be steps
            for x, y in step.micro_batches():
                if last and step.number == KILLED:
                    write(prepare("killed"))
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(nn.functional.mse_loss(model(x), y))
            step.apply(optimizer)
            applied.append(time.monotonic())
        digest = hashlib.sha256(b"".join(bytes(one.detach().numpy()) for one in model.parameters()))
        found = {"pid": os.getpid(), "applied": applied, "digest": digest.hexdigest()}
        leave("steps", found)


if __name__ == "__main__":
    main()
