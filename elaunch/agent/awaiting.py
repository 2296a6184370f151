"""Waits for one answer before the loop begins to serve: how many devices, is the storage fit."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Collection

from elaunch.agent import events
from elaunch.agent.group import WorkerGroup
from elaunch.config import Settings
from elaunch.endings import how_it_ended
from elaunch.errors import ServerError, UsageError

Inbox = queue.SimpleQueue[events.Event]


def await_one(
    inbox: Inbox,
    kinds: tuple[type[events.Event], ...],
    passing: Collection[signal.Signals],
    timeout: float | None = None,
) -> events.Event | None:
    """Return the first event of these kinds, or a signal; None after ``timeout`` seconds.

    The other events are put back in their order. ``passing`` are signals that would be forwarded to
    workers: there are none yet, so those are dropped.
    """
    until = None if timeout is None else time.monotonic() + timeout
    later: list[events.Event] = []
    event = _next(inbox, until)
    while event is not None and not isinstance(event, kinds):
        if not isinstance(event, events.SignalReceived):
            later.append(event)
        elif event.signum not in passing:
            break
        event = _next(inbox, until)
    for waiting in later:
        inbox.put(waiting)
    return event


def count_devices(
    settings: Settings, group: WorkerGroup, inbox: Inbox
) -> int | events.SignalReceived:
    """Ask the server how many devices there are; return the signal when one came first.

    Raises:
        ServerError: it has ended.
        UsageError: it cannot tell.
    """
    kind = settings.nproc_per_node
    interpreter = settings.interpreter
    group.server.send({"op": "count_devices", "kind": kind, "interpreter": interpreter})
    kinds = (events.DevicesCounted, events.ServerLost)
    event = await_one(inbox, kinds, settings.forward_signals)
    if isinstance(event, events.SignalReceived):
        return event
    if isinstance(event, events.ServerLost):
        raise ServerError(f"the server that counts the devices {how_it_ended(event.exitcode)}")
    assert isinstance(event, events.DevicesCounted)  # the only other kind
    if event.count is None:
        raise UsageError(f"--nproc-per-node {kind}: {event.problem}; give a number, or cpu")
    return event.count


def _next(inbox: Inbox, until: float | None) -> events.Event | None:
    try:
        return inbox.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
    except queue.Empty:
        return None
