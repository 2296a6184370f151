"""Train as ``steps`` does, and save by ``ctx.checkpoint.save(every="auto")``; for ever.

``$BENCH_DIR/saves.<round>.<rank>`` of each round has, for each save, its step and the seconds for
which it stopped the training.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from stamp import directory, rank, round_number, stamp
from steps import KEEP, STEP_SECONDS, WEIGHTS

import elaunch


def main() -> None:
    """Run one worker until it is stopped."""
    dist.init_process_group("gloo")
    weights = torch.zeros(WEIGHTS)
    state = {"weights": weights}
    name = f"{round_number()}.{rank()}"
    with (
        elaunch.init(announce=False) as context,
        (directory() / f"progress.{round_number()}").open("a", buffering=1) as progress,
        (directory() / f"saves.{name}").open("a", buffering=1) as saves,
    ):
        found = context.checkpoint.load(state)
        step = found.step
        stamp("worker")
        while True:
            time.sleep(STEP_SECONDS)
            gradient = torch.ones(1000)
            dist.all_reduce(gradient)
            weights[:1000] += gradient
            step += 1
            if rank() == 0:
                progress.write(f"{time.monotonic():.6f} {step}\n")
            begin = time.monotonic()
            handle = context.checkpoint.save(
                state, step, every="auto", keep=elaunch.Keep(last=KEEP)
            )
            if not handle.skipped:
                saves.write(f"{step} {time.monotonic() - begin:.6f}\n")


if __name__ == "__main__":
    main()
