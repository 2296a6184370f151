"""Save aside, die at once, and load again in the next round: from memory, and with DCP from disk.

Arguments: megabytes of state, a directory. Round 0 saves step 7 with ``save(block=False)``, and
rank 1 kills itself as soon as the call has returned. Round 1 loads; ``$BENCH_DIR/loads.1.<rank>``
has the step that was found, and the seconds that the two ways of loading took, each into a
training that has just been made. The files are in the page cache: they are read once before. Both
ways are imported before, and ``latest()`` was asked for, as a script does to see where to begin.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_state import Training
from stamp import leave
from torch.distributed.checkpoint.state_dict import set_state_dict

import elaunch
import elaunch.training.checkpoint.load  # as torch.distributed.checkpoint, above

STEP = 7


def main() -> None:
    """Run one worker."""
    megabytes = int(sys.argv[1])
    dist.init_process_group("cpu:gloo")
    with elaunch.init(announce=False) as context:
        training = Training(megabytes)
        context.checkpoint.latest()
        if context.info.round == 0:
            _save_and_die(training, context)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.zero_()
        dist.barrier()
        begin = time.monotonic()
        found = context.checkpoint.load(training.state())
        loaded = time.monotonic() - begin
        equal = _equal(training, Training(megabytes))
        resumed = context.info.resume_from
        disk = _load_with_dcp(Training(megabytes), resumed) if resumed else None
        leave("loads", {"step": found.step, "memory": loaded, "disk": disk, "equal": equal})
    dist.destroy_process_group()


def _save_and_die(training: Training, context: elaunch.Context) -> None:
    context.checkpoint.save(training.state(), STEP, block=False)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _load_with_dcp(training: Training, path: Path | str) -> float:
    for file in Path(path).iterdir():
        with file.open("rb") as read:  # the agents have written past the page cache
            while read.read(1 << 23):
                pass
    dist.barrier()
    begin = time.monotonic()
    state = training.state_dicts()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return time.monotonic() - begin


def _equal(one: Training, other: Training) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


if __name__ == "__main__":
    main()
