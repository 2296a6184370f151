"""Determined's tutorial "4_distributed.py", word for word but for elaunch's names.

Arguments: the number of steps, the seconds that a step takes.
"""

from __future__ import annotations

import logging
import pathlib
import sys
import time

import elaunch

log = logging.getLogger()


def save_state(x, steps_completed, trial_id, checkpoint_directory):
    with checkpoint_directory.joinpath("state").open("w") as f:
        f.write(f"{x},{steps_completed},{trial_id}")


def load_state(trial_id, checkpoint_directory):
    checkpoint_directory = pathlib.Path(checkpoint_directory)
    with checkpoint_directory.joinpath("state").open("r") as f:
        x, steps_completed, ckpt_trial_id = f.read().split(",")
    if ckpt_trial_id == trial_id:
        return int(x), int(steps_completed)
    # This is a new trial; load the "model weight" but not the batch count.
    return int(x), 0


def main(core_context, latest_checkpoint, trial_id, increment_by, length, seconds):
    x = 0
    starting_batch = 0
    if latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(latest_checkpoint) as path:
            x, starting_batch = load_state(trial_id, path)
        if core_context.distributed.rank == 0:
            print(f"begins with x={x} at {starting_batch}", flush=True)

    batch = starting_batch
    last_checkpoint_batch = None
    while batch < length:
        # Increment by the sum of every worker's increment_by value.
        x += sum(core_context.distributed.allgather(increment_by))
        steps_completed = batch + 1
        time.sleep(seconds)
        # Only the chief logs.
        if core_context.distributed.rank == 0:
            log.info("x is now %s", x)
        if steps_completed % 10 == 0:
            if core_context.distributed.rank == 0:
                core_context.train.report_training_metrics(
                    steps_completed=steps_completed, metrics={"x": x}
                )
                core_context.train.report_progress(steps_completed / length)
                checkpoint_metadata = {"steps_completed": steps_completed}
                with core_context.checkpoint.store_path(checkpoint_metadata) as (path, _):
                    save_state(x, steps_completed, trial_id, path)
                last_checkpoint_batch = steps_completed
            if core_context.preempt.should_preempt():
                return
        batch += 1
    if core_context.distributed.rank == 0:
        core_context.train.report_validation_metrics(
            steps_completed=steps_completed, metrics={"x": x}
        )
        if last_checkpoint_batch != steps_completed:
            with core_context.checkpoint.store_path({"steps_completed": steps_completed}) as (
                path,
                _,
            ):
                save_state(x, steps_completed, trial_id, path)
        print(f"x is {x}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    info = elaunch.info()
    with elaunch.init() as core_context:
        main(
            core_context=core_context,
            latest_checkpoint=elaunch.latest_checkpoint(),
            trial_id=info.run_id,
            increment_by=1 + core_context.distributed.rank,
            length=int(sys.argv[1]),
            seconds=float(sys.argv[2]),
        )
