"""Readings one after the other, until what is watched has ended.

A :class:`WatchReading` knows its page and its document. On a terminal each reading replaces the
last; elsewhere one is printed when something changed, measured amounts and ages apart.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elaunch.views.layout import Page


@dataclass(frozen=True)
class WatchReading:
    """One reading: for people, for programs, what a change of it is, whether it goes on."""

    page: Page
    document: Any
    gist: object
    live: bool


Read = Callable[[WatchReading | None], WatchReading]


def pause(seconds: float) -> None:
    """Let time pass."""
    time.sleep(seconds)


def require_reader(descriptor: int = 1) -> None:
    """Raise BrokenPipeError if what is written there goes to a pipe that nobody reads any more.

    A command that follows a quiet run, as in ``… | head -1``, would learn it with its next line.
    """
    poll = select.poll()
    poll.register(descriptor, 0)
    if any(happened & select.POLLERR for _, happened in poll.poll(0)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def watch(
    read: Read, interval: float, wait: Callable[[float], None] = pause
) -> Iterator[WatchReading]:
    """Yield a reading every ``interval`` seconds; the last is the first that is not live.

    ``wait`` gets the interval and may return earlier, when there is news.
    """
    reading = read(None)
    yield reading
    while reading.live:
        wait(interval)
        reading = read(reading)
        yield reading


def changes(readings: Iterator[WatchReading]) -> Iterator[WatchReading]:
    """Yield the first reading, and each whose gist is not that of the one before."""
    last = None
    for reading in readings:
        if last is None or reading.gist != last.gist:
            yield reading
        last = reading
