"""The limit on open files: the agent needs several for each worker, and workers must not see that.

While a round starts the agent holds four ends of pipes and two log files for each worker. It raises
its own soft limit to the hard one; the server gives each worker the limits that elaunch was started
with.
"""

from __future__ import annotations

import contextlib
import os
import resource

from elaunch.errors import UsageError

PER_WORKER = 6
RESERVE = 64


def open_standard_files() -> None:
    """Open what the parent closed, so that no pipe of ours gets to be a worker's stdin."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def raise_limit() -> tuple[int, int]:
    """Raise this process' soft limit to the hard limit; return both as they were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a hard limit above what the kernel takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def check(nproc: int) -> None:
    """Raise UsageError where ``nproc`` workers need more open files than the hard limit allows."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = PER_WORKER * nproc + RESERVE
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"--nproc-per-node {nproc}: elaunch needs {needed} open files for that, and the hard "
            f"limit is {limit}; raise it (ulimit -Hn {needed}) or start fewer workers"
        )
