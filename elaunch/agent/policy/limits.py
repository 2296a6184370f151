"""What the settings mean for the decisions of the agent."""

from __future__ import annotations

import os
from pathlib import Path

from elaunch.agent.policy.state import Limits
from elaunch.config import Settings


def known_nproc(name: str) -> int | None:
    """Return the number of workers that ``--nproc-per-node`` means; None if torch must count."""
    if name == "cpu":
        return len(os.sched_getaffinity(0))
    return int(name) if name.isdigit() else None


def limits_of(settings: Settings, nproc: int, meets: bool) -> Limits:
    """Return what bounds a job of ``nproc`` workers here; ``meets``: other nodes take part."""
    return Limits(
        nproc=nproc,
        max_restarts=settings.max_restarts,
        shutdown_timeout=settings.shutdown_timeout,
        sibling_grace=settings.sibling_grace,
        forwarded=frozenset(settings.forward_signals),
        preempting=frozenset(settings.preempt_signals),
        meets=meets,
        takes_stacks=settings.hang_timeout is not None,
        checkpoint_root=_own_root(settings),
    )


def _own_root(settings: Settings) -> Path | None:
    directory = settings.checkpoint_dir
    local = settings.checkpoint_local and settings.rendezvous is not None
    return directory if local and isinstance(directory, Path) else None
