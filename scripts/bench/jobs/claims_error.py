"""Rank 1 raises ``ValueError``; the other ranks wait for it in a collective."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def main() -> None:
    """Run one worker."""
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        raise ValueError("no label 17")
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
