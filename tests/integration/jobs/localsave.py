"""Save with elaunch in each step, on each node's own disk; fail once; go on from where that was.

Arguments: ``DIR``, which all nodes share, then the way to save: ``path`` (``store_path``, a file
per rank), ``save`` or ``async`` (``save``, the latter with ``block=False``).

Each worker prints ``from rank=R round=K step=S tree=SHA256`` for what it resumes from; the times in
``metadata.json``, and COMMIT with its checksum, may be the node's own (``async``). When
``DIR/fail`` is there rank 1 ends with 7 after a save in round 0; in later rounds all do three more
steps and end with 0.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

import elaunch

share, way = Path(sys.argv[1]), sys.argv[2]


def digest(path):
    total = hashlib.sha256()
    own = ("metadata.json", "COMMIT") if way == "async" else ()
    for file in sorted(one for one in path.rglob("*") if one.is_file() and one.name not in own):
        total.update(f"{file.relative_to(path)}\n".encode() + file.read_bytes())
    return total.hexdigest()


def save(ctx, state, step):
    if way != "path":
        ctx.checkpoint.save(state, step, block=way == "save")
        return
    with ctx.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
        (path / f"state_{ctx.distributed.rank}").write_text(f"{step} of {ctx.distributed.rank}")


def tell_what_is_there(ctx):
    with ctx.checkpoint.restore_path() as path:
        said = f"step={ctx.checkpoint.latest().step} tree={digest(path)}"
        os.write(1, f"from rank={ctx.distributed.rank} round={ctx.info.round} {said}\n".encode())
    return ctx.checkpoint.latest().step


dist.init_process_group("gloo")
with elaunch.init() as ctx:
    rank, state = ctx.distributed.rank, {"mine": elaunch.PerRank(ctx.distributed.rank)}
    step = tell_what_is_there(ctx) if ctx.checkpoint.latest() else 0
    for _ in range(3 if ctx.info.round else 10_000):
        step += 1
        save(ctx, state, step)
        if ctx.info.round == 0:
            os.write(1, f"saved {step} rank {rank}\n".encode())
            if ctx.distributed.broadcast((share / "fail").exists() if rank == 0 else None):
                sys.exit(7 if rank == 1 else time.sleep(60))
