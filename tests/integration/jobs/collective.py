"""Reduce over all ranks with gloo, in each of some rounds; rank 1 fails in all but the last.

Arguments: a directory for a checkpoint per round, and the number of rounds. Each round saves a
newer checkpoint, so that each restart is at once.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

directory, rounds = Path(sys.argv[1]), int(sys.argv[2])
rank, number = int(os.environ["RANK"]), int(os.environ["ELAUNCH_ROUND"])
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
size = dist.get_world_size()
assert total.item() == size * (size + 1) / 2, total
if rank == 0:
    torch.save({"step": number}, directory / f"step_{number}.tmp")
    (directory / f"step_{number}.tmp").rename(directory / f"step_{number}.pt")
print(f"reduced rank={rank} round={number} port={os.environ['MASTER_PORT']}", flush=True)
dist.barrier()  # saved and said, before anybody fails
if number + 1 < rounds:
    if rank == 1:
        os._exit(3)
    dist.barrier()  # never comes back: rank 1 is gone
dist.destroy_process_group()
