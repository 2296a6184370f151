"""A script that is tracked without a context: ``tracked.py [WORD …]``, words say how it goes on.

``fail:R`` raises on rank R, ``kill:R`` kills rank R, ``hold:R`` keeps rank R until the file
``release`` is in the run directory, all three in round 0 only; ``exit:N`` leaves with that code,
``interrupt`` as Ctrl-C does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elaunch.training.distributed import DistributedContext
from elaunch.training.launch import current
from elaunch.training.tracking import Tracking
from elaunch.training.train import TrainContext
from elaunch.wire.progress import ProgressPage


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    until = time.monotonic() + 100
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def act(words: list[str], rank: int, round: int, directory: Path) -> None:
    """Do what the words say for this rank."""
    for word, _, argument in (word.partition(":") for word in words):
        if word == "exit":
            sys.exit(int(argument))
        if word == "interrupt":
            raise KeyboardInterrupt
        if argument != str(rank) or round > 0:
            continue
        if word == "fail":
            raise ValueError("it went wrong")
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "hold":
            wait_for(directory / "release")


def main() -> None:
    """Report ten steps, shared between the ranks, and end as the words say."""
    distributed, page = DistributedContext.of(current(os.environ)), ProgressPage()
    distributed.open(page, 60)
    tracking = Tracking(distributed)
    tracking.start()
    placed = distributed.placement
    train = TrainContext(placed, page, tracking.directory)
    # In one write: without a buffer, print() would write the end of the line apart.
    sys.stdout.write(f"{placed.rank} of {placed.size} in {tracking.directory}\n")
    sys.stdout.flush()
    error: BaseException | None = None
    try:
        for step in range(1 + placed.rank, 11, placed.size):
            train.report_training_metrics(step, {"loss": 1 / step})
        train.flush()
        distributed.barrier()
        act(sys.argv[1:], placed.rank, placed.round, tracking.directory)
    except BaseException as problem:
        error = problem
        raise
    finally:
        train.close()
        distributed.close()
        tracking.end(error)


if __name__ == "__main__":
    main()
