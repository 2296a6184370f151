"""Progress read from what workers print (``--progress-regex``): a hook in the log pump.

A line of a worker's stdout or stderr that the expression matches is progress of that worker; a
group in the expression is its step. Lines end with a line feed or, as progress bars do it, with a
carriage return; of a longer one only the first LONGEST bytes are looked at.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LONGEST: Final = 4096


@dataclass(frozen=True)
class LineMark:
    """The matching lines of one worker so far; ``at`` is when the newest came (monotonic)."""

    count: int
    step: int | None
    at: float


class ProgressLines:
    """Counts the matching lines of each worker of a round."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self._lock = threading.Lock()
        self._marks: dict[int, LineMark] = {}
        self.ever = False
        """Whether any line of this run has matched."""

    def begin(self) -> None:
        """Forget the lines of the round before."""
        with self._lock:
            self._marks = {}

    def marks(self) -> dict[int, LineMark]:
        """Return what is known by local rank; of workers without a matching line nothing."""
        with self._lock:
            return dict(self._marks)

    def listener(self, local_rank: int) -> Callable[[bytes], None]:
        """Return what takes the bytes of one stream of a worker, as they are read."""
        held = bytearray()

        def hear(data: bytes) -> None:
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end:
                self._search(local_rank, bytes(held) + data[:end])
                held.clear()
            held.extend(data[end : end + max(0, LONGEST - len(held))])

        return hear

    def _search(self, local_rank: int, text: bytes) -> None:
        for line in text.replace(b"\r", b"\n").split(b"\n"):
            found = (
                self._pattern.search(line[:LONGEST].decode("utf-8", "replace")) if line else None
            )
            if found is not None:
                self._note(local_rank, _step(found))

    def _note(self, local_rank: int, step: int | None) -> None:
        with self._lock:
            before = self._marks.get(local_rank)
            count = 1 if before is None else before.count + 1
            known = step if step is not None or before is None else before.step
            self.ever = True
            self._marks[local_rank] = LineMark(count, known, time.monotonic())


def _step(found: re.Match[str]) -> int | None:
    if found.re.groups == 0 or found[1] is None:
        return None
    try:
        return int(found[1].replace(",", ""))
    except ValueError:  # the group took something else; the line is progress all the same
        return None
