"""The part of a failure report that is about a hang: who, for how long, and what all were doing.

::

    What each rank said last:
      rank 0: step 42, silent for 60 s, last call allgather #43
      rank 3: step 41, in section eval, silent for 61 s
    Python stacks at that time, most recent call first:
      rank 3:
        File "train.py", line 31 in evaluate
      ranks 0-2:
        File "…/torch/distributed/distributed_c10d.py", line 4165 in barrier
    No stacks of rank 4: the process is stopped by a signal (SIGSTOP) or by a debugger
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elaunch.agent.hangs.judge import ranks_text
from elaunch.agent.hangs.stackdump import StackGroup
from elaunch.agent.policy import events

MOST_LAST = 16
"""Ranks of which the text has what they reported last; the JSON has all."""


@dataclass(frozen=True)
class Hang:
    """A hang as it is reported; ``at`` in seconds since 1970, the rest as in events.HangSeen."""

    ranks: tuple[int, ...]
    reason: str
    source: str
    at: float
    last: tuple[str, ...] = ()
    groups: tuple[StackGroup, ...] = ()
    problems: tuple[tuple[tuple[int, ...], str], ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data (docs/failure-report.md)."""
        return {
            "ranks": list(self.ranks),
            "reason": self.reason,
            "source": self.source,
            "at": self.at,
            "last": list(self.last),
            "stacks": [_group_dict(group) for group in self.groups],
            "no_stacks": [{"ranks": list(r), "problem": text} for r, text in self.problems],
        }


def lines(hang: Hang) -> Iterator[str]:
    """Yield what the text of a report says of a hang, below the line that names it."""
    yield from _last_lines(hang.last)
    yield from _stack_lines(hang.groups, hang.problems)


def lines_of(taken: events.StacksTaken) -> Iterator[str]:
    """Yield what the workers of this node were doing when another node reported a hang."""
    yield "What the workers of this node were doing meanwhile:"
    yield from _last_lines(taken.last)
    yield from _stack_lines(taken.groups, taken.problems)


def _last_lines(last: Sequence[str]) -> Iterator[str]:
    if last:
        yield "What each rank said last:"
        yield from (f"  {line}" for line in last[:MOST_LAST])
    if len(last) > MOST_LAST:
        yield f"  … and {len(last) - MOST_LAST} more ranks"


def _stack_lines(
    groups: Sequence[StackGroup], problems: Sequence[tuple[tuple[int, ...], str]]
) -> Iterator[str]:
    if groups:
        yield "Python stacks at that time, most recent call first:"
    for group in groups:
        yield f"  {ranks_text(group.ranks)}:"
        yield from (f"    {frame}" for frame in group.main)
        for ranks, stack in group.threads:
            yield f"  another thread of {ranks_text(ranks)}:"
            yield from (f"    {frame}" for frame in stack)
    for ranks, text in problems:
        yield f"No stacks of {ranks_text(ranks)}: {text}"
    if not groups and not problems:
        yield "The stacks of the workers could not be taken in time."


def source_text(source: str) -> str:
    """Return what a source of progress is called where it is read by people."""
    return "the script" if source == "script" else source


def _group_dict(group: StackGroup) -> dict[str, Any]:
    return {
        "ranks": list(group.ranks),
        "main": list(group.main),
        "threads": [{"ranks": list(ranks), "stack": list(stack)} for ranks, stack in group.threads],
    }
