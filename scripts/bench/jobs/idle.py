"""Join a gloo group, reduce once, stamp ``ready``, then sleep until stopped."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from stamp import stamp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    stamp("ready")
    time.sleep(3600)
