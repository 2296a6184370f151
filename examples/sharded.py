"""Determined's tutorial "sharded checkpointing in detached mode" with elaunch.

Batches are split between the ranks, every rank reports the metrics of its own, and all ranks write
one checkpoint together, each its part. Needs no cluster, no server and no GPU::

    elaunch run --nproc-per-node 2 --max-restarts 3 \\
        --checkpoint-dir ckpt --checkpoint-glob 'step_*.json' examples/sharded.py
    torchrun --nproc-per-node 2 examples/sharded.py
    mpirun -np 2 elaunch wrap -- python examples/sharded.py
    python examples/sharded.py
"""

import json
import random
from collections import ChainMap
from pathlib import Path

import torch.distributed as dist

import elaunch


def save(ctx: elaunch.Context, directory: Path, batch: int) -> None:
    """Write one checkpoint; every rank calls it. It is one when its JSON file is there."""
    rank, path = ctx.distributed.rank, directory / f"step_{batch:06d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / f"state_{rank}").write_text(f"{batch},{rank}")
    ctx.train.flush()  # a checkpoint is not to be ahead of its metrics
    parts = ctx.distributed.gather({f"rank_{rank}": "ok"})
    if parts is not None:  # that is on rank 0, and every rank has written its part
        metadata = {"steps_completed": batch, **ChainMap(*parts)}
        path.with_suffix(".tmp").write_text(json.dumps(metadata))
        path.with_suffix(".tmp").rename(path.with_suffix(".json"))


def main() -> None:
    """Work through 100 batches; every rank calls it."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else alone))
    with elaunch.init(name="sharded") as ctx:
        rank, size = dist.get_rank(), dist.get_world_size()
        directory = ctx.info.checkpoint_dir or ctx.directory / "checkpoints"
        first = 0 if ctx.info.resume_step is None else ctx.info.resume_step + 1
        for batch in range(first, 100):
            if batch % size == rank:
                metrics = {"loss": random.random(), "rank": rank}
                ctx.train.report_training_metrics(steps_completed=batch, metrics=metrics)
                if batch % 10 == 9:
                    ctx.train.report_validation_metrics(steps_completed=batch, metrics=metrics)
            if batch % 25 == 24:
                with ctx.section("checkpoint", timeout=60):
                    save(ctx, directory, batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
