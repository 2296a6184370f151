"""A rank that is a process: ``preemptworker.py coupled|free|silent``.

It says ``ready``, takes SIGUSR1 for a notice, works until should_preempt() is True, and says the
number of that call. ``coupled``: the ranks meet in every step, after rank × 50 ms of work;
``free``: they go at one pace, and began rank × 50 ms apart; ``silent``: only rank 0 asks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from elaunch.errors import CollectiveError
from elaunch.training.distributed import DistributedContext
from elaunch.training.launch import current
from elaunch.training.preempt.preempt import PreemptContext
from elaunch.wire.progress import ProgressPage

_LOCKED = ctypes.PyDLL(None)


def work(rank: int, step: int, seconds: float) -> None:
    """Be inside of C; some ranks keep Python's lock there, so that none of their threads run."""
    if (rank + step) % 3 == 0:
        _LOCKED.usleep(int(seconds * 1e6))
    else:
        time.sleep(seconds)


def main(way: str) -> None:
    """Work until it is time to end."""
    page = ProgressPage()
    distributed = DistributedContext.of(current(os.environ))
    distributed.open(page, 100.0)
    preempt = PreemptContext(distributed, page, None)
    preempt.start()
    preempt.on_signal(signal.SIGUSR1)
    rank = distributed.rank
    print("ready", flush=True)
    if way == "free":
        work(rank, 0, rank * 0.05)
    step = 0
    while way != "silent" or rank == 0:
        step += 1
        work(rank, step, rank * 0.05 if way == "coupled" else 0.005)
        if way == "coupled":
            distributed.barrier()
        if preempt.should_preempt(timeout=60.0 if way != "silent" else 3.0):
            break
    else:
        threading.Event().wait()
    print(step, preempt.reason, flush=True)
    preempt.close()
    distributed.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
