"""Writes the run's record in a thread, so that a file system that hangs does not stop the loop.

The loop waits for its record to be on the disk, as its next reader expects, but only as long as the
file system answers: one that takes longer than PATIENCE is named, and is not waited for
until it has answered. It then gets the newest record; those between are never written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from elaunch.errors import RunDirError

PATIENCE: Final = 1.0
"""Seconds for the file system to take a record."""
LAST_PATIENCE: Final = 5.0
"""Seconds for it to take the last one."""
THAWED_S: Final = 0.2
"""Seconds more, which a process that was frozen for longer than its patience still has."""


class RecordWriter:
    """Owns the thread, from the first :meth:`put` on; only the loop calls that.

    Args:
        write: replaces the record; raises RunDirError where it cannot.
        warn: takes what is wrong, each problem once.
    """

    def __init__(self, write: Callable[[str, bool], None], warn: Callable[[str], None]) -> None:
        self._write = write
        self._warn = warn
        self._problem = ""
        self._changed = threading.Condition()
        self._next: tuple[str, bool] | None = None
        self._given = self._done = 0
        self._late = False
        self._thread: threading.Thread | None = None

    def put(self, text: str, is_last: bool = False) -> bool:
        """Have ``text`` written; return whether it is, as long as the file system may take."""
        patience = LAST_PATIENCE if is_last else PATIENCE
        with self._changed:
            self._next = text, is_last
            self._given += 1
            number, known = self._given, self._late
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="record", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if known and not is_last:
                return False
            done = any(
                self._changed.wait_for(lambda: self._done >= number, seconds)
                for seconds in (patience, THAWED_S)
            )
            self._late = not done
        if not done and not known:
            self._warn(
                f"the file system of the run directory has not taken the record for {patience:g} "
                "s; going on without it: `elaunch status` reads the agent's own"
            )
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                (text, is_last), self._next = self._next or ("", False), None
                number = self._given
            problem = ""
            try:
                self._write(text, is_last)
            except RunDirError as error:
                problem = str(error)
            with self._changed:
                self._done, self._late = number, False
                news, self._problem = problem not in ("", self._problem), problem or self._problem
                self._changed.notify_all()
            if news:
                self._warn(f"{problem}; `elaunch status` will be out of date")
