"""Gather objects of several sizes from all ranks on all, and leave what each call took.

Arguments: ``elaunch`` for ``ctx.distributed.allgather``, ``torch`` for ``all_gather_object`` of a
gloo group; how many calls with each large object. Both have a gloo group, whose barrier is before
each call. Of each object one call in ten, and at least one, is made before and not counted.

``$BENCH_DIR/allgather.<round>.<rank>`` has for each object two lists, the seconds of each call, and
the seconds until every byte of the arrays it brought was read once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from stamp import leave, rank

import elaunch

SMALL = 100
LARGE = 7 << 20
SMALL_CALLS = 300
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Series:
    """Calls with one kind of object."""

    name: str
    make: Callable[[], Any]
    calls: int

    @property
    def warm_up(self) -> int:
        """Calls before those that count."""
        return max(1, self.calls // 10)


def main() -> None:
    """Run one worker."""
    large_calls = int(sys.argv[2])
    plan = (
        Series("small", lambda: bytes([rank()]) * SMALL, SMALL_CALLS),
        Series("bytes", lambda: bytes([rank()]) * LARGE, large_calls),
        Series("array", lambda: np.full(LARGE // 8, float(rank())), large_calls),
    )
    dist.init_process_group("gloo")
    if sys.argv[1] == "elaunch":
        with elaunch.init(announce=False) as ctx:
            found = {series.name: _measure(series, ctx.distributed.allgather) for series in plan}
            dist.barrier()
    else:
        found = {series.name: _measure(series, _gather_with_torch) for series in plan}
    leave("allgather", found)
    dist.destroy_process_group()


def _gather_with_torch(obj: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, obj)
    return gathered


def _measure(series: Series, gather: Gather) -> dict[str, list[float]]:
    """Return the seconds of each call of a series."""
    obj = series.make()
    called, read = [], []
    for number in range(series.warm_up + series.calls):
        dist.barrier()
        begin = time.monotonic()
        gathered = gather(obj)
        returned = time.monotonic()
        total = _read(gathered)
        ended = time.monotonic()
        _check(gathered, total)
        del gathered  # before the next call, which makes as much
        if number >= series.warm_up:
            called.append(returned - begin)
            read.append(ended - begin)
    return {"called": called, "read": read}


def _read(gathered: list[Any]) -> float | None:
    """Read every byte of arrays, which may lie in memory that was not touched yet."""
    if not isinstance(gathered[0], np.ndarray):
        return None
    return sum(float(array.sum()) for array in gathered)


def _check(gathered: list[Any], total: float | None) -> None:
    """Exit with an error unless each rank's object is in its place."""
    if [int(each[0]) for each in gathered] != list(range(dist.get_world_size())):
        sys.exit("allgather brought other objects than were given")
    if total is not None and total != sum(range(dist.get_world_size())) * (LARGE // 8):
        sys.exit("allgather brought arrays with other contents")


if __name__ == "__main__":
    main()
