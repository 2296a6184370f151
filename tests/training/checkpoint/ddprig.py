"""Ranks that are threads around a real TCPStore: no agent, and no process of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elaunch.checkpoint.records import Committed
from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.training.checkpoint.latest import decide
from elaunch.training.checkpoint.session import CheckpointSession
from elaunch.training.distributed import DistributedContext
from elaunch.training.launch import read
from elaunch.training.train import TrainContext
from elaunch.wire.progress import ProgressPage
from tests.training.rankrig import PATIENCE, Outcome, StoreHost, in_threads


def saved(checkpoint: CheckpointContext, state: dict[str, Any], step: int) -> Committed:
    """Save one file on all ranks together, as ``load`` reads it, without a process group."""
    with checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
        torch.save(state, path / "state.pt")
    found = checkpoint.latest()
    assert found is not None
    return found


Work = Callable[[CheckpointContext, int], Any]


class Ranks:
    """Runs ``work(checkpoint, rank)`` on ranks that are threads; each call is a job's start."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "checkpoints"
        self._host = StoreHost()
        self._starts = 0

    def run(self, size: int, work: Work) -> Outcome:
        """Return what the ranks returned or raised."""
        self._starts += 1
        job = f"start {self._starts}"

        def one(rank: int) -> Any:
            with self._context(rank, size, job) as checkpoint:
                return work(checkpoint, rank)

        return in_threads(range(size), one)

    @contextmanager
    def _context(self, rank: int, size: int, job: str) -> Iterator[CheckpointContext]:
        place = self._host.place(rank, size, job=job)._replace(run_id="job")
        distributed, page = DistributedContext.of(place), ProgressPage()
        distributed.open(page, PATIENCE)
        train = TrainContext(place, page, None)
        info = read({})
        session = CheckpointSession(info, distributed, train, page, "job", True)
        session.decided = decide(distributed, info, "job", True)
        made = CheckpointContext(session)
        try:
            yield made
        finally:
            made.close()
            distributed.close()
            page.close()
