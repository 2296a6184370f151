"""Make one compiled training step; in round 0 rank 1 exits 7 a while later, the others wait for it.

Argument: the seconds of that while. Stamps: ``started`` in the first line, ``stepped`` after the
first step, ``exit`` just before ``os._exit(7)``.
"""

from __future__ import annotations

import os
import sys
import time

from stamp import prepare, rank, round_number, stamp, write

WIDTH, LAYERS = 256, 2


def main() -> None:
    """Run one worker."""
    stamp("started")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.compile(model)(torch.ones(2, 16, WIDTH)).square().mean().backward()
    optimizer.step()
    dist.barrier()
    stamp("stepped")
    if round_number() == 0 and rank() == 1:
        descriptor = prepare("exit")
        time.sleep(float(sys.argv[1]))
        write(descriptor)
        os._exit(7)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
