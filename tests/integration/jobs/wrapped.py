"""One rank under ``elaunch wrap``: torch's process group, then elaunch's own collectives.

``exit=RANK:CODE`` ends a rank so; ``wait`` says "up" and waits for SIGTERM, and then says "saved".
"""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

from elaunch import DistributedContext, info

words = dict(word.partition("=")[::2] for word in sys.argv[1:])


def say(text: str) -> None:
    """Print one whole line."""
    os.write(1, f"{text}\n".encode())


if "wait" in words:
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    say("up")
    while not told.wait(0.1):
        pass
    say("saved")
    sys.exit(0)

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
context = DistributedContext.from_environment()
ranks = context.allgather(context.rank)
nodes = context.allgather_local(context.cross_rank)
place = info()
say(
    f"rank={dist.get_rank()} local={os.environ['LOCAL_RANK']} sum={total.item()} ranks={ranks} "
    f"nodes={nodes} launcher={place.launcher} node={place.node_rank}/{place.nodes}"
)
context.barrier()
context.close()
dist.destroy_process_group()
rank, _, code = words.get("exit", "-1:0").partition(":")
if context.rank == int(rank):
    sys.exit(int(code))
