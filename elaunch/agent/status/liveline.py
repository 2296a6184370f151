"""``elaunch run --progress``: how far the job is, in one line that is always the last one.

On a terminal it is drawn anew each second, below what the workers print, and gone at the end.
Elsewhere it is an ordinary line of the agent's, every PLAIN_S. A thread reads the run's record for
it; the log pump, which alone writes to the console, draws it (elaunch.agent.logs.console).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from elaunch.agent.logs.pump import LogPump
from elaunch.runs import verdict
from elaunch.runs.pace import StepRate
from elaunch.text import duration

DRAWN_S: Final = 1.0
PLAIN_S: Final = 30.0


class LiveLine:
    """Owns the thread, from :meth:`start` to the end of its stack.

    Args:
        pump: shows the line.
        snapshot: returns the run's record, with the progress of now.
    """

    def __init__(self, pump: LogPump, snapshot: Callable[[], Mapping[str, Any]]) -> None:
        self._pump = pump
        self._snapshot = snapshot
        self._pace = StepRate()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self, stack: ExitStack) -> None:
        """Begin to show it; ``stack`` takes it away."""
        self._thread.start()
        stack.callback(self._close)

    def _close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._pump.show_live("")

    def _run(self) -> None:
        plain_at = time.monotonic() + PLAIN_S
        while not self._closing.wait(DRAWN_S):
            line = line_of(self._snapshot(), self._pace, time.time())
            if self._pump.on_terminal:
                self._pump.show_live(line)
            elif time.monotonic() >= plain_at:
                plain_at = time.monotonic() + PLAIN_S
                self._pump.show(line)


def line_of(record: Mapping[str, Any], pace: StepRate, now: float) -> str:
    """Return the line for a record that was read ``now``, in seconds since the epoch."""
    workers = (record.get("progress") or {}).get("workers", ())
    pace.see(now, record["round"], workers)
    parts = [] if record["state"] == "RUNNING" else [record["state"]]
    parts.append(pace.text() or f"no step is reported, for {duration(now - record['started_at'])}")
    timing = record.get("timing")
    if timing and timing["wall_s"] > 0:
        parts.append(f"goodput {100 * verdict.goodput(timing):.1f} %")
    if record["round"]:
        parts.append(f"round {record['round']}")
    return f"elaunch: {', '.join(parts)}"
