"""Train in steps of about 50 ms, for ever, and write each step down.

``$BENCH_DIR/train.<pid>`` has one line per step of one worker, after its all-reduce::

    <time.monotonic()> <world size> <rank> <step>
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from stamp import directory, rank

STEP_SECONDS = 0.05


def main() -> None:
    """Run one worker until it is stopped."""
    dist.init_process_group("gloo")
    world, step = dist.get_world_size(), 0
    with (directory() / f"train.{os.getpid()}").open("w", buffering=1) as lines:
        while True:
            dist.all_reduce(torch.ones(1))
            step += 1
            lines.write(f"{time.monotonic():.6f} {world} {rank()} {step}\n")
            time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()
