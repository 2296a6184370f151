"""One rank under ``elaunch wrap``: elaunch's own collectives; with ``torch`` its group, too.

``exit=RANK:CODE`` ends a rank so; ``wait`` says "up" and waits for SIGTERM, and then says "saved".
"""

import os
import signal
import sys
import threading

from elaunch import DistributedContext, info
from elaunch.training.launch import current

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


def reduced(rank: int) -> int:
    """Return the sum that torch's process group has of ``rank + 1``."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


context = DistributedContext.of(current(os.environ))
total = reduced(context.rank) if "torch" in words else None
ranks = context.allgather(context.rank)
total = sum(rank + 1 for rank in ranks) if total is None else total
nodes = context.allgather_local(context.cross_rank)
place = info()
say(
    f"rank={context.rank} local={os.environ['LOCAL_RANK']} sum={total} ranks={ranks} "
    f"nodes={nodes} launcher={place.launcher} node={place.node_rank}/{place.nodes}"
)
context.barrier()
context.close()
rank, _, code = words.get("exit", "-1:0").partition(":")
if context.rank == int(rank):
    sys.exit(int(code))
