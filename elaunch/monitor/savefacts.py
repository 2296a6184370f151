"""What was saved in a run, by its agent or its ranks, as ``elaunch status`` shows it."""

from __future__ import annotations

from collections.abc import Iterator

from elaunch.monitor.amounts import duration
from elaunch.monitor.standing import Standing
from elaunch.run.record import Record
from elaunch.run.saves import SavesRecord


def facts(record: Record, standing: Standing) -> Iterator[tuple[str, str]]:
    """Yield names and values: the newest commit, what is on its way, what came to nothing."""
    saves = record.get("saves")
    if saves is None:
        return
    # The agent of rank 0's node counts for the job.
    nothing = "counted on node 0" if record.get("node_rank") else "none yet"
    yield "saves", ", ".join(_words(saves, standing)) or nothing
    if saves["problem"]:
        yield "", saves["problem"]


def _words(saves: SavesRecord, standing: Standing) -> Iterator[str]:
    if saves["step"] is not None and saves["committed_at"] is not None:
        age = duration(max(0.0, standing.taken_at - saves["committed_at"]))
        yield f"step {saves['step']} committed {age} ago, in {duration(saves['seconds'])}"
        if commits := saves.get("commits"):
            yield f"{commits} in all"
    if saves["saving"] is not None:
        yield f"step {saves['saving']} is being written" if standing.live else "one was unfinished"
