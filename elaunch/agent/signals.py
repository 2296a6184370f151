"""Signals become events, and the time of --preempt-at: all that is done is to post one.

SIGHUP stays ignored, here and in the workers, where the launcher's parent had ignored it before:
that is what ``nohup`` does. SIGINT and SIGQUIT are taken all the same: a shell ignores them for its
background jobs, and torchrun handles them there, too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

from elaunch import earlysignals
from elaunch.agent.policy import events


def install(signums: Iterable[signal.Signals], post: Callable[[events.Event], None]) -> None:
    """Post SignalReceived for each of ``signums``, those that came early included.

    Must be called in the main thread.
    """

    def handler(signum: int, frame: FrameType | None) -> None:
        post(events.SignalReceived(signal.Signals(signum)))

    for signum in signums:
        if signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
            continue
        signal.signal(signum, handler)
    earlysignals.release()


def timer(
    at: float, before_end: float | None, post: Callable[[events.Event], None]
) -> threading.Timer:
    """Return a started timer that posts PreemptAsked ``at`` that time, in seconds of the epoch.

    ``before_end``: how long before the platform's end that is; what is left counts when it fires.
    """

    def due() -> None:
        left = None if before_end is None else max(0.0, at + before_end - time.time())
        post(events.PreemptAsked("the time of --preempt-at has come", lambda _: None, left))

    # A wait of C's may not be longer than this; nobody waits for 100 days.
    made = threading.Timer(min(max(0.0, at - time.time()), threading.TIMEOUT_MAX, 8_640_000.0), due)
    made.daemon = True
    made.start()
    return made


def not_ignored(signums: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return those that the launcher's parent has not ignored: the workers are to inherit that."""
    return tuple(each for each in signums if signal.getsignal(each) is not signal.SIG_IGN)


def ignore(signums: Iterable[signal.Signals]) -> None:
    """Ignore ``signums`` from now on: the exit code stands, whatever comes while Python ends."""
    for signum in signums:
        signal.signal(signum, signal.SIG_IGN)
