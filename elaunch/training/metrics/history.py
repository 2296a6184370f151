"""Which rows a later round makes void, decided purely.

A round that resumed from step R does every step beyond R again: rows of earlier rounds beyond R are
superseded. Where R is not known, it follows from the first report:

* ``training`` at step s: the round goes on from before s; all rows from s on are superseded.
* ``validation`` at step s: it may stand at s without having done a step; all rows beyond s are.
* any group at step s: its own rows from s on are, since this round reports them again. Another
  group shows nothing of the rest: a script may report its settings at step 0 in every round.

Ranks report apart from each other, so a later report may turn out to be the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

TRAINING: Final = "training"
VALIDATION: Final = "validation"
FROM_NOTHING: Final = -1
"""The step of a round that is known to have begun without a checkpoint."""

_KEY: Final = re.compile(
    rb'\{"group":("(?:[^"\\]|\\.)*"),"steps_completed":(\d+),"round":(\d+),"rank":(\d+),"time":'
)


class RowKey(NamedTuple):
    """The group, step, round and rank of a row; a tuple, since there may be millions."""

    group: str
    step: int
    round: int
    rank: int


@dataclass(frozen=True)
class Beginning:
    """Where a round began: ``resume_step``, None if not known, and each group's first step."""

    resume_step: int | None = None
    first: Mapping[str, int] = field(default_factory=dict)

    def supersedes(self, group: str, step: int) -> bool:
        """Tell whether this round has done, or will do, that step of an earlier one again."""
        limit = self.void_from(group)
        return limit is not None and step >= limit

    def void_from(self, group: str) -> int | None:
        """Return the first step of an earlier round that is superseded; None where none is."""
        resumed = self.resumed_step
        found = [] if resumed is None else [resumed + 1]
        found += [self.first[group]] if group in self.first else []
        return min(found, default=None)

    @cached_property
    def resumed_step(self) -> int | None:
        """Return the last step that this round did not do; None where it is not known."""
        steps = [] if self.resume_step is None else [self.resume_step]
        if TRAINING in self.first:
            steps.append(self.first[TRAINING] - 1)
        if VALIDATION in self.first:
            steps.append(self.first[VALIDATION])
        return min(steps, default=None)

    def joined(self, other: Beginning) -> Beginning:
        """Return the beginning that two reporters of one round make together.

        It supersedes what one or the other does.
        """
        steps = [b.resume_step for b in (self, other) if b.resume_step is not None]
        groups = {**self.first, **other.first}
        first = {
            group: min(b.first[group] for b in (self, other) if group in b.first)
            for group in groups
        }
        return Beginning(min(steps, default=None), first)


def row_key(line: bytes) -> RowKey | None:
    """Return what a line of ``metrics.jsonl`` is of; None for what is no row."""
    found = _KEY.match(line)
    if found is None:
        return None
    group, step, round, rank = found.groups()
    try:
        return RowKey(_group(group), int(step), int(round), int(rank))
    except ValueError:  # control characters in the group, or a number of thousands of digits
        return None


@lru_cache(maxsize=256)
def _group(raw: bytes) -> str:
    return str(json.loads(raw))


def firsts(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return each group's smallest step."""
    found: dict[str, int] = {}
    for group, step in rows:
        if step < found.get(group, step + 1):
            found[group] = step
    return found


def written(beginnings: Mapping[int, Beginning]) -> bytes:
    """Return the content of ``metrics.rounds.json``."""
    document = {
        str(number): {"resume_step": begun.resume_step, "first": dict(begun.first)}
        for number, begun in sorted(beginnings.items())
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def parsed(raw: bytes) -> dict[int, Beginning]:
    """Return the beginnings by round; empty for what nobody can read."""
    try:
        document = json.loads(raw)
        return {int(number): _beginning(entry) for number, entry in document.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _beginning(entry: Mapping[str, Any]) -> Beginning:
    step = entry["resume_step"]
    first = {str(group): int(value) for group, value in entry["first"].items()}
    return Beginning(None if step is None else int(step), first)
