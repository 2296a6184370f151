"""Readings one after the other, until what is watched has ended.

A reading is one job, or several that are listed. On a terminal each replaces the last; elsewhere
one is printed when something changed, measured amounts and ages apart.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class Followed(Protocol):
    """A job that can be watched."""

    @property
    def live(self) -> bool:
        """Whether it goes on."""

    @property
    def gist(self) -> object:
        """The state, without ages: a change of it is one that is shown."""


Shown = TypeVar("Shown", bound=Sequence[Followed])


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
    read: Callable[[], Shown], interval: float, wait: Callable[[float], None] = pause
) -> Iterator[Shown]:
    """Yield a reading every ``interval`` seconds; the last is the first in which nothing is live.

    ``wait`` gets the interval and may return earlier, when there is news.
    """
    while True:
        jobs = read()
        yield jobs
        if not any(job.live for job in jobs):
            return
        wait(interval)


def changes(readings: Iterator[Shown]) -> Iterator[Shown]:
    """Yield the first reading, and each whose gist is not that of the one before."""
    last: object = None
    for jobs in readings:
        gist = [job.gist for job in jobs]
        if gist != last:
            yield jobs
        last = gist
