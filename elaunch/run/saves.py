"""The checkpoints in a run's record: the agent writes and commits them, or ranks do."""

from __future__ import annotations

from typing import TypedDict


class _SavesRequired(TypedDict):
    step: int | None
    committed_at: float | None
    seconds: float
    saving: int | None
    problem: str


class SavesRecord(_SavesRequired, total=False):
    """The saves of a run; there once a worker has used its checkpoints.

    ``step`` and ``committed_at`` are of the newest that was committed, ``seconds`` how long that
    took from its first shard to the commit; ``saving`` is the step that is on its way to the disk
    now; ``problem`` is why the last one came to nothing, empty if it did not; ``commits`` counts
    what was committed, by the agent and by the ranks themselves.
    """

    commits: int
