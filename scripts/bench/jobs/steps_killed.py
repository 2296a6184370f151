"""Train by ``ctx.train.steps``; in step 10 of round 0 the last rank kills itself.

It stamps ``killed`` before. Each other rank leaves ``steps``: its process, and when it had applied
each step, on the monotonic clock. The model and the steps are those of ``steps_beside``.
"""

from __future__ import annotations

import os
import signal
import time

import torch
from stamp import leave, prepare, rank, write
from steps_beside import DATA, MICRO, STEP, build
from torch import nn

import elaunch

KILLED, UNTIL = 10, 16


def main() -> None:
    """Run one worker."""
    with elaunch.init(announce=False) as ctx:
        model, applied = build(), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        last = rank() == ctx.distributed.size - 1 and not ctx.info.round
        loop = ctx.train.steps(
            {"model": model, "optimizer": optimizer},
            DATA,
            global_batch=STEP,
            micro_batch=MICRO,
            until=UNTIL,
            save_every=None,
        )
        for step in loop:
            for x, y in step.micro_batches():
                if last and step.number == KILLED:
                    write(prepare("killed"))
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(nn.functional.mse_loss(model(x), y))
            step.apply(optimizer)
            applied.append(time.monotonic())
        leave("steps", {"pid": os.getpid(), "applied": applied})


if __name__ == "__main__":
    main()
