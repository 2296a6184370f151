"""Train the same model by DDP and by ``ctx.train.steps``, and leave what each step took.

Arguments: ``both``, in turns of some steps, or ``ddp`` or ``steps`` alone, for the memory; how many
turns. DDP accumulates its micro-batches under ``no_sync`` and reads by a ``DistributedSampler``.
Each step has 12 micro-batches of 32 samples, of all ranks together; the model has 50 MB.

``$BENCH_DIR/steps.<round>.<rank>`` has for each way the seconds of its steps, and the most memory
that the process has had, in bytes, beyond what it had before the first step.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from stamp import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elaunch

LEAVES, MICRO, IN_A_TURN = 12, 32, 2
STEP = LEAVES * MICRO
DATA = TensorDataset(torch.randn(4 * STEP, 512), torch.randn(4 * STEP, 768))


def build() -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 4096), nn.ReLU())
    return nn.Sequential(wide, nn.Linear(4096, 768))


def ddp_steps() -> Generator[None, None, None]:
    """Make a step of DDP each time."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(DATA)
    own = LEAVES // dist.get_world_size()
    epoch = 0
    batches = iter(DataLoader(DATA, MICRO, sampler=sampler))
    while True:
        optimizer.zero_grad()
        for number in range(own):
            batch = next(batches, None)
            if batch is None:
                epoch += 1
                sampler.set_epoch(epoch)
                batches = iter(DataLoader(DATA, MICRO, sampler=sampler))
                batch = next(batches)
            x, y = batch
            last = number == own - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (nn.functional.mse_loss(model(x), y) / own).backward()
        optimizer.step()
        yield


def own_steps(ctx: elaunch.Context) -> Generator[None, None, None]:
    """Make a step of ``ctx.train.steps`` each time."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    loop = ctx.train.steps(state, DATA, global_batch=STEP, micro_batch=MICRO, save_every=None)
    for step in loop:
        for x, y in step.micro_batches():
            step.backward(nn.functional.mse_loss(model(x), y))
        step.apply(optimizer)
        yield


def main() -> None:
    """Run one worker."""
    mode, turns = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    with elaunch.init(announce=False) as ctx:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        torch.set_num_threads(1)
        ways: dict[str, Callable[[], Generator[None, None, None]]] = {
            "ddp": ddp_steps,
            "steps": lambda: own_steps(ctx),
        }
        running = {name: way() for name, way in ways.items() if mode in (name, "both")}
        took: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(turns):
            for name, steps in running.items():
                for _ in range(IN_A_TURN):
                    dist.barrier()
                    begin = time.perf_counter()
                    next(steps)
                    dist.barrier()
                    took[name].append(time.perf_counter() - begin)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        leave("steps", {**took, "memory": (most - before) * 1024})
        for steps in running.values():
            steps.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
