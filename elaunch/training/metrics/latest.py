"""What this rank reported at the newest steps, kept in memory: the metrics of a checkpoint."""

from __future__ import annotations

from typing import Final

from elaunch.training.metrics.history import VALIDATION
from elaunch.training.metrics.rows import Row

STEPS: Final = 256
"""Steps that are remembered: a checkpoint is of one of the newest."""


class Latest:
    """The numbers of the last rows, by step and group; of each name the last."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, dict[str, float]]] = {}

    def take(self, row: Row) -> None:
        """Remember a row's numbers."""
        groups = self._steps.pop(row.steps_completed, {})
        self._steps[row.steps_completed] = groups  # the newest stand last
        numbers = groups.setdefault(row.group, {})
        for name, value in row.values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[name] = value
        if len(self._steps) > STEPS:
            del self._steps[next(iter(self._steps))]

    def at(self, step: int) -> dict[str, float]:
        """Return the numbers of a step: by their names, and as ``group.name``."""
        groups = self._steps.get(step, {})
        plain: dict[str, float] = {}
        for group in sorted(groups, key=lambda group: group == VALIDATION):
            plain |= groups[group]
        named = {f"{group}.{name}": v for group, own in groups.items() for name, v in own.items()}
        return {**plain, **named}
