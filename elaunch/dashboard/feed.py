"""Readings and lines of logs that are pushed to open pages, as server-sent events.

However many pages watch the same thing, it is read once per interval, and only while somebody
watches. An interval is at least LEAST_S and so long that reading takes at most a twentieth of it.
Lines of logs are those that were found, then those that come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from elaunch.errors import UsageError
from elaunch.monitor.screen.logtail import LogFilter, RunLogs, newer
from elaunch.runs.directory import is_live

LEAST_S: Final = 1.0
SHARE: Final = 20
SILENT_S: Final = 15.0
"""Seconds after which a comment is sent, by which a client that is gone is noticed."""


def encoded(document: Any) -> str:
    """Return JSON that every browser can parse: NaN and infinities are null."""
    try:
        return msgspec.json.encode(document).decode()
    except (TypeError, UnicodeEncodeError):  # a key that is None; a file's name that is no UTF-8
        plain = json.loads(json.dumps(document), parse_constant=lambda _: None)
        return json.dumps(plain, separators=(",", ":"))


async def pause(closing: asyncio.Event, seconds: float) -> bool:
    """Wait ``seconds``, or until the server closes; return whether it goes on."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(closing.wait(), seconds)
    return not closing.is_set()


class Feed:
    """The newest reading of one thing, for all who follow it, at most one in ``least_s``.

    ``read`` is called in a thread. It returns the document, whose ``read_at`` is no change of it.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], least_s: float = LEAST_S) -> None:
        self._read = read
        self._least_s = least_s
        self._lock = asyncio.Lock()
        self._due = 0.0
        self._gist = ""
        self._newest = b""

    async def newest(self) -> bytes:
        """Return the document as JSON; the same object as before where nothing has changed."""
        async with self._lock:
            if time.monotonic() >= self._due:
                began = time.monotonic()
                document, gist = await asyncio.to_thread(self._reading)
                ended = time.monotonic()
                self._due = ended + max(self._least_s, SHARE * (ended - began))
                if gist != self._gist:
                    self._gist, self._newest = gist, document
            return self._newest

    def _reading(self) -> tuple[bytes, str]:
        document = self._read()
        gist = encoded({**document, "read_at": None})
        return encoded(document).encode(), gist

    async def events(self, closing: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield an event for each change, until the client is gone or the server closes.

        The server of one run closes when that has ended, so the last event is of then.
        """
        last, sent_at, due = b"", time.monotonic(), 0.0
        while await pause(closing, due):
            newest = await self.newest()
            if newest is not last:
                last, sent_at = newest, time.monotonic()
                yield b"data: " + newest + b"\n\n"
            elif time.monotonic() - sent_at > SILENT_S:
                sent_at = time.monotonic()
                yield b": still here\n\n"
            due = max(0.05, self._due - time.monotonic())
        self._due = 0.0
        if (newest := await self.newest()) is not last:
            yield b"data: " + newest + b"\n\n"


PAUSE_S: Final = 1.0


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
