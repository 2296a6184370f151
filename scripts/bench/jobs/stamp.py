"""Leave a time stamp in a file, for the bench to read.

``$BENCH_DIR/<name>.<round>.<rank>`` holds one JSON object:

    mono    time.monotonic(), one clock for all processes of a machine
    wall    time.time()
    pid     of the worker

or what the worker measured itself (``leave``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def round_number() -> int:
    """Return the number of restarts before this life of the worker, under either launcher."""
    return int(os.environ.get("ELAUNCH_ROUND") or os.environ["TORCHELASTIC_RESTART_COUNT"])


def rank() -> int:
    """Return the worker's global rank."""
    return int(os.environ["RANK"])


def directory() -> Path:
    """Return where this sample's stamps belong."""
    return Path(os.environ["BENCH_DIR"])


def stamp(name: str) -> None:
    """Write the stamp ``name`` of this worker, with the time of the call."""
    write(prepare(name))


def prepare(name: str) -> int:
    """Return a descriptor for ``write``; between the two nothing but one system call is left."""
    path = directory() / f"{name}.{round_number()}.{rank()}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def write(descriptor: int) -> None:
    """Write a stamp with the time of the call to a prepared descriptor."""
    now = {"mono": time.monotonic(), "wall": time.time(), "pid": os.getpid()}
    os.write(descriptor, json.dumps(now).encode())


def leave(name: str, found: Mapping[str, Any]) -> None:
    """Write what this worker measured itself, under ``name`` as a stamp would be."""
    descriptor = prepare(name)
    os.write(descriptor, json.dumps(found).encode())
