"""The rule of what is kept. A checkpoint stays if any part of the rule that is given keeps it.

=============  ===================================  =================================
part           flag                                 keeps
=============  ===================================  =================================
``last``       ``--checkpoint-keep-last N``         the N newest
``every``      ``--checkpoint-keep-every STEPS``    each whose step is a multiple
``best``       ``--checkpoint-keep-best M[:max]``   the best by a reported metric
=============  ===================================  =================================

Without any part everything stays. ``elaunch.checkpoint.retention.delete`` applies it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MODES = ("min", "max")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: those that any of the parts given names, and always the newest.

    Args:
        last: the number of newest checkpoints that stay.
        every: each one whose step is a multiple of this.
        best: the one with the best value of this metric, as the script reported it.
        mode: whether the smallest (``min``) or the largest (``max``) value is the best.

    Raises:
        ValueError: a part that means nothing; names the part and the value.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Keep({name}={value!r}): a whole number, 1 or more, or None")
        if self.best is not None and not (isinstance(self.best, str) and self.best.strip()):
            raise ValueError(f"Keep(best={self.best!r}): the name of a metric, or None")
        if self.mode not in MODES:
            raise ValueError(f"Keep(mode={self.mode!r}): 'min' or 'max'")

    def __bool__(self) -> bool:
        """Whether anything may ever go."""
        return not (self.last is None and self.every is None and self.best is None)

    def to_json(self) -> str:
        """Return the rule as ``from_json`` reads it; only the parts that are given."""
        parts: dict[str, Any] = {"last": self.last, "every": self.every, "best": self.best}
        found = {name: part for name, part in parts.items() if part is not None}
        if self.best is not None:
            found["mode"] = self.mode
        return json.dumps(found)

    def describe(self) -> str:
        """Return the rule as text, as in ``the newest 3, the one with the best loss (min)``."""
        parts = []
        if self.last is not None:
            parts.append(f"the newest {self.last}" if self.last > 1 else "the newest")
        if self.every is not None:
            parts.append(f"those at multiples of {self.every} steps")
        if self.best is not None:
            parts.append(f"the one with the best {self.best} ({self.mode})")
        return ", ".join(parts) or "all"

    @classmethod
    def from_json(cls, text: str) -> Keep:
        """Return the rule of a JSON object; an empty text is no rule.

        Raises:
            ValueError: the text is no such object, or has a key that Keep does not know.
        """
        found = json.loads(text) if text.strip() else {}
        if not isinstance(found, Mapping):
            raise ValueError(f"{text!r} is not a JSON object with last, every, best and mode")
        unknown = sorted(set(found) - {"last", "every", "best", "mode"})
        if unknown:
            raise ValueError(f"{text!r}: unknown key {unknown[0]!r}")
        return cls(**found)
