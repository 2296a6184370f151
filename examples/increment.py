"""Determined's tutorial "distributed training" with elaunch: a number that all ranks make grow.

It ends as ``steps * size * (size + 1) / 2``, however often it was killed or preempted meanwhile::

    elaunch run --nproc-per-node 4 --max-restarts 3 \\
        --checkpoint-dir ckpt --checkpoint-glob 'step_*.json' examples/increment.py
    torchrun --nproc-per-node 4 examples/increment.py
    mpirun -np 4 elaunch wrap -- python examples/increment.py
    python examples/increment.py
"""

import argparse
import json
import time
from pathlib import Path

import elaunch


def save(directory: Path, x: int, steps_completed: int) -> None:
    """Write the state under a temporary name and rename it: no reader sees half of it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step_{steps_completed:06d}.json"
    path.with_suffix(".tmp").write_text(json.dumps({"x": x, "steps_completed": steps_completed}))
    path.with_suffix(".tmp").rename(path)


def main(ctx: elaunch.Context, steps: int, seconds: float) -> None:
    """Count from what elaunch chose for this round; every rank calls it."""
    path = elaunch.latest_checkpoint()
    state = json.loads(path.read_text()) if path else {"x": 0, "steps_completed": 0}
    x, start = state["x"], state["steps_completed"]
    chief = ctx.distributed.rank == 0
    for step in range(start + 1, steps + 1):
        x += sum(ctx.distributed.allgather(ctx.distributed.rank + 1))
        time.sleep(seconds)
        if step % 10 and step != steps:
            continue
        if chief:
            ctx.train.report_training_metrics(steps_completed=step, metrics={"x": x})
            ctx.train.report_progress(step / steps)
            ctx.train.flush()  # the state is not to be ahead of its metrics
            if ctx.info.checkpoint_dir:
                save(ctx.info.checkpoint_dir, x, step)
        # All ranks ask, and only after the save: not a step is lost.
        if step < steps and ctx.preempt.should_preempt():
            return
    everywhere = ctx.distributed.gather(x)
    if chief:
        ctx.train.report_validation_metrics(steps_completed=steps, metrics={"x": x})
        print(f"after {steps} steps x is, rank by rank, {everywhere}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.0, help="that a step takes")
    options = parser.parse_args()
    with elaunch.init(name="increment", chief_only=True) as context:
        main(context, options.steps, options.seconds)
