"""Stamp ``started``, join a gloo group, reduce once, stamp ``joined``, end."""

from __future__ import annotations

from stamp import stamp


def main() -> None:
    """Run one worker."""
    stamp("started")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    stamp("joined")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
