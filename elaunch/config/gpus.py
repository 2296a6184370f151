"""How many NVIDIA GPUs a job would see, without torch: for remarks and errors before the start.

The driver's own list, or the device files where a container hides it; then CUDA_VISIBLE_DEVICES.
``--nproc-per-node gpu`` counts by torch instead, in a process of its own (elaunch.server.devices).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from elaunch import env


def visible(environ: Mapping[str, str]) -> int:
    """Return how many GPUs workers would see; 0 where there is none or no driver."""
    there = installed()
    named = environ.get(env.VISIBLE_DEVICES)
    return there if named is None else min(there, len(env.named_devices(named)))


def installed() -> int:
    """Return how many GPUs the NVIDIA driver shows to this process."""
    try:
        listed = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:  # no driver, or a container that hides this directory
        listed = 0
    return listed or sum(
        name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia")
    )
