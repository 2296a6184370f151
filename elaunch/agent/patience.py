"""Waits that are logged, and calls to a file system that have a deadline."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from elaunch.checkpoint.storage import atonce

FIRST_S: Final = 10.0
"""Seconds after which a wait is logged, and again after every REPEAT_S."""
REPEAT_S: Final = 60.0

FILES_S: Final = 2.0
"""Seconds for a file system to answer the agent's loop."""

log = logging.getLogger("elaunch")


@contextlib.contextmanager
def logged_wait(what: Callable[[float], str]) -> Iterator[None]:
    """Log ``what(seconds)`` now and then while the block goes on; seconds since it began.

    Nothing is logged where that is "".
    """
    began = time.monotonic()

    def report() -> None:
        if text := what(time.monotonic() - began):
            log.warning("%s", text)

    with repeatedly(report, FIRST_S, REPEAT_S):
        yield


@contextlib.contextmanager
def repeatedly(
    call: Callable[[], object], first: float, then: float, ends_in: float = 0.0
) -> Iterator[None]:
    """Make a call ``first`` seconds from now, and every ``then`` seconds, while the block goes on.

    It is made in a thread; where none can be had, it is not made. The end of the block waits
    ``ends_in`` seconds for one that is being made.
    """
    over = threading.Event()

    def run() -> None:
        pause = first
        while not over.wait(pause):
            call()
            pause = then

    thread = threading.Thread(target=run, name="patience", daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join(ends_in)


_T = TypeVar("_T")


def bounded(call: Callable[[], _T], otherwise: _T, what: str) -> _T:
    """Return what a call to a file system returns; ``otherwise`` where it hangs, or fails.

    The call is made in a thread; after FILES_S the loop goes on without it, and logs ``what``.
    """
    found: list[_T] = []
    try:
        if atonce.within(FILES_S, lambda: found.append(call()), "files"):
            return found[0]
        log.warning("%s: the file system does not answer for %g s; going on", what, FILES_S)
    except OSError as error:
        log.warning("%s: %s; going on", what, error.strerror or error)
    return otherwise
