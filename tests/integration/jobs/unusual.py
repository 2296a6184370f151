"""An unchanged script with gloo, and faults of one rank that few think of.

Arguments: what, the rank that does it, the step, the number of steps. It knows nothing of elaunch.
"""

import atexit
import ctypes
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

WHAT, WHO, WHEN, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUND = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
NEXT, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
FOREVER = 600
TIMEOUTS = {"times-out": 6, "times-out-late": 13, "ring-times-out": 13}


def stand() -> None:
    """Stand still."""
    time.sleep(FOREVER)


def reduce(elements: int = 4) -> None:
    """Do what all ranks do in each step."""
    dist.all_reduce(torch.ones(elements))


# ── what the guilty rank does ────────────────────────────────────────────────────────────────────


def leave() -> None:
    """End with 0 while the others go on."""
    dist.destroy_process_group()
    sys.exit(0)


def spin() -> None:
    """Loop in Python for ever."""
    while True:
        pass


def read_fifo() -> None:
    """Open a named pipe into which nobody writes."""
    path = os.path.join(tempfile.mkdtemp(), "pipe")
    os.mkfifo(path)
    with open(path, "rb") as pipe:
        pipe.read()


def destroy() -> None:
    """Give up the process group, and stay."""
    dist.destroy_process_group()
    stand()


def raise_stuck() -> None:
    """Raise, with a thread that keeps the process from its end."""
    threading.Thread(target=stand).start()
    raise ValueError("boom")


def nest() -> None:
    """Run another job, in which a rank stands still."""
    inner = [__file__, "stand", "0", "3", "100"]
    subprocess.run([sys.executable, "-m", "elaunch", "run", "--nproc-per-node=2", *inner])


def wait_for_key() -> None:
    """Wait for a key of the store that nobody sets."""
    dist.distributed_c10d._get_default_store().wait(["never"], datetime.timedelta(hours=1))


def die_inside() -> None:
    """Be killed in a collective, while another rank evaluates."""
    subprocess.Popen(["sh", "-c", f"sleep 13; kill -KILL {os.getpid()}"])


def die_at_exit() -> None:
    """Raise, and crash in native code as the interpreter ends."""
    atexit.register(lambda: ctypes.string_at(0))
    raise ValueError("boom")


FAULTS: dict[str, Callable[[], object]] = {
    "leaves": leave,
    "spins": spin,
    "fifo": read_fifo,
    "destroys": destroy,
    "raises-stuck": raise_stuck,
    "nested": nest,
    "store": wait_for_key,
    "while-evaluating": die_inside,
    "splits": lambda: dist.all_to_all_single(torch.zeros(8), torch.ones(8), [5, 1, 1, 1], None),
    "root": lambda: dist.broadcast(torch.ones(4), WHO),
    "gather-root": lambda: dist.gather(torch.ones(4), [torch.ones(4)] * SIZE, dst=WHO),
    "extra-sum": lambda: reduce(),
    "skips": lambda: None,
    "swallows": lambda: None,
    "last-words": die_at_exit,
}


# ── what all ranks do in each step ───────────────────────────────────────────────────────────────


def send_around() -> None:
    """Send to the next rank and receive from the one before."""
    sent = dist.isend(torch.ones(4), NEXT)
    dist.recv(torch.ones(4), BEFORE)
    sent.wait()


def pipe(step: int, mine: bool) -> None:
    """Be a stage of a pipeline: nothing but sends and receives, after some collectives."""
    x = torch.ones(4)
    if step < 25:
        reduce()
        return
    if RANK > 0:
        dist.recv(x, RANK - 1)
    if mine:
        stand()
    if RANK < SIZE - 1:
        dist.send(x, RANK + 1)


def train(mine: bool) -> None:
    """Take a step of DistributedDataParallel."""

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("boom in backward")

    x = model(torch.ones(2, 4), mine and WHAT == "unused")
    if mine and WHAT == "backward":
        x.register_hook(fail)
    x.sum().backward()


def in_thread(act: Callable[[], object]) -> None:
    """Do it in another thread, for which the main one waits."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def monitored(mine: bool) -> None:
    """Meet in a barrier that names who is missing."""
    if mine:
        stand()
    seconds = {"monitored-times-out": 5}.get(WHAT, 600)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=seconds))


class TwoLayers(torch.nn.Module):
    """A model of which one layer may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, short: bool) -> torch.Tensor:
        """Return what the layers make of it."""
        return self.first(x) if short else self.second(self.first(x))


def before(step: int, mine: bool) -> None:
    """Do what comes before the step's all_reduce."""
    if WHAT == "half-barrier":
        if mine:
            stand()
        dist.barrier(group=halves[RANK // 2])
    elif WHAT in ("ring", "ring-clean", "ring-times-out"):
        if mine and WHAT != "ring-clean":
            stand()
        send_around()
    elif WHAT in ("unsent", "tags") and step == WHEN:
        if RANK == WHO and WHAT == "tags":
            dist.send(torch.ones(4), NEXT, tag=7)
        elif RANK == (WHO + 1) % SIZE:
            dist.recv(torch.ones(4), WHO, tag=8)
    elif WHAT in ("pipeline", "pipeline-clean"):
        pipe(step, mine and WHAT == "pipeline")
    elif WHAT in ("backward", "unused"):
        train(mine)
    elif WHAT in ("monitored", "monitored-times-out"):
        monitored(mine)
    elif WHAT in ("async", "async-clean"):
        if mine and WHAT == "async":
            stand()
        dist.all_reduce(torch.ones(4), async_op=True)
    elif WHAT in ("objects", "objects-clean"):
        if mine and WHAT == "objects":
            stand()
        dist.all_gather_object([None] * SIZE, {"rank": RANK, "text": "x" * RANK})
        dist.broadcast_object_list([step], 0)
    elif WHAT == "two" and step == WHEN and RANK in (WHO, (WHO + 1) % SIZE):
        stand()
    elif WHAT == "new-group" and step == WHEN:
        if mine:
            stand()
        dist.new_group(list(range(SIZE)))
    elif WHAT == "new-group-part" and step == WHEN and RANK != WHO:
        dist.new_group([rank for rank in range(SIZE) if rank != WHO])
    else:
        others(step, mine)


def others(step: int, mine: bool) -> None:
    """Do what needs another collective on the other ranks, or another moment."""
    if WHAT == "splits":
        if not mine:
            dist.all_to_all_single(torch.zeros(8), torch.ones(8))
    elif WHAT == "root":
        if not mine:
            dist.broadcast(torch.ones(4), (WHO + 2) % SIZE)
    elif WHAT == "gather-root":
        to = (WHO + 1) % SIZE
        if not mine:
            dist.gather(torch.ones(4), [torch.ones(4)] * SIZE if to == RANK else None, dst=to)
    elif WHAT == "while-evaluating" and step == WHEN and RANK == (WHO + 1) % SIZE:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
    elif WHAT == "second-round" and step == WHEN and RANK == (WHO + ROUND) % SIZE:
        if ROUND == 0:
            raise ValueError("boom")
        stand()
    elif WHAT == "absent" and step == 1 and ROUND < WHEN:
        raise ValueError("boom")
    elif WHAT in TIMEOUTS and mine:
        stand()
    elif WHAT == "all-raise" and step == WHEN:
        raise ValueError("boom")
    elif WHAT in ("halves-apart", "halves-clean"):
        if mine and WHAT == "halves-apart":
            stand()
        dist.all_reduce(torch.ones(4), group=halves[RANK // 2])
    elif WHAT == "mesh":
        if mine:
            stand()
        for name in ("dp", "tp"):
            dist.all_reduce(torch.ones(4), group=mesh.get_group(name))


APART = ("pipeline", "pipeline-clean", "halves-apart", "halves-clean")
"""Where there is nothing that all ranks do in each step."""


def main() -> None:
    """Train."""
    for step in range(STEPS):
        mine = RANK == WHO and step == WHEN
        if mine and WHAT in FAULTS:
            FAULTS[WHAT]()
        before(step, mine)
        if WHAT in ("stand", "eight") and mine:
            stand()
        if WHAT in ("thread", "thread-clean"):
            in_thread(stand if mine and WHAT == "thread" else reduce)
        elif WHAT not in APART and not (WHAT in ("skips", "swallows") and mine):
            reduce()
        if WHAT == "skips":
            dist.broadcast(torch.ones(2), 0)
        time.sleep(0.01)
    if WHAT == "extra-end" and RANK == WHO:
        reduce()


if WHAT == "absent" and (RANK, ROUND) == (WHO, WHEN):  # the rounds before that fail
    stand()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUTS.get(WHAT, 1800)))
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])] if SIZE == 4 else []
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if WHAT == "mesh" else None
model: torch.nn.Module = torch.nn.Module()
if WHAT in ("backward", "unused"):
    model = torch.nn.parallel.DistributedDataParallel(TwoLayers())
main()
print(f"done {RANK}", flush=True)
dist.destroy_process_group()
if WHAT == "exports" and RANK == WHO:
    time.sleep(10)
