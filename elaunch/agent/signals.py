"""Signals become events: all that is done about one is to post it.

They are blocked in the main thread, and so in all threads that it starts. A thread waits for them,
and so learns who has sent each. A thread that was there before (a profiler's) may take one instead.
A handler in Python then runs only once the main thread wakes, which in a loop that waits for an
event is never. So another thread reads such signals from the file descriptor that the interpreter
writes to in whichever thread is interrupted (signal.set_wakeup_fd).

A request to end is often sent twice: ``uv run``, a trap in bash or a supervisor forwards what the
process group has got already, and a terminal that closes sends SIGHUP beside a wrapper's SIGTERM.
A second signal that ends the job within SAME_SIGNAL seconds is dropped, since a second request
would cut a save short. One that means something else to this job is dropped after itself only.

SIGHUP stays ignored, here and in the workers, where the launcher's parent had ignored it before:
that is what ``nohup`` does. SIGINT and SIGQUIT are taken all the same: a shell ignores them for its
background jobs, and torchrun handles them there, too.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from elaunch import earlysignals, proc
from elaunch.agent.policy import events

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SAME_SIGNAL: Final = 1.0
"""Seconds in which a second signal is the same request."""

log = logging.getLogger("elaunch")


def install(
    signums: Iterable[signal.Signals],
    post: Callable[[events.Event], None],
    *,
    ending: Collection[signal.Signals] = ENDING,
) -> None:
    """Post SignalReceived for each of ``signums``, those that came early included.

    ``ending`` are those that ask for the end: different ones are the same request. ``post`` is
    called in threads of this module. Must be called in the main thread, once.
    """
    handled = frozenset(
        signum
        for signum in signums
        if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN
    )
    received, written = os.pipe()
    os.set_blocking(written, False)

    taken: dict[signal.Signals | None, tuple[float, signal.Signals]] = {}
    deciding = threading.Lock()  # two threads take signals

    def take(number: int, sender: str) -> None:
        signum = signal.Signals(number)
        request = None if signum in ending else signum
        with deciding:
            now = time.monotonic()
            at, first = taken.get(request, (-math.inf, signum))
            again = now - at < SAME_SIGNAL
            if not again and (request is None or signum in ENDING):
                taken[request] = now, signum
        if again and first == signum == signal.SIGINT and not sender:  # Ctrl-C was pressed twice
            what = "%s within %g s counts as one; press Ctrl-C again to kill the workers"
            log.warning(what, signum.name, SAME_SIGNAL)
        elif again:
            log.info("%s within %g s is the same request%s", signum.name, SAME_SIGNAL, sender)
        else:
            post(events.SignalReceived(signum, sender=sender))

    def read() -> None:
        while True:
            for number in os.read(received, 64):
                if number in handled:
                    take(number, "")

    def wait() -> None:
        while True:
            found, term = signal.sigwaitinfo(handled), None
            if found.si_signo in ending:
                # Of two that came together the kernel hands out the lower number first; SIGTERM is
                # the one that asks workers to save.
                term = signal.sigtimedwait(handled & {signal.SIGTERM}, 0)
            for each in (term, found):
                if each is not None:
                    take(each.si_signo, _sender(each.si_pid))

    signal.set_wakeup_fd(written)
    for signum in handled:
        signal.signal(signum, lambda *_: None)  # or the interpreter writes nothing
    earlysignals.release(handled)
    for work in (read, wait) if handled else (read,):
        threading.Thread(target=work, name="signals", daemon=True).start()


def _sender(pid: int) -> str:
    """Return " (sent by NAME, pid N)"; nothing for the terminal, or another pid namespace."""
    if not pid:
        return ""
    process = proc.read_process(pid)
    return f" (sent by pid {pid})" if process is None else f" (sent by {process.name}, pid {pid})"


def ignore(signums: Iterable[signal.Signals]) -> None:
    """Ignore ``signums`` from now on: the exit code stands, whatever comes while Python ends."""
    for signum in signums:
        signal.signal(signum, signal.SIG_IGN)
