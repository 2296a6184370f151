"""A job that saves by ``every="auto"``; rank 1 is killed right after its second save of round 0.

Its next round ends with its first save. Steps are slow until a save was made: what it chooses then
has passed soon.
"""

from __future__ import annotations

import itertools
import os
import signal
import time

import torch
import torch.distributed as dist

import elaunch

dist.init_process_group("gloo")
with elaunch.init(announce=False) as ctx:
    state = {"weights": torch.zeros(1000), "step": 0}
    found = ctx.checkpoint.load(state)
    begin, saved = found.step, 0
    assert state["step"] == begin and state["weights"].eq(begin).all()
    print(f"rank {ctx.info.rank} begins at {begin}", flush=True)
    for step in itertools.count(begin + 1):
        time.sleep(0 if saved else 0.02)
        state["step"], state["weights"] = step, state["weights"] + 1
        handle = ctx.checkpoint.save(state, step, every="auto", keep=elaunch.Keep(last=2))
        if handle.skipped:
            continue
        saved += 1
        if saved == 2:
            print(f"rank {ctx.info.rank} saved {step}", flush=True)
            if ctx.info.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        if ctx.info.round == 1:
            break
    print(f"rank {ctx.info.rank} ends after {step - begin}", flush=True)
dist.destroy_process_group()
