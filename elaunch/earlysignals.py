"""Signals that come before anything handles them: held back until the handlers stand.

A signal that the command has no handler for yet would end it by the kernel's default action: one
that asks a job to save (SIGUSR1) in its first second would kill it. The first lines of the command
hold such signals back (:func:`hold`), and the code that installs the handlers lets them come
(:func:`release`). SIGTERM and SIGINT are not held back: they end the command at any moment.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import Final

# Those that are errors of the process itself, job control, and those that are harmless stay.
_NEVER_HELD: Final = frozenset(
    {
        *(signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP),
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT),
        *(signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGCHLD),
        *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT),
    }
)

_held: set[int] = set()


def hold() -> None:
    """Hold back what this process has no handler for yet; in the main thread, before others."""
    wanted = signal.valid_signals() - _NEVER_HELD
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    _held.update(wanted - before)


def release(awaited: Collection[int] = ()) -> None:
    """Let come what was held back, to the handlers that stand now; in the main thread.

    ``awaited`` are held back from now on as well: a thread waits for them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    done = _held.difference(awaited)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, done)
    _held.difference_update(done)
    _held.update(set(awaited) - before)


def usual_mask() -> set[int]:
    """Return what the calling thread blocks beside that: a child is to block it, too."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()) - _held
