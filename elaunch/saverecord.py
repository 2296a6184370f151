"""What a run's record says of the checkpoints that its agent writes for the workers."""

from __future__ import annotations

from typing import TypedDict


class SavesRecord(TypedDict):
    """The saves of a run; there once a worker has handed its first part to the agent.

    ``step`` and ``committed_at`` are of the newest that was committed, ``seconds`` how long that
    took from its first part to the commit; ``saving`` is the step that is on its way to the disk
    now; ``problem`` is why the last one came to nothing, empty if it did not.
    """

    step: int | None
    committed_at: float | None
    seconds: float
    saving: int | None
    problem: str
