"""What the machine knows of memory: OOM kills of this process's cgroup, free shared memory.

The kernel counts, for each memory cgroup, the processes that it has killed for memory: cgroup v1 in
``memory.oom_control``, v2 in ``memory.events``, both as ``oom_kill``. The agent and its workers are
in one cgroup, so a count that grew during a round says that one of its processes was a victim.
"""

from __future__ import annotations

import os
from pathlib import Path


def oom_kill_count(proc: Path = Path("/proc/self")) -> int | None:
    """Return how many processes of this process's memory cgroup the kernel has killed for memory.

    Knows cgroup v1 and v2. None where there is no such count. Compare two readings: a count that
    grew during a round says that one of its processes was a victim.
    """
    try:
        groups = (proc / "cgroup").read_text(errors="replace")
        mounts = (proc / "mountinfo").read_text(errors="replace")
        events = _events_file(groups, mounts)
        lines = events.read_text().splitlines() if events else []
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None


def shm_free(path: str = "/dev/shm") -> int | None:
    """Return the free space of shared memory in bytes, or None if there is none."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _events_file(groups: str, mounts: str) -> Path | None:
    """Find the file with the count from /proc/<pid>/cgroup and /proc/<pid>/mountinfo."""
    paths = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    if "memory" in paths:
        return _in_mount(paths["memory"], mounts, "cgroup", "memory", "memory.oom_control")
    if "" in paths:
        return _in_mount(paths[""], mounts, "cgroup2", "", "memory.events")
    return None


def _in_mount(path: str, mounts: str, kind: str, option: str, file: str) -> Path | None:
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        found, _, options = after.split(" ", 2)
        if found != kind or (option and option not in options.split(" ")[-1].split(",")):
            continue
        # Without a cgroup namespace the path counts from the host's root, of which the container
        # sees only the part that is mounted.
        inside = path.removeprefix(root) if root != "/" else path
        return Path(point.replace("\\040", " ")) / inside.strip("/") / file
    return None
