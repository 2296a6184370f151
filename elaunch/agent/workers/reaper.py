"""Waits for the agent's children: the server, and orphans that come to a subreaper or to PID 1.

One thread in ``waitpid(-1)`` for the agent's whole life. A second one would take the ends of
children that the first is asked about.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence

Ended = Callable[[int], None]


class Reaper:
    """Starts children in sessions of their own and tells their starters of their ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[int, Ended] = {}
        self._any_child = threading.Event()
        self._thread: threading.Thread | None = None

    def spawn(self, argv: Sequence[str], environ: Mapping[str, str], ended: Ended) -> int:
        """Start ``argv`` and return its pid; raises OSError.

        ``ended`` is called once, in the reaper's thread, with the exit code (negative: signal).
        """
        with self._lock:  # a child that ends at once is looked up when it is known, not before
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                environ,
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
            self._ended[pid] = ended
        self._any_child.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._reap, name="reaper", daemon=True)
            self._thread.start()
        return pid

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:  # none at all: the next spawn wakes this thread
                self._any_child.wait()
                self._any_child.clear()
                continue
            with self._lock:
                ended = self._ended.pop(pid, None)
            if ended is not None:
                ended(os.waitstatus_to_exitcode(status))
