"""In round 0 rank 1 exits 7 while the others wait in a collective; every later round ends well.

With the argument ``raise`` rank 1 raises an exception instead. Stamps: ``started`` in the first
line, ``joined`` after the first all-reduce, ``exit`` just before ``os._exit(7)`` or ``raise``.
"""

from __future__ import annotations

import os
import sys
import time

from stamp import prepare, rank, round_number, stamp, write

SETTLE = 0.5


def main() -> None:
    """Run one worker."""
    stamp("started")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    stamp("joined")
    if round_number() == 0 and rank() == 1:
        descriptor = prepare("exit")
        time.sleep(SETTLE)
        write(descriptor)
        if sys.argv[1:] == ["raise"]:
            raise RuntimeError("the loss is not a number")
        os._exit(7)
    dist.all_reduce(tensor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
