"""Lines of a run's logs as server-sent events: those that were found, then those that come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from elaunch.dashboard.feed import SILENT_S, encoded, pause
from elaunch.errors import UsageError
from elaunch.monitor.screen.logtail import LogFilter, RunLogs, newer
from elaunch.runs.directory import is_live

PAUSE_S: Final = 0.5


async def follow(
    logs: RunLogs,
    wanted: LogFilter,
    document: dict[str, Any],
    ends: dict[str, int],
    closing: asyncio.Event,
) -> AsyncIterator[bytes]:
    """Yield what :func:`search` has returned as an event, then lines, until the server closes.

    The last event has ``ended``: the run has, or had.
    """
    yield _event(document)
    held: dict[str, bytes] = {}
    sent_at, live, serves = time.monotonic(), True, True
    while live and serves:
        serves = await pause(closing, PAUSE_S)
        # Asked first: what a run that has ended wrote is there.
        live = await asyncio.to_thread(is_live, logs.run)
        lines = await asyncio.to_thread(newer, logs, wanted, ends, held)
        if lines or not live:
            sent_at = time.monotonic()
            yield _event({"lines": lines, "ended": not live})
        elif time.monotonic() - sent_at > SILENT_S:
            sent_at = time.monotonic()
            yield b": still here\n\n"


def parse_round(text: str) -> int | None:
    """Return the number of a round, None for "". Raises UsageError."""
    try:
        return int(text) if text else None
    except ValueError:
        raise UsageError(f"round {text[:50]}: is no number; give that of a round, as 0") from None


def parse_older(text: str) -> dict[str, int] | None:
    """Return how far each file was read, as ``older`` has it; None for "". Raises UsageError."""
    if not text:
        return None
    try:
        return {str(name): max(0, int(at)) for name, at in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UsageError("older is not what an answer had") from None


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + encoded(document).encode() + b"\n\n"
