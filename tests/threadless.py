"""A cgroup in which this process can start no thread more, as with pids.max in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PIDS = Path("/sys/fs/cgroup/pids")


@contextmanager
def no_threads() -> Iterator[None]:
    """Let no thread and no process of this one be started meanwhile."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.partition(":pids:")[2] for line in lines if ":pids:" in line), "/")
    path = PIDS / own.lstrip("/") / f"threadless-{os.getpid()}"
    try:
        path.mkdir()
        (path / "pids.max").write_text("1")
    except OSError as error:
        pytest.skip(f"no cgroup v1 of pids can be had: {error}")
    procs = path.parent / "cgroup.procs"
    try:
        (path / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        procs.write_text(str(os.getpid()))
        path.rmdir()
