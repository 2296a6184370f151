"""Train by ``ctx.train.steps`` in steps of about 50 ms, for ever, after a setup of some seconds.

As in ``steps.py`` a step takes as long as it sleeps, however many ranks share its micro-batches.
Whoever is rank 0 appends ``<time.monotonic()> <step>`` to ``$BENCH_DIR/progress.<rank>.<round>``,
of its start. Each process stamps ``worker`` before its first step.

Argument: the seconds of setup.
"""

from __future__ import annotations

import sys
import time

import torch
from stamp import directory, rank, round_number, stamp
from steps import STEP_SECONDS
from steps_killed import DATA, MICRO, STEP
from torch import nn

import elaunch


def main() -> None:
    """Run one worker until it is stopped."""
    name = f"progress.{rank()}.{round_number()}"
    with (
        elaunch.init(announce=False) as ctx,
        (directory() / name).open("a", buffering=1) as progress,
    ):
        torch.manual_seed(0)
        time.sleep(float(sys.argv[1]))
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        state = {"model": model, "optimizer": optimizer}
        loop = ctx.train.steps(state, DATA, global_batch=STEP, micro_batch=MICRO, save_every=None)
        stamp("worker")
        for step in loop:
            time.sleep(STEP_SECONDS)
            for x, y in step.micro_batches():
                step.backward(nn.functional.mse_loss(model(x), y))
            step.apply(optimizer)
            if ctx.distributed.rank == 0:
                progress.write(f"{time.monotonic():.6f} {step.number}\n")


if __name__ == "__main__":
    main()
