"""The machine's memory: OOM kills of this process's cgroup, and how much is free.

The kernel counts, for each memory cgroup, the processes that it has killed for memory: cgroup v1 in
``memory.oom_control``, v2 in ``memory.events``, both as ``oom_kill``. The agent and its workers are
in one cgroup, so a count that grew during a round says that one of its processes was a victim.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from elaunch import proc

log = logging.getLogger("elaunch")


def oom_kill_count(proc_dir: Path = Path("/proc/self")) -> int | None:
    """Return how many processes of this process's memory cgroup the kernel has killed for memory.

    Knows cgroup v1 and v2. None where there is no such count. Compare two readings: a count that
    grew during a round says that one of its processes was a victim.
    """
    try:
        events = _events_file(proc_dir)
        lines = events.read_text().splitlines() if events else []
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None


def available(proc_dir: Path = Path("/proc/self"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes this process's cgroup can still take without pushing anybody out.

    The smaller of what the machine has available and what is left of the cgroup's own limit, in
    which the file cache that can be dropped does not count. Raises OSError if neither is known.
    """
    lines = meminfo.read_text(errors="replace").splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    try:
        events = _events_file(proc_dir)
        if events is not None:
            found.append(_left_of_limit(events.parent))
    except (OSError, ValueError, IndexError):
        log.debug("the limit of this cgroup's memory cannot be read", exc_info=True)
    if not found:
        raise OSError(f"{meminfo} has no MemAvailable")
    return max(0, min(found))


def _left_of_limit(group: Path) -> int:
    """Return what a cgroup may still take; raises ValueError where it has no limit."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not (group / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, used = int((group / names[0]).read_text()), int((group / names[1]).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return limit - used + int(stat.get(names[2], 0))


def shm_free(path: str = "/dev/shm") -> int | None:
    """Return the free space of shared memory in bytes, or None if there is none."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _events_file(proc_dir: Path) -> Path | None:
    """Find the file with the count."""
    return proc.cgroup_file("memory", "memory.oom_control", "memory.events", proc_dir)
