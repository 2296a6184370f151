"""CPU time of process trees, as a sign of life of workers that report no progress."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from elaunch.server.processes import descendants

LEAST_S: Final = 0.03
LEAST_SHARE: Final = 0.02
"""What counts as use: a process that waits still wakes up now and then for its own threads."""

_TICK: Final = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Used:
    """How often a worker's tree was seen to have used the CPU; ``seconds`` it had at ``at``."""

    count: int
    seconds: float
    at: float

    def again(self, seconds: float, now: float) -> Used:
        """Return it after another measurement."""
        used = seconds - self.seconds
        if used > max(LEAST_S, LEAST_SHARE * (now - self.at)):
            return Used(self.count + 1, seconds, now)
        # A descendant that was nobody's child takes its seconds with it.
        return Used(self.count, min(seconds, self.seconds), self.at)


def tree_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, its descendants, and those they have waited for."""
    pids: Iterable[int] = (pid, *(process.pid for process in descendants(pid)))
    return sum(_seconds(one) for one in pids)


def _seconds(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = raw[raw.rindex(b")") + 2 :].split()
    return sum(map(int, fields[11:15])) * _TICK
