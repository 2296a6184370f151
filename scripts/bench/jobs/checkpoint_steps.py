"""Train on while a save is in flight, and leave what a step takes without one and with one.

Arguments: ``elaunch`` for ``save(block=False)``, ``dcp`` for ``dcp.async_save`` in a thread;
megabytes of state; a directory. ``$BENCH_DIR/steps.0.<rank>`` has the seconds of each step, alone
and during the save; the call itself is in none of them.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_state import Training
from stamp import leave

import elaunch

ALONE = 100
MOST = 1000
SIZE = 512


def main() -> None:
    """Run one worker."""
    way, megabytes, directory = sys.argv[1:]
    dist.init_process_group("cpu:gloo")
    training = Training(int(megabytes))
    matrix = torch.randn(SIZE, SIZE)
    with elaunch.init(announce=False) as context:
        checkpoint = context.checkpoint
        if way == "elaunch":
            checkpoint.save(training.state(), 1, block=False)
            checkpoint.wait()
        alone = [_step(matrix, False)[0] for _ in range(ALONE)]
        dist.barrier()
        settled = threading.Event()
        if way == "elaunch":
            checkpoint.save(training.state(), 2, block=False)
            root = Path(str(checkpoint.directory))
        else:
            # Its thread's collectives would meet those of the steps in the default group.
            future = dcp.async_save(
                training.state_dicts(),
                checkpoint_id=Path(directory) / "2",
                process_group=dist.new_group(backend="gloo"),
            )
            future.add_done_callback(lambda _: settled.set())
        during: list[float] = []
        over = False
        while not over and len(during) < MOST:
            done = any(root.glob("step-00000002.*")) if way == "elaunch" else settled.is_set()
            seconds, over = _step(matrix, done)
            during.append(seconds)
        leave("steps", {"alone": alone, "during": during})
        dist.barrier()
    dist.destroy_process_group()


def _step(matrix: torch.Tensor, done: bool) -> tuple[float, bool]:
    """Compute for a while, as a step would, and meet the other ranks.

    Return the seconds, and whether the save is ``done`` on all ranks.
    """
    begin = time.monotonic()
    for _ in range(4):
        matrix = torch.tanh(matrix @ matrix)
    gathered = torch.cat((matrix[0], torch.tensor([float(done)])))
    dist.all_reduce(gathered)
    return time.monotonic() - begin, gathered[-1].item() == dist.get_world_size()


if __name__ == "__main__":
    main()
