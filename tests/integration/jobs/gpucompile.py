"""A compiled function on a GPU; the first round fails after it."""

import os

import torch

compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda())
compiled(torch.ones(8, 64, device="cuda")).sum().backward()
torch.cuda.synchronize()
print("compiled", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import time

    time.sleep(8.0)  # the server imports what compiling takes
    os._exit(3)
