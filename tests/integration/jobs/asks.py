"""Train nothing with elaunch's context, and ask should_preempt() after each step.

Arguments: ``DIR``, then any of these words:

=============  ==================================================================================
steps=N        how many (without end)
time=SECONDS   of one step (0.02)
skew=SECONDS   rank R sleeps R times this long in each step
only=R         only rank R asks, with a timeout of 3 s
patient        … or without a timeout of its own
deaf           nobody asks
late=N         nobody asks before step N
fail=N         rank 0 exits with 7 at step N after it was told
gloo           the ranks meet in each step, as in training
short=R        ranks from R on are done after 5 steps, and wait for nobody
left           print how many seconds are left, when they are told: ``left rank=R SECONDS``
loader         each step takes a number from a DataLoader with two workers
slow           the save begins (``saving``) and goes on until there is a file ``DIR/quick``
=============  ==================================================================================

Rank 0 saves ``DIR/step_<step>.json`` when all are told. Each rank writes the step at whose end it
was told into ``DIR/end.<round>.<rank>``. Prints ``up rank=R round=K pid=P from=S`` and ``done …``.
"""

import json
import os
import sys
import time
from pathlib import Path

import elaunch


def say(text):
    os.write(1, f"{text}\n".encode())


def gloo(ctx):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def meet():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == ctx.distributed.size, total

    return meet


class Numbers:
    def __len__(self):
        return 1 << 40

    def __getitem__(self, at):
        return at


def load():
    from torch.utils.data import DataLoader

    return iter(DataLoader(Numbers(), num_workers=2)).__next__


def save(directory, step, slow):
    if slow:
        say("saving")
        while not (directory / "quick").exists():
            time.sleep(0.01)
    path = directory / f"step_{step:06d}.json"
    path.with_suffix(".tmp").write_text(json.dumps({"step": step}))
    path.with_suffix(".tmp").rename(path)


def asked(ctx, given, step):
    if "deaf" in given or step < int(given.get("late", 0)):
        return False
    if "only" in given:
        mine = ctx.distributed.rank == int(given["only"])
        return mine and ctx.preempt.should_preempt(timeout=None if "patient" in given else 3.0)
    return ctx.preempt.should_preempt()


def main(directory, words):
    given = dict(word.partition("=")[::2] for word in words)
    seconds, skew = float(given.get("time", 0.02)), float(given.get("skew", 0))
    last = int(given.get("steps", 1 << 60))
    with elaunch.init(timeout=60) as ctx:
        rank, number = ctx.distributed.rank, ctx.info.round
        if rank >= int(given.get("short", 1 << 60)):
            last = 5
        latest = elaunch.latest_checkpoint()
        step = json.loads(latest.read_text())["step"] if latest else 0
        say(f"up rank={rank} round={number} pid={os.getpid()} from={step}")
        meet = gloo(ctx) if "gloo" in given else None
        if "loader" in given:
            ctx.preempt.should_preempt()
            take = load()
        first = step
        while step < last:
            step += 1
            time.sleep(seconds + rank * skew)
            if "loader" in given:
                take()
            if meet is not None:
                meet()
            if step == first + 3:
                say(f"steps rank={rank} round={number} world={ctx.distributed.size}")
            if asked(ctx, given, step):
                if "fail" in given and rank == 0:
                    sys.exit(7)
                if "left" in given:
                    say(f"left rank={rank} {ctx.preempt.deadline}")
                (directory / f"end.{number}.{rank}").write_text(str(step))
                if rank == 0:
                    save(directory, step, slow="slow" in given)
                if "short" not in given:
                    ctx.distributed.barrier()
                say(f"told rank={rank} round={number} step={step} {ctx.preempt.reason}")
                return
        say(f"done rank={rank} round={number} step={step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
