"""Waits that are logged, and calls to a file system that have a deadline."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from elaunch import atonce

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


_hanging: dict[int, Path] = {}
"""Where the calls that still hang were made, each by a number."""
_numbers = itertools.count()


def bounded(call: Callable[[], _T], otherwise: _T, what: str, where: Path) -> _T:
    """Return what a call to a file system returns; ``otherwise`` where it hangs, or fails.

    The call is made in a thread; after FILES_S the loop goes on without it, and logs ``what``. As
    long as it hangs, no other is made below ``where``: many workers would take many times as long.
    """
    if any(where.is_relative_to(at) or at.is_relative_to(where) for at in [*_hanging.values()]):
        return otherwise
    found: list[_T] = []
    number = next(_numbers)

    def run() -> None:
        try:
            found.append(call())
        finally:
            _hanging.pop(number, None)

    try:
        _hanging[number] = where
        if atonce.within(FILES_S, run, "files"):
            return found[0]
        log.warning("%s: the file system does not answer for %g s; going on", what, FILES_S)
    except OSError as error:
        log.warning("%s: %s; going on", what, error.strerror or error)
    return otherwise
