"""What is settled before the loop serves: how many workers, what bounds the job, may it save here.

The server counts devices and a thread looks at the storage; each is waited for as one answer.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Collection
from pathlib import Path

from elaunch.agent.patience import telling
from elaunch.agent.policy import events
from elaunch.agent.policy.state import Limits
from elaunch.agent.workers.group import WorkerGroup
from elaunch.config import Settings
from elaunch.endings import how_it_ended
from elaunch.errors import ServerError, UsageError

Inbox = queue.SimpleQueue[events.Event]
Interruption = events.SignalReceived | events.PreemptAsked

COUNTING = (
    "still waiting for the server to count the devices, for {seconds:.0f} s: it imports torch "
    "first, if the file system of {interpreter} answers at all"
)


def known_nproc(name: str) -> int | None:
    """Return the number of workers that ``--nproc-per-node`` means; None if torch must count."""
    if name == "cpu":
        return len(os.sched_getaffinity(0))
    return int(name) if name.isdigit() else None


def limits_of(settings: Settings, nproc: int, meets: bool) -> Limits:
    """Return what bounds a job of ``nproc`` workers here; ``meets``: other nodes take part."""
    return Limits(
        nproc=nproc,
        max_restarts=settings.max_restarts,
        shutdown_timeout=settings.shutdown_timeout,
        sibling_grace=settings.sibling_grace,
        forwarded=frozenset(settings.forward_signals),
        preempting=frozenset(settings.preempt_signals),
        meets=meets,
        takes_stacks=settings.hang_timeout is not None,
        checkpoint_root=_own_root(settings),
    )


def _own_root(settings: Settings) -> Path | None:
    directory = settings.checkpoint_dir
    local = settings.checkpoint_local and settings.rendezvous is not None
    return directory if local and isinstance(directory, Path) else None


def await_one(
    inbox: Inbox,
    kinds: tuple[type[events.Event], ...],
    passing: Collection[signal.Signals],
    timeout: float | None = None,
    *,
    keeping: Collection[signal.Signals] = (),
) -> events.Event | None:
    """Return the first event of these kinds, or a signal; None after ``timeout`` seconds.

    The other events are put back in their order. ``passing`` are signals that would be forwarded to
    workers: there are none yet, so those are dropped. ``keeping`` are signals that the loop is to
    see, which serves after the wait.
    """
    until = None if timeout is None else time.monotonic() + timeout
    later: list[events.Event] = []
    event = _next(inbox, until)
    while event is not None and not isinstance(event, kinds):
        if not isinstance(event, events.SignalReceived) or event.signum in keeping:
            later.append(event)
        elif event.signum not in passing:
            break
        event = _next(inbox, until)
    for waiting in later:
        inbox.put(waiting)
    return event


def preempting(
    settings: Settings,
) -> tuple[tuple[type[events.Event], ...], tuple[signal.Signals, ...]]:
    """Return what asks a job to end before its loop serves, and the signals left to that loop.

    A node by itself has nothing to save and ends at once. One of several goes on to its loop, where
    the other nodes are asked as well.
    """
    if settings.rendezvous is None:
        return (events.PreemptAsked,), ()
    return (), settings.preempt_signals


def count_devices(
    settings: Settings, group: WorkerGroup, inbox: Inbox, patience: float
) -> int | Interruption:
    """Ask the server how many devices there are; return what has interrupted that, if it was.

    Raises:
        ServerError: it has ended, or has not answered for ``patience`` seconds.
        UsageError: it cannot tell.
    """
    kind = settings.nproc_per_node
    interpreter = settings.interpreter
    group.server.send({"op": "count_devices", "kind": kind, "interpreter": interpreter})
    asking, keeping = preempting(settings)
    kinds = (events.DevicesCounted, events.ServerLost, *asking)
    with telling(lambda passed: COUNTING.format(seconds=passed, interpreter=interpreter)):
        event = await_one(inbox, kinds, settings.forward_signals, patience, keeping=keeping)
    if event is None:
        raise ServerError(
            f"the server has not counted the devices for {patience:g} s: does the file system of "
            f"{interpreter} answer? --nproc-per-node with a number does not need it"
        )
    if isinstance(event, events.SignalReceived | events.PreemptAsked):
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
