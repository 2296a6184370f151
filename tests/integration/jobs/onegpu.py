"""Ranks that share one GPU by NCCL; ``python onegpu.py WHAT``, in the first round only.

NCCL refuses two ranks on one GPU, unless it takes them for ranks of two hosts.
"""

import os
import signal
import sys
import time

os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
os.environ["NCCL_P2P_DISABLE"] = os.environ["NCCL_SHM_DISABLE"] = "1"

import torch
import torch.distributed as dist

WHAT = sys.argv[1] if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "nothing"
RANK, FOR_EVER = int(os.environ["RANK"]), 10**6


def is_open(path: str) -> bool:
    """Whether the server, this process's parent, has a file open whose name begins so."""
    links = (f"/proc/{os.getppid()}/fd/{name}" for name in os.listdir(f"/proc/{os.getppid()}/fd"))
    return any(os.readlink(link).startswith(path) for link in links)


def reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum up over all ranks, and wait for that."""
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()


torch.cuda.set_device(0)
dist.init_process_group("nccl")
if WHAT == "first" and RANK == 1:
    time.sleep(FOR_EVER)
x = torch.ones(4, device="cuda")
for _ in range(5):
    reduce(x)
print("opened" if is_open("/dev/nvidia") else "not opened", flush=True)
if sys.argv[1] == "full":  # in the next round, too
    all_of_it = torch.cuda.get_device_properties(0).total_memory
    kept = torch.empty(all_of_it * 2 // 5, dtype=torch.uint8, device="cuda")
if RANK == 1:
    if WHAT in ("exit", "full"):
        os._exit(7)
    elif WHAT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif WHAT == "raise":
        raise ValueError("no more data")
    elif WHAT == "absent":
        time.sleep(FOR_EVER)
    elif WHAT == "size":
        reduce(torch.ones(1 << 20, device="cuda"))
    elif WHAT == "name":
        dist.all_gather_into_tensor(torch.empty(8, device="cuda"), x)
if WHAT == "order":
    group = dist.new_group([0, 1])
    reduce(x, group)
    for one in (group, None) if RANK else (None, group):
        reduce(x, one)
elif WHAT == "late":
    for _ in range(400):
        time.sleep(0.02 * RANK)
        reduce(x)
elif WHAT == "memory":
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
elif WHAT == "index":
    print(x[torch.tensor([99], device="cuda")])
reduce(x)
print("ended", flush=True)
dist.destroy_process_group()
