"""Save aside on slow storage, die at once, and make the next training step in the next round.

Arguments: megabytes of state. Round 0 saves step 7 with ``save(block=False)``, and rank 1 kills
itself as soon as the call has returned: ``killed.0.1`` is that moment. Round 1 loads and makes one
step. ``$BENCH_DIR/steps.<round>.<rank>`` has the moments at which the script began, the training
was made and loaded, and the step was done, and the step that was found. In round 0 nothing is
loaded, so that is what the job takes without elaunch.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from checkpoint_state import WIDTH, Training
from stamp import leave

import elaunch
import elaunch.training.checkpoint.load  # as a script that has loaded before

STEP = 7


def main() -> None:
    """Run one worker."""
    began = time.monotonic()
    dist.init_process_group("cpu:gloo")
    with elaunch.init(announce=False) as context:
        training = Training(int(sys.argv[1]), stepped=False)  # as a script does
        made = time.monotonic()
        found = context.checkpoint.load(training.state())
        loaded = time.monotonic()
        training.model(torch.ones(8, WIDTH)).square().mean().backward()
        training.optimizer.step()
        dist.barrier()
        times = {"began": began, "made": made, "loaded": loaded, "done": time.monotonic()}
        leave("steps", {**times, "step": found.step})
        if context.info.round == 0:
            _save_and_die(training, context)
    dist.destroy_process_group()


def _save_and_die(training: Training, context: elaunch.Context) -> None:
    context.checkpoint.save(training.state(), STEP, block=False)
    if dist.get_rank() == 1:
        leave("killed", {"at": time.monotonic()})
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


if __name__ == "__main__":
    main()
