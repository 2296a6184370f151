"""Facts about the machine, the software on it, and how busy it is."""

from __future__ import annotations

import os
import platform
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "elaunch", "numpy", "click")
BUSY_WINDOW = 0.5


def facts() -> dict[str, Any]:
    """Return what a reader needs to compare the figures with others."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _after_colon("/proc/cpuinfo", "model name"),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": _after_colon("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def load() -> dict[str, Any]:
    """Return the load averages and the share of all CPUs that is in use right now, in percent."""
    idle, total = _cpu_ticks()
    time.sleep(BUSY_WINDOW)
    idle_after, total_after = _cpu_ticks()
    busy = 1 - (idle_after - idle) / max(1, total_after - total)
    return {"loadavg": os.getloadavg(), "busy_percent": round(busy * 100, 1)}


def _cpu_ticks() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def _after_colon(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
