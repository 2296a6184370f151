"""Measure an ``all_reduce`` of 4 floats with the recorder of collectives and without, in turns.

The workers are three groups of the same size, all from one fork server: with the recorder as
elaunch starts it; with what torch records by itself, and no server; without either. A group makes a
block of calls while the others wait, and the turn goes round.

Arguments: ranks of a group, calls of a block, blocks of a group, the group that has the recorder.
``$BENCH_DIR/recorder.<round>.<rank>`` has the ``mode`` and the ``medians`` of the blocks, the
seconds that a call takes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from stamp import directory, leave, rank

from elaunch.wire import recorder

MODES = ("with", "torch", "without")
WARM_UP = 5
"""Calls at the start of a block that do not count: until then the caches are another group's."""


def main() -> None:
    """Run one worker."""
    size, calls, blocks, first = map(int, sys.argv[1:])
    group, member = divmod(rank(), size)
    mode = MODES[(group - first) % len(MODES)]
    if mode != "with":
        recorder._Recorder._start = lambda self: None  # type: ignore[method-assign]
    if mode == "without":
        os.environ[recorder.LIMIT[0]] = "0"
    store = dist.FileStore(str(directory() / f"store.{group}"), size)
    own, following = (
        _turn(directory() / f"turn.{each % len(MODES)}.{member}") for each in (group, group + 1)
    )
    dist.init_process_group("gloo", store=store, rank=member, world_size=size)
    if group == 0:
        os.write(own, b".")
    medians = []
    for _ in range(blocks):
        os.read(own, 1)
        medians.append(statistics.median(_block(calls)))
        os.write(following, b".")
    leave("recorder", {"mode": mode, "medians": medians})
    os.read(own, 1)  # until then the others measure
    os.write(following, b".")
    dist.destroy_process_group()


def _turn(path: Path) -> int:
    """Return the pipe that has a byte in it when a rank of a group has its turn."""
    with contextlib.suppress(FileExistsError):  # the two that use it make it
        os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def _block(calls: int) -> list[float]:
    """Return the seconds that each call takes."""
    values, took = torch.ones(4), []
    for _ in range(WARM_UP + calls):
        begin = time.perf_counter()
        dist.all_reduce(values)
        took.append(time.perf_counter() - begin)
        values.fill_(1.0)
    return took[WARM_UP:]


if __name__ == "__main__":
    main()
