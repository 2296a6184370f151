"""Progress read from the checkpoint directory: the newest one's step, and that it is written.

Storage may hang, so a thread of its own looks at it, and only while nothing better shows the job's
progress. Names and times of files are enough: what is complete matters when one is loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elaunch.errors import ElaunchError

KNOWN: Final = 2
"""New checkpoints after which it is known how often the script saves."""
JOIN_S: Final = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Growth:
    """What the directory holds: how many checkpoints, the newest's step, the newest change."""

    number: int
    step: int
    changed_ns: int


@dataclass(frozen=True)
class CheckpointPace:
    """How often new checkpoints came so far; ``pause`` is the longest, in seconds."""

    growth: Growth | None = None
    at: float | None = None
    news: int = 0
    pause: float = 0.0

    def seen(self, growth: Growth, now: float) -> CheckpointPace:
        """Return it after another look at the directory."""
        before = self.growth
        if before is None or growth.step == before.step:
            return CheckpointPace(growth, self.at, self.news, self.pause)
        pause = self.pause if self.at is None else max(self.pause, now - self.at)
        return CheckpointPace(growth, now, self.news + 1, pause)

    @property
    def known(self) -> bool:
        """Whether the script has saved often enough to be judged by it."""
        return self.news >= KNOWN


class CheckpointGrowth:
    """Looks at a directory of checkpoints, from :meth:`start` to :meth:`close`.

    Args:
        root: the directory; it may not exist yet.
        glob: which names in it are checkpoints; None for those that elaunch knows.
        interval: seconds between two looks.
    """

    def __init__(self, root: Path, glob: str | None, interval: float) -> None:
        self._root = root
        self._glob = glob
        self._interval = interval
        self._pace = CheckpointPace()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint growth", daemon=True)
        self.wanted = False

    @property
    def pace(self) -> CheckpointPace:
        """What is known at present."""
        return self._pace

    def start(self) -> None:
        """Begin to look, while ``wanted``."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that hangs in the storage is left alone."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            if self.wanted:
                self._look()

    def _look(self) -> None:
        try:
            growth = look(self._root, self._glob)
        except (ElaunchError, OSError) as error:
            log.debug("cannot look at %s: %s", self._root, error)
            return
        if growth is not None:
            self._pace = self._pace.seen(growth, time.monotonic())


def look(root: Path, glob: str | None) -> Growth | None:
    """Return what a directory holds; None if nothing in it looks like a checkpoint of a step."""
    from elaunch.checkpoint.search.candidates import Candidate, classify, distinct, entries_below

    entries, _ = entries_below(root, glob)
    found = [classify(entry, globbed=glob is not None) for entry in distinct(entries, root)]
    candidates = [each for each in found if isinstance(each, Candidate)]
    if not candidates:
        return None
    changed = max(each.path.stat().st_mtime_ns for each in candidates)
    return Growth(len(candidates), max(each.step for each in candidates), changed)
