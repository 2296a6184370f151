"""A failure report in a few lines, as ``elaunch status`` shows it below the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from elaunch.monitor.amounts import duration

SHOWN_MESSAGE_LINES: Final = 5


def failure_lines(failure: Mapping[str, Any]) -> Iterator[str]:
    """Yield which worker failed and its report; of a hang, where the workers were."""
    # The report has a schema of its own: what is missing in it is left out here.
    if failure.get("hang"):
        yield from _hang(failure["hang"])
        return
    first = failure.get("first") or {}
    if {"rank", "local_rank", "pid", "ended"} <= first.keys():
        when = f"in round {failure.get('round')}"
        if (seconds := failure.get("seconds_into_round")) is not None:
            when = f"{duration(seconds)} into round {failure.get('round')}"
        yield (
            f"rank {first['rank']} (local_rank {first['local_rank']}, pid {first['pid']}) "
            f"on {failure.get('host')} {first['ended']}, {when}"
        )
    for key in ("message", "explanation"):
        yield from str(first.get(key) or "").splitlines()[:SHOWN_MESSAGE_LINES]


def _hang(hang: Mapping[str, Any]) -> Iterator[str]:
    """Yield the innermost frame of each group of workers, the smallest group first."""
    for group in (hang.get("stacks") or [])[:SHOWN_MESSAGE_LINES]:
        if group.get("main") and group.get("ranks"):
            ranks = ",".join(map(str, group["ranks"]))
            yield f"rank{'s' * (len(group['ranks']) > 1)} {ranks}: {group['main'][0]}"
