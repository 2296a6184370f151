"""A state on a GPU that is saved in the background; the first round is killed after step 3."""

import os
import signal

import torch

import elaunch

state = {"w": torch.ones(1 << 22, device="cuda"), "step": 0}
with elaunch.init() as ctx:
    found = ctx.checkpoint.load(state)
    print("resumed", found.step, state["w"].device, flush=True)
    while state["step"] < 5:
        state["step"] += 1
        state["w"] += 1
        ctx.checkpoint.save(state, state["step"], block=False)
        state["w"] *= 1.0  # the copy is the state's as it was
        if state["step"] == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    print("ends", float(state["w"].min()), float(state["w"].max()), flush=True)
