"""What /proc tells about the processes of a job.

A process belongs to a job when its environment names the job's directory, or it works in it, or one
of its ancestors belongs. (A process title can overwrite what ``/proc/PID/environ`` shows, hence the
second sign.) Zombies do not count: they have ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_SCHED_CLOCK = 2  # the kernel's name for a process's clock of nanoseconds on a CPU


def job_pids(directory: Path) -> set[int]:
    """Return the living processes of the job, or of all jobs, with ``directory``."""
    parents = _parents()
    members = {pid for pid in parents if _is_marked(pid, str(directory))}
    while True:
        more = {pid for pid, parent in parents.items() if parent in members} - members
        if not more:
            return members
        members |= more


def _parents() -> dict[int, int]:
    found = {}
    for name in os.listdir(PROC):
        if not name.isdigit():
            continue
        with contextlib.suppress(*_GONE):
            state, parent = (PROC / name / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(name)] = int(parent)
    return found


def _is_marked(pid: int, directory: str) -> bool:
    with contextlib.suppress(*_GONE):
        if directory.encode() in (PROC / str(pid) / "environ").read_bytes():
            return True
        where = os.readlink(PROC / str(pid) / "cwd")
        return where == directory or where.startswith(directory + "/")
    return False


def pss_mb(pid: int) -> float:
    """Return the proportional set size in MB; 0 for a process that has ended."""
    return _kilobytes(pid, "smaps_rollup", "Pss:")


def rss_mb(pid: int) -> float:
    """Return the resident set size in MB; 0 for a process that has ended."""
    return _kilobytes(pid, "status", "VmRSS:")


def _kilobytes(pid: int, file: str, key: str) -> float:
    with contextlib.suppress(*_GONE):
        for line in (PROC / str(pid) / file).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond.

    ``utime`` and ``stime`` of ``/proc/PID/stat`` count in hundredths of a second, too coarse for an
    agent that does nothing.

    Raises:
        OSError: the process has ended.
    """
    return time.clock_gettime((~pid << 3) | _SCHED_CLOCK)


def title(pid: int) -> str:
    """Return the command line as ``ps`` shows it; empty for a process that has ended."""
    with contextlib.suppress(*_GONE):
        raw = (PROC / str(pid) / "cmdline").read_bytes()
        return raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


@contextlib.contextmanager
def watched(pids: set[int]) -> Iterator[dict[int, int]]:
    """Open a descriptor for each process, ``{descriptor: pid}``, and close them at the end.

    Opened before a process is killed, a descriptor cannot mean another process later.
    """
    descriptors: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptors[os.pidfd_open(pid)] = pid
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def wait_ended(descriptors: Mapping[int, int], deadline: float) -> set[int]:
    """Wait until all watched processes ended or ``deadline`` (monotonic); return those left."""
    poll = select.poll()
    left = dict(descriptors)
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left and (remaining := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(remaining * 1000):
            poll.unregister(descriptor)
            del left[descriptor]
    return set(left.values())


def kill_job(directory: Path, timeout: float) -> None:
    """SIGKILL the processes of the job with ``directory`` until none is left, or ``timeout`` s."""
    deadline = time.monotonic() + timeout
    while (left := job_pids(directory)) and time.monotonic() < deadline:
        with watched(left) as descriptors:
            for descriptor in descriptors:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            wait_ended(descriptors, deadline)


def free_port(host: str) -> int:
    """Return a port of ``host`` that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
