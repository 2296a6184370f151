"""Save a sharded model (FSDP2) by parts, or gathered on rank 0, and leave time and memory.

Arguments: ``sharded`` for ``ctx.checkpoint.save``, ``full`` for a full state dict and
``torch.save`` with fsync on rank 0; megabytes of parameters; a directory. The first save is not
counted.

``$BENCH_DIR/sharded.0.<rank>`` has the seconds of the save, and by how many bytes the process's
resident memory rose above what it was before.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_state import WIDTH, forget_peak, peak_memory, resident
from stamp import leave, rank
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import elaunch

LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def main() -> None:
    """Run one worker."""
    way, megabytes, directory = sys.argv[1:]
    dist.init_process_group("cpu:gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    layers = max(1, round(int(megabytes) * 1e6 / LAYER_BYTES))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with elaunch.init(announce=False) as context:
        for step in (1, 2):
            dist.barrier()
            forget_peak()
            before = resident()
            begin = time.monotonic()
            if way == "sharded":
                context.checkpoint.save({"model": model}, step)
            else:
                _save_whole(model, Path(directory) / f"{step}.pt")
            seconds = time.monotonic() - begin
            found: dict[str, Any] = {"seconds": seconds, "rose": peak_memory() - before}
        leave("sharded", found)
    dist.destroy_process_group()


def _save_whole(model: nn.Module, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank() == 0:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


if __name__ == "__main__":
    main()
