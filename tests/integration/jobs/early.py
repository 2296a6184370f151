"""Train for 60 steps of one all_reduce; one rank stops early on its way.

``early.py HOW BEFORE SHOWS``: rank 2 does HOW (``sleep``, ``spin`` or ``section``) before its
all_reduce number BEFORE, 0: before init_process_group. SHOWS is ``nothing``, ``steps`` (reported)
or ``lines`` (printed).
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist

import elaunch

how, before, shows = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])
context = contextlib.ExitStack()
elaunch_context = context.enter_context(elaunch.init()) if shows == "steps" else None


def stop(step: int) -> None:
    """Stop here, if it is the time and the rank."""
    if rank != 2 or step != before:
        return
    if how == "sleep":
        time.sleep(300)
    elif how == "section":
        assert elaunch_context is not None
        with elaunch_context.section("eval", timeout=100):
            time.sleep(15)
    until = time.monotonic() + 15
    while how == "spin" and time.monotonic() < until:
        pass


with context:
    stop(0)
    dist.init_process_group("gloo")
    for step in range(1, 61):
        stop(step)
        dist.all_reduce(torch.ones(4))
        if elaunch_context is not None:
            elaunch_context.train.report_training_metrics(step, {"loss": 1.0})
        if shows == "lines":
            print(f"step {step}", flush=True)
    dist.destroy_process_group()
