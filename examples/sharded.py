"""Determined's tutorial "sharded checkpointing in detached mode" with elaunch.

Batches are split between the ranks, every rank reports the metrics of its own, and all ranks write
one checkpoint together, each its part. Needs no cluster, no server and no GPU::

    elaunch run --nproc-per-node 2 --max-restarts 3 --checkpoint-dir ckpt examples/sharded.py
    torchrun --nproc-per-node 2 examples/sharded.py
    mpirun -np 2 elaunch wrap -- python examples/sharded.py
    python examples/sharded.py
"""

import random

import torch.distributed as dist

import elaunch


def main() -> None:
    """Work through 100 batches; every rank calls it."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else alone))
    with elaunch.init(name="sharded") as ctx:
        rank, size = dist.get_rank(), dist.get_world_size()
        latest = ctx.checkpoint.latest()
        first = latest.next_step if latest else 0
        for batch in range(first, 100):
            if batch % size == rank:
                metrics = {"loss": random.random(), "rank": rank}
                ctx.train.report_training_metrics(steps_completed=batch, metrics=metrics)
                if batch % 10 == 9:
                    ctx.train.report_validation_metrics(steps_completed=batch, metrics=metrics)
            if batch % 25 == 24:
                metadata = {"steps_completed": batch, f"rank_{rank}": "ok"}
                # Every rank has a path of its own; it is one checkpoint when all are done.
                with ctx.checkpoint.store_path(metadata, shard=True) as (path, _uuid):
                    (path / f"state_{rank}").write_text(f"{batch},{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
