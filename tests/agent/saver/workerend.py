"""A worker as its agent's saver sees it: a real link, with the saver's requests on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elaunch.training.agentlink import AgentLink
from elaunch.training.checkpoint.saver import AgentSaverClient
from elaunch.wire.progress import ProgressPage


def linked(socket: Path, local_rank: int, number: int) -> AgentLink:
    """Return a worker's link, of round ``number``."""
    placement: Any = SimpleNamespace(round=number, local_rank=local_rank)
    link = AgentLink(socket, ProgressPage(), placement)
    link.start()
    return link


def client(socket: Path, rank: Any, local_rank: int, place: str, number: int) -> AgentSaverClient:
    """Return what a worker asks the saver with, not yet connected."""
    link = linked(socket, local_rank, number)
    placement: Any = SimpleNamespace(rank=rank, local_rank=local_rank)
    return AgentSaverClient(link, placement, place)


def end(*workers: AgentSaverClient) -> None:
    """Have the workers' connections end, as when they are killed."""
    for worker in workers:
        assert worker._link._channel is not None
        worker._link._channel.shutdown()
