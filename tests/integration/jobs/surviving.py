"""A training by ``ctx.train.steps`` whose ranks die; each process notes each step it has applied.

It appends ``<step> <loss> <digest of the weights>`` to ``applied-<rank>-<pid>`` in the directory
``BESIDE``. Arguments, as ``name=value``: ``until``, ``every`` (of saves), ``ms`` (that a step
takes), ``setup`` (seconds before the loop), ``workers`` (of the loader); ``raise=STEP`` has rank 2
raise there in round 0, ``dies=STEP`` has it die once it has applied that, and ``first=STEP`` has
rank 0, which then reports metrics of validation, too: before the loop, and in every 5th step;
``torn=STEP`` has rank 3 die there when rank 0 alone has heard what it has for all, and ``admits``
in the step of round 1 behind which a newcomer is to be admitted; ``break=STEP`` leaves the loop
behind it; ``bad=STEP.LEAF`` has a loss that is not finite and is left out; ``call`` has all make a
call of all ranks before the loop, ``loops`` train a second time; ``fails=ROUND`` has who is new in
that round end with code 5 before the loop.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import elaunch
from elaunch.training.steps.group import Group

given = dict(word.partition("=")[::2] for word in sys.argv[1:])
beside = Path(os.environ["BESIDE"])
born = int(os.environ["RANK"])


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise, as an augmentation draws it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sample with its target."""
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(8) + numpy.random.random()
        return x + 0.01 * noise, x.sum(0, keepdim=True).sin()


def tell_one_and_die(group: Group, content: bytes) -> list[bytes]:
    """Die in the middle of an allgather: rank 0 gets all that it needs, the others do not.

    With ``admits`` it goes on as ever where rank 0 has not seen a newcomer.
    """
    whole = torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)
    lengths = {rank: torch.tensor([0]) for rank in group.others}
    messages = [group.receive(lengths[rank], rank, 0) for rank in group.others]
    messages += [group.send(torch.tensor([len(whole)]), rank, 0) for rank in group.others]
    for message in messages:
        message.wait()
    found = {n: torch.empty(int(length), dtype=torch.uint8) for n, length in lengths.items()}
    sent = group.send(whole, 0, 0)
    group.receive(found[0], 0, 0).wait()
    sent.wait()
    if "admits" in given and found[0].numpy().tobytes().endswith(b" []]\0"):
        others = [rank for rank in group.others if rank]
        messages = [group.receive(found[rank], rank, 0) for rank in others]
        messages += [group.send(whole, rank, 0) for rank in others]
        for message in messages:
            message.wait()
        found[group.rank] = whole
        return [found[rank].numpy().tobytes()[:-1] for rank in range(group.size)]
    time.sleep(0.3)  # it is to be read before this process is gone
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def digest(model: nn.Module) -> str:
    """Return a digest of the weights."""
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return hashlib.sha256(weights).hexdigest()[:16]


def train(ctx: elaunch.Context, model: nn.Module, number: int) -> None:
    """Train; note each step, and the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    every: Any = given.get("every")
    loop = ctx.train.steps(
        {"model": model, "optimizer": optimizer, "schedule": schedule},
        Noisy(),
        global_batch=12,
        micro_batch=1,
        until=int(given.get("until", "30")),
        last="short",
        on_bad_batch="skip",
        save_every=every if every == "auto" or every is None else int(every),
        loader={"num_workers": int(given.get("workers", "0"))},
    )
    with (beside / f"applied-{born}-{os.getpid()}").open("a", buffering=1) as applied:
        for step in loop:
            is_torn = given.get("torn") == str(step.number) and not ctx.info.round
            if born == 3 and (is_torn or ("admits" in given and ctx.info.round == 1)):
                Group.allgather = tell_one_and_die  # type: ignore[method-assign]
            for x, y in step.micro_batches():
                loss = (model(x) - y).square().mean()
                if given.get("raise") == str(step.number) and born == 2 and not ctx.info.round:
                    raise ValueError("these samples")
                if given.get("bad") == f"{step.number}.{step.leaf}":
                    loss = loss * torch.nan
                step.backward(loss)
            step.apply(optimizer, clip=0.5)
            schedule.step()
            done = step.number + number * int(given.get("until", "30"))
            print(f"{done} {step.loss!r} {digest(model)}", file=applied)
            if "first" in given and not (ctx.distributed.rank or step.number % 5):
                ctx.train.report_validation_metrics(step.number, {"right": 0.5})
                ctx.train.flush()
            dies = given.get({0: "first", 2: "dies"}.get(born, ""))
            if dies == str(step.number) and not ctx.info.round:
                os.kill(os.getpid(), signal.SIGKILL)
            if given.get("break") == str(step.number):
                return
            time.sleep(float(given.get("ms", "0")) / 1000)
    if not loop.preempted:
        assert ctx.distributed.size == int(os.environ["WORLD_SIZE"]), "all are back"
        assert ctx.distributed.rank == int(os.environ["RANK"])
        print(f"rank {born} loop {number} ends after {loop.done} {digest(model)}", flush=True)


def main() -> None:
    """Run one rank."""
    with elaunch.init(announce=False) as ctx:
        time.sleep(float(given.get("setup", "0")) if ctx.info.round else 0.0)
        if given.get("fails") == str(ctx.info.round) and "ELAUNCH_PRESENT" in os.environ:
            sys.exit(5)
        if "call" in given:
            ctx.distributed.barrier()
        if "first" in given and ctx.distributed.rank == 0:
            ctx.train.report_validation_metrics(0, {"right": 0.1})
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1))
        for number in range(2 if "loops" in given else 1):
            train(ctx, model, number)
        ctx.distributed.barrier()


main()
