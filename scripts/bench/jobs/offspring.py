"""Like ``idle.py``, but first start a child and a daemon that outlive a polite end.

The daemon is in a session of its own, has no living parent, and ignores SIGTERM and SIGHUP.
"""

from __future__ import annotations

import subprocess
import time

import torch
import torch.distributed as dist
from stamp import stamp


def main() -> None:
    """Run one worker."""
    subprocess.Popen(["sleep", "3600"])
    subprocess.run(["sh", "-c", "trap '' TERM HUP; setsid sleep 3600 &"], check=True)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    stamp("ready")
    time.sleep(3600)


if __name__ == "__main__":
    main()
