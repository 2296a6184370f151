"""End everything below the server: politely for the grace, then by SIGKILL, then give up by name.

A process in uninterruptible sleep cannot be killed; it is reported as a survivor, not waited for.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

from elaunch import proc
from elaunch.proc import Process
from elaunch.server import processes
from elaunch.wire.local import Message

LOOK_AGAIN = 0.02
"""Seconds between looks while killing: a process that forks in the same moment is found then."""


class Sweep:
    """One ``sweep`` of the agent; ``step`` it whenever a child ended or ``next_look`` has come.

    ``spared`` returns the pids of those below ``root`` that live on, with all that is below them.
    """

    def __init__(self, message: Message, root: int, spared: Callable[[], Iterable[int]]) -> None:
        self._round = message["round"]
        self._root = root
        self._spared = spared
        self._killed: dict[int, str] = {}
        self._survivors: list[Process] = []
        now = time.monotonic()
        self._kill_at = now + message["grace"]
        self._give_up_at = self._kill_at + message["deadline"]
        if message["signum"]:
            for process in self._living():
                processes.send_signal(process, message["signum"])

    def _living(self) -> list[Process]:
        return proc.descendants(self._root, exclude=self._spared())

    def next_look(self) -> float:
        """Return when to step next, on the monotonic clock, if no child ends before."""
        now = time.monotonic()
        return self._kill_at if now < self._kill_at else now + LOOK_AGAIN

    def step(self) -> bool:
        """Kill what is due; True when nothing is left or nothing more can be done."""
        living = self._living()
        if not living:
            # Look twice: a process that forks between two reads hides in one of them.
            return not self._living()
        now = time.monotonic()
        if now < self._kill_at:
            return False
        for process in living:
            if processes.send_signal(process, signal.SIGKILL):
                self._killed[process.pid] = process.name
        if now < self._give_up_at:
            return False
        self._survivors = living
        return True

    def outcome(self) -> Message:
        """Return the ``swept`` message."""
        survivors = [[process.pid, process.name] for process in self._survivors]
        killed = [[pid, name] for pid, name in self._killed.items()]
        return {"op": "swept", "round": self._round, "killed": killed, "survivors": survivors}
