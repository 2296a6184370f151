"""How busy the processes of a DataLoader are, of any script.

torch calls them ``pt_data_worker``. Each prepares batches ahead until its queue is full, and then
waits. So where it computes nearly all of the time, its queue is never full: the training takes the
batches as fast as they come. Only its first thread counts, which runs the dataset's code. One that
waits for a disk is not busy, and nothing is known of a DataLoader without processes of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from elaunch import proc
from elaunch.runs.record import LoaderRecord

NAME: Final = "pt_data_worker"


class _Seen(NamedTuple):
    """A process at a moment: seconds since boot, and its first thread's processor time."""

    at: float
    computed: float


class LoaderActivity:
    """Adds up the time of all DataLoader processes that it has seen; one thread may look."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._most = 0
        self._computed = self._lived = 0.0

    def look(self, workers: Iterable[int]) -> None:
        """Read the DataLoader processes below these workers; a new one counts from its start."""
        seen: dict[str, _Seen] = {}
        for worker in workers:
            found = dict(filter(None, map(_read, proc.children(worker))))
            self._most = max(self._most, len(found))
            seen |= found
        for key, one in seen.items():
            before = self._seen.get(key) or _Seen(int(key.partition(".")[2]) / proc.TICKS, 0.0)
            self._computed += one.computed - before.computed
            self._lived += max(0.0, one.at - before.at)
        self._seen = seen

    def record(self, slots: int) -> LoaderRecord | None:
        """Return what is known of so many workers; None where none has had such a process."""
        if not self._most or self._lived <= 0:
            return None
        cpus = proc.cpus() // slots
        busy = min(1.0, self._computed / self._lived)
        return {"processes": self._most, "seconds": self._lived, "busy": busy, "cpus": cpus}


def _read(pid: int) -> tuple[str, _Seen] | None:
    found = proc.stat(f"/proc/{pid}/task/{pid}")
    if found is None or found[0] != NAME:
        return None
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return f"{pid}.{found[1][19]}", _Seen(now, proc.ticks(found[1]) / proc.TICKS)
