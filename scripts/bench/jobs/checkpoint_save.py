"""Save a model and its Adam in one of several ways, and leave what each save took.

Arguments: the way (``WAYS``), megabytes of state, number of saves, a directory. The state is equal
on all ranks, as under DDP. Each way makes one save before, which is not counted: it maps memory and
starts threads. Between two saves there is a barrier, and the one before is committed.

``$BENCH_DIR/saves.<round>.<rank>`` has of each save the seconds that the training stood still, the
seconds until it was committed, and of the process its greatest memory in bytes, alone
(``VmHWM`` without what it shares with files) and the growth of it over the saves.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_state import Training, peak_memory
from stamp import leave

import elaunch

Settle = Callable[[], object]
"""Waits until the save is committed."""


@dataclass(frozen=True)
class Run:
    """What a way of saving works with."""

    training: Training
    directory: Path
    context: elaunch.Context


def by_torch(run: Run, step: int) -> Settle:
    """Have rank 0 write one file, synced to disk, while the others wait."""
    if dist.get_rank() == 0:
        with (run.directory / f"{step}.pt").open("wb") as file:
            torch.save(run.training.state_dicts(), file)
            _sync(file)
    dist.barrier()
    return _nothing


def by_dcp(run: Run, step: int) -> Settle:
    """Save with torch.distributed.checkpoint, which syncs its data files by default."""
    dcp.save(run.training.state_dicts(), checkpoint_id=run.directory / f"{step}")
    return _nothing


def by_dcp_thread(run: Run, step: int) -> Settle:
    """Save with its asynchronous call, in a thread."""
    return _asynchronously(run, step, dcp.state_dict_saver.AsyncCheckpointerType.THREAD)


def by_dcp_process(run: Run, step: int) -> Settle:
    """Save with its asynchronous call, in a process."""
    return _asynchronously(run, step, dcp.state_dict_saver.AsyncCheckpointerType.PROCESS)


def by_elaunch(run: Run, step: int) -> Settle:
    """Save with ``ctx.checkpoint.save``: synced, with checksums, committed when it returns."""
    run.context.checkpoint.save(run.training.state(), step)
    return _nothing


def by_elaunch_aside(run: Run, step: int) -> Settle:
    """Hand the state to the agent with ``save(block=False)``."""
    run.context.checkpoint.save(run.training.state(), step, block=False)
    return run.context.checkpoint.wait


def by_copy(run: Run, step: int) -> Settle:
    """Copy this rank's share of the bytes once, into memory that is mapped: nothing is saved."""
    share, memory = run.training.share()
    memory.copy_(share)
    return _nothing


WAYS: dict[str, Callable[[Run, int], Settle]] = {
    "copy": by_copy,
    "torch": by_torch,
    "dcp": by_dcp,
    "dcp-thread": by_dcp_thread,
    "dcp-process": by_dcp_process,
    "elaunch": by_elaunch,
    "elaunch-aside": by_elaunch_aside,
}


def _asynchronously(run: Run, step: int, kind: Any) -> Settle:
    future = dcp.async_save(
        run.training.state_dicts(),
        checkpoint_id=run.directory / f"{step}",
        async_checkpointer_type=kind,
    )
    result: Settle = future.result
    return result


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _nothing() -> None:
    """Say that the save was committed when it returned."""


def main() -> None:
    """Run one worker."""
    way, megabytes, saves, directory = sys.argv[1:]
    dist.init_process_group("cpu:gloo")
    with elaunch.init(announce=False) as context:
        run = Run(Training(int(megabytes)), Path(directory), context)
        found = _measure(WAYS[way], run, int(saves))
        leave("saves", found)
    dist.destroy_process_group()


def _measure(way: Callable[[Run, int], Settle], run: Run, saves: int) -> dict[str, Any]:
    stalls, commits = [], []
    before = peak_memory()
    for number in range(saves + 1):
        _make_room(run)
        dist.barrier()
        begin = time.monotonic()
        settle = way(run, number + 1)
        stalls.append(time.monotonic() - begin)
        settle()
        commits.append(time.monotonic() - begin)
        dist.barrier()
    peak = peak_memory()
    return {"stalls": stalls[1:], "commits": commits[1:], "peak": peak, "grown": peak - before}


def _make_room(run: Run) -> None:
    """Remove what was saved before; what this takes is in no figure."""
    if dist.get_rank() != 0:
        return
    for path in run.directory.glob("[0-9]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for found in run.context.checkpoint.list()[:-1]:
        run.context.checkpoint.delete(found.uuid)


if __name__ == "__main__":
    main()
