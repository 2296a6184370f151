"""An unchanged script with gloo: ranks that meet in collectives, and one that does something else.

Arguments: what, the rank that does it, the step, the number of steps. It knows nothing of elaunch.
It ends early once the file is there that the variable STOP names.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

WHAT, WHO, WHEN, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOREVER = 600
STOP = os.environ.get("STOP")


class Samples(Dataset):
    """Some samples; the worker process that reads one of them never comes back."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            time.sleep(FOREVER)
        return torch.ones(4)


def stand() -> None:
    """Stand still, and leave a file that says so."""
    open(stands(RANK), "w").close()
    time.sleep(FOREVER)


def stands(rank: int) -> str:
    """Return the name of that file."""
    return f"stands-{os.environ.get('TORCHELASTIC_RUN_ID')}-{rank}"


def compute(seconds: float) -> None:
    """Use the processor."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def fault(step: int) -> None:
    """Do what only one rank does, in one step."""
    x = torch.zeros(4)  # ones would end the others, see STOP
    if WHAT == "before":
        stand()
    elif WHAT == "after":
        dist.all_reduce(x)
        stand()
    elif WHAT == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif WHAT == "inside":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {os.getpid()}"])
    elif WHAT == "collective":
        dist.broadcast(x, WHO)
    elif WHAT == "size":
        dist.all_reduce(torch.zeros(8))
    elif WHAT == "type":
        dist.all_reduce(torch.zeros(4, dtype=torch.float64))
    elif WHAT == "order":
        dist.all_reduce(x, group=halves[RANK // 2])
        dist.all_reduce(x)
    elif WHAT in ("gil", "awaited"):
        ctypes.PyDLL(None).sleep(FOREVER)
    elif WHAT == "loader":
        for _ in DataLoader(Samples(), batch_size=2, num_workers=1):
            pass
    elif WHAT == "receives":
        dist.recv(x, (WHO + 1) % SIZE)
    elif WHAT == "ends":
        os._exit(0)
    elif WHAT == "segfault":
        ctypes.string_at(0)
    elif WHAT in ("oom", "alone"):
        while WHAT == "alone" and not all(
            os.path.exists(stands(k)) for k in range(SIZE) if k != WHO
        ):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    elif WHAT == "allocates":
        taken = [bytearray(b"x") * (64 << 20) for _ in range(1000)]
        raise AssertionError(f"{len(taken)} times 64 MiB were to be had")
    elif WHAT == "raises":
        raise ValueError("boom")
    elif WHAT == "busy":
        compute(FOREVER)


def clean(step: int) -> None:
    """Do what a healthy script does now and then."""
    if WHAT == "eval" and step % WHEN == 0 and RANK == WHO:
        compute(8)
    elif WHAT == "save" and step % WHEN == 0 and RANK == WHO:
        with open("checkpoint.bin", "wb") as file:
            for _ in range(80):
                file.write(bytes(1 << 20))
                file.flush()
                time.sleep(0.1)
    elif WHAT == "alone" and step == WHEN and RANK != WHO:
        stand()
    elif WHAT == "inside" and step == WHEN and RANK != WHO:
        time.sleep(2)  # it is stopped in the collective
    elif WHAT == "uneven" and RANK == WHO:
        compute(0.05)
    elif WHAT == "awaited" and step == WHEN and RANK == (WHO + 1) % SIZE:
        dist.irecv(torch.ones(4), WHO).wait()
    elif WHAT == "first" and step == 0:
        compute(8)
    elif WHAT == "slow" and RANK == WHO:
        time.sleep(WHEN / 1000)
    elif WHAT == "loads":
        for _ in DataLoader(torch.ones(8, 4), batch_size=4, num_workers=1 if step == WHEN else 0):
            pass


dist.init_process_group("gloo")
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])] if SIZE == 4 else []
model = torch.nn.Linear(4, 4)
if WHAT.startswith("ddp"):
    model = torch.nn.parallel.DistributedDataParallel(model)
elif WHAT.startswith("fsdp"):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
elif WHAT.startswith("compile"):
    model = torch.compile(model, backend="inductor" if WHAT == "compile-clean" else "aot_eager")
for step in range(STEPS):
    mine = RANK == WHO and step == WHEN
    if WHAT in ("ddp", "fsdp", "compile"):
        if mine:
            stand()
        model(torch.ones(2, 4)).sum().backward()
        if WHAT == "compile":
            dist.all_reduce(torch.ones(4))
    elif WHAT == "groups":
        if mine:
            stand()
        dist.all_reduce(torch.ones(4), group=halves[RANK // 2])
        dist.all_reduce(torch.ones(4))
    else:
        if mine:
            fault(step)
        clean(step)
        if WHAT in ("ddp-clean", "fsdp-clean", "compile-clean"):
            # Another shape is compiled anew, on one rank.
            model(torch.ones(3 if mine else 2, 4)).sum().backward()
        if WHAT == "order" and step == WHEN and not mine:
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4), group=halves[RANK // 2])
        asked = torch.full((4,), float(STOP is not None and os.path.exists(STOP)))
        dist.all_reduce(asked)
        if asked.any():
            break
        if WHAT == "uneven" and step % 5 == 0 and halves:
            dist.all_reduce(torch.ones(2), group=halves[RANK // 2])
    time.sleep(0.01)
print(f"done {RANK}", flush=True)
dist.destroy_process_group()
