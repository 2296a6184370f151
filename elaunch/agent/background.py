"""A thread beside the job, which nobody waits for long: it reports once, backs off, and ends."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

log = logging.getLogger("elaunch")


class BackgroundWork:
    """Owns a daemon thread, from :meth:`start` to :meth:`close`.

    Args:
        name: the thread's.
        what: the beginning of its problems in the log.
        pause: seconds between two turns; twice as long after each that failed, up to ``longest``.
    """

    def __init__(self, name: str, what: str, pause: float = 0.0, longest: float = math.inf) -> None:
        self.closing = threading.Event()
        self._name = name
        self._what = what
        self._first = self._pause = pause
        self._longest = longest
        self._reported = False
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], None]) -> None:
        """Begin; raises RuntimeError where no thread can be had."""
        thread = threading.Thread(target=run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    @property
    def runs(self) -> bool:
        """Whether it has begun and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def back_off(self, failed: bool) -> float:
        """Return the seconds until the next turn, after one that has failed or has not."""
        self._pause = min(2 * self._pause, self._longest) if failed else self._first
        return self._pause

    def report(self, problem: str) -> None:
        """Warn of the first problem; later ones are for LOGLEVEL=DEBUG."""
        level = logging.DEBUG if self._reported else logging.WARNING
        log.log(level, "%s %s", self._what, problem)
        self._reported = True

    def close(self, seconds: float) -> bool:
        """Have it end, and wait for that; return whether it has."""
        self.closing.set()
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.runs
