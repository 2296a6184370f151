"""Signals become events: all that is done about one is to post it.

The kernel may hand a signal to any thread, and does where another one is pending for the main
thread. A handler in Python then runs only once the main thread wakes, which in a loop that waits
for an event is never. So a thread of its own reads which signals came from the file descriptor that
the interpreter writes to in whichever thread is interrupted (signal.set_wakeup_fd).

SIGHUP stays ignored, here and in the workers, where the launcher's parent had ignored it before:
that is what ``nohup`` does. SIGINT and SIGQUIT are taken all the same: a shell ignores them for its
background jobs, and torchrun handles them there, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from elaunch import earlysignals
from elaunch.agent.policy import events


def install(signums: Iterable[signal.Signals], post: Callable[[events.Event], None]) -> None:
    """Post SignalReceived for each of ``signums``, those that came early included.

    ``post`` is called in a thread of its own. Must be called in the main thread, once.
    """
    handled = frozenset(
        signum
        for signum in signums
        if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
    )
    received, written = os.pipe()
    os.set_blocking(written, False)

    def read() -> None:
        while True:
            for number in os.read(received, 64):
                if number in handled:
                    post(events.SignalReceived(signal.Signals(number)))

    threading.Thread(target=read, name="signals", daemon=True).start()
    signal.set_wakeup_fd(written)
    for signum in handled:
        signal.signal(signum, lambda *_: None)  # or the interpreter writes nothing
    earlysignals.release()


def ignore(signums: Iterable[signal.Signals]) -> None:
    """Ignore ``signums`` from now on: the exit code stands, whatever comes while Python ends."""
    for signum in signums:
        signal.signal(signum, signal.SIG_IGN)
