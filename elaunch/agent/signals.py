"""Signals become events: a handler does nothing but put one into the queue.

SIGHUP stays ignored, here and in the workers, where the launcher's parent had ignored it before:
that is what ``nohup`` does. SIGINT and SIGQUIT are taken all the same: a shell ignores them for its
background jobs, and torchrun handles them there, too.
"""

from __future__ import annotations

import signal
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


def not_ignored(signums: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return those that the launcher's parent has not ignored: the workers are to inherit that."""
    return tuple(each for each in signums if signal.getsignal(each) is not signal.SIG_IGN)


def ignore(signums: Iterable[signal.Signals]) -> None:
    """Ignore ``signums`` from now on: the exit code stands, whatever comes while Python ends."""
    for signum in signums:
        signal.signal(signum, signal.SIG_IGN)
