"""Train in steps of about 50 ms with a save every 20, for ever; resume from the newest save.

Each step sleeps 50 ms and reduces a gradient. Rank 0 saves by temporary file and rename, and
appends ``<time.monotonic()> <step>`` to ``$BENCH_DIR/progress.<round>`` after each step. Each rank
stamps ``worker`` before its first step. The checkpoint comes from ``ELAUNCH_RESUME_FROM`` where
that names one, else from the script's own search, as scripts do under torchrun.

Arguments: the directory of the checkpoints; seconds that a worker takes to set up, if any.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from stamp import directory, rank, round_number, stamp

STEP_SECONDS = 0.05
SAVE_EVERY = 20
KEEP = 3
WEIGHTS = 250_000


def saves(root: Path) -> list[Path]:
    """Return the complete checkpoints under ``root``, oldest first."""
    return sorted(root.glob("step_*.pt"))


def load(root: Path) -> tuple[int, torch.Tensor]:
    """Return step and weights of the checkpoint to resume from, or those of a fresh start."""
    chosen = os.environ.get("ELAUNCH_RESUME_FROM") or str(next(reversed(saves(root)), ""))
    if not chosen:
        return 0, torch.zeros(WEIGHTS)
    state = torch.load(chosen, weights_only=True)
    return state["step"], state["weights"]


def save(root: Path, step: int, weights: torch.Tensor) -> None:
    """Write one checkpoint under its final name at once, and drop the oldest."""
    temporary = root / f".step_{step:08d}.tmp"
    torch.save({"step": step, "weights": weights}, temporary)
    temporary.rename(root / f"step_{step:08d}.pt")
    for old in saves(root)[:-KEEP]:
        old.unlink()


def main() -> None:
    """Run one worker until it is stopped."""
    root = Path(sys.argv[1])
    time.sleep(float(sys.argv[2]) if sys.argv[2:] else 0.0)
    dist.init_process_group("gloo")
    step, weights = load(root)
    stamp("worker")
    with (directory() / f"progress.{round_number()}").open("a", buffering=1) as progress:
        while True:
            time.sleep(STEP_SECONDS)
            gradient = torch.ones(1000)
            dist.all_reduce(gradient)
            weights[:1000] += gradient
            step += 1
            if rank() != 0:
                continue
            progress.write(f"{time.monotonic():.6f} {step}\n")
            if step % SAVE_EVERY == 0:
                save(root, step, weights)


if __name__ == "__main__":
    main()
