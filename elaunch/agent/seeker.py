"""Looks for the newest complete checkpoint, for the round that comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elaunch.agent import events
from elaunch.checkpoint.records import Search
from elaunch.config import Settings
from elaunch.errors import CheckpointError


def look(settings: Settings) -> events.CheckpointChosen:
    """Return what is found below ``--checkpoint-dir``; blocks as long as the storage does."""
    from elaunch.checkpoint.latest import find_latest  # only jobs with checkpoints pay for it

    root = settings.checkpoint_dir
    assert root is not None  # the policy asks only then
    shared = settings.run_id_given or settings.rendezvous is not None
    run_id = settings.run_id if shared else None
    problem = None
    try:
        search = find_latest(root, glob=settings.checkpoint_glob, run_id=run_id)
    except Exception as error:  # the round waits for the answer, whatever it is
        search, problem = Search(None), f"{root}: {type(error).__name__}: {error}"
    unreadable = [passed.reason for passed in search.passed_over if passed.path == root]
    if unreadable:  # not the same as a directory without checkpoints: nobody may start afresh
        problem = f"{root}: {unreadable[0]}"
    return events.CheckpointChosen(search, problem)


def for_all_nodes(
    settings: Settings, post: Callable[[events.Event], None]
) -> Callable[[], dict[str, Any] | None]:
    """Return the coordinator's search: what it finds, every node resumes from.

    The agent's loop is told as well, for its log. The search raises CheckpointError where the
    storage cannot be read.
    """

    def search() -> dict[str, Any] | None:
        found = look(settings)
        post(found)
        if found.problem is not None:
            raise CheckpointError(f"cannot look for checkpoints: {found.problem}")
        chosen = found.search.checkpoint
        if chosen is None:
            return None
        return {"path": str(chosen.path), "step": chosen.step, "format": chosen.format}

    return search
