"""What commands ask of the agent's loop through its control socket, and what it answers."""

from __future__ import annotations

import queue
import time
from typing import Final

from elaunch.agent.policy import events
from elaunch.agent.status.record import StatusRecord

LOOP_PATIENCE: Final = 1.0
"""Seconds for the loop to answer a request; far less than a client waits."""

Inbox = queue.SimpleQueue[events.Event]


def preempt(
    inbox: Inbox, status_record: StatusRecord, reason: str, left: float | None = None
) -> str:
    """Ask the loop that the job end and be continued; return what is done about it.

    ``left``: seconds until the platform ends it, if that is known.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    inbox.put(events.PreemptAsked(reason, answers.put, left))
    try:
        return answers.get(timeout=LOOP_PATIENCE)
    except queue.Empty:
        code = status_record.snapshot()["exit_code"]
        if code is not None:
            return f"{reason}: the job has ended already, with {code}"
        return f"{reason}: accepted; the agent is busy, and acts on it as soon as it is not"


def restart(inbox: Inbox, reason: str) -> tuple[str, bool]:
    """Ask the loop for another round; return what is done about it, and whether it is."""
    answers: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    inbox.put(events.RestartAsked(reason, answers.put, time.monotonic()))
    try:
        return answers.get(timeout=LOOP_PATIENCE)
    except queue.Empty:
        return f"{reason}: accepted; the agent is busy, and acts on it as soon as it is not", True
