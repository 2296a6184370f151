"""Readings one after the other, until what is watched has ended.

A :class:`WatchReading` knows its page and its document. On a terminal each reading replaces the
last; elsewhere one is printed when something changed, measured amounts and ages apart.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elaunch.monitor.document import list_document, run_document
from elaunch.monitor.page import Page
from elaunch.monitor.runpage import list_page, run_page
from elaunch.monitor.snapshot import PATIENCE_S, RunView, take
from elaunch.monitor.standing import overview
from elaunch.runs.directory import RunDir
from elaunch.runs.usage import Measurement

if TYPE_CHECKING:
    from elaunch.monitor.nodeviews import RemoteWorkers


@dataclass(frozen=True)
class WatchReading:
    """One reading: for people, for programs, what a change of it is, whether it goes on."""

    page: Page
    document: Any
    gist: object
    live: bool
    measurements: Mapping[int, Measurement] = field(default_factory=dict)


Read = Callable[[WatchReading | None], WatchReading]


def run_reader(run: RunDir) -> Read:
    """Return what reads one run; CPU is measured from one reading to the next."""

    others: RemoteWorkers | None = None

    def read(last: WatchReading | None) -> WatchReading:
        nonlocal others
        view = take(run, last.measurements if last else None)
        if view.has_others:
            from elaunch.monitor.nodeviews import RemoteWorkers
            from elaunch.wire.control import WORKERS_S

            others = others or RemoteWorkers(run)
            patience = WORKERS_S if last is None else PATIENCE_S
            view = others.complete(view, patience=patience)
        return WatchReading(
            run_page(view), run_document(view), _gist(view), view.standing.live, view.measurements
        )

    return read


def list_reader(environ: Mapping[str, str], everything: bool) -> Read:
    """Return what reads all runs."""

    def read(last: WatchReading | None) -> WatchReading:
        standings = overview(environ, everything)
        gist = tuple(
            (s.run, s.state, s.agent, s.reason, s.record and s.record["round"]) for s in standings
        )
        live = any(standing.live for standing in standings)
        return WatchReading(list_page(standings, everything), list_document(standings), gist, live)

    return read


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


def _gist(view: RunView) -> object:
    standing, record = view.standing, view.record
    workers = tuple((w.record["pid"], w.state, w.record["exit"]) for w in view.workers)
    latest = view.latest and (view.latest.path, view.latest.step)
    restarts = tuple(record["restarts"].items())
    return (
        standing.state,
        standing.agent,
        standing.reason,
        record["round"],
        restarts,
        workers,
        latest,
        "awaited" in record,
    )
