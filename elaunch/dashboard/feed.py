"""Readings that are pushed to open pages, as server-sent events.

However many pages watch the same thing, it is read once per interval, and only while somebody
watches. An interval is at least LEAST_S and so long that reading takes at most a twentieth of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

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
