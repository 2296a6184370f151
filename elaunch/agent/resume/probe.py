"""The look at the checkpoint directory before the first round, in a thread of its own.

Storage may hang, so the loop waits for the answer (``events.DirectoryProbed``), ANSWER_S at the
longest. With several nodes and one directory this also leaves the mark by which the coordinator
sees that they share it (elaunch.checkpoint.probe, elaunch.rendezvous.decide.sharing).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from elaunch.agent.policy import events
from elaunch.agent.startup import Inbox, Interruption, await_one, preempting
from elaunch.config import Settings
from elaunch.errors import UsageError

ANSWER_S: Final = 30.0
CLOSE_S: Final = 2.0
"""Seconds at the end for the storage to take the mark back."""

log = logging.getLogger("elaunch")


class DirectoryProbe:
    """Owns the thread, and the mark in the directory while the agent lives.

    Args:
        settings: of the job; without a directory on a file system there is nothing to do.
        post: takes the answer.
    """

    def __init__(self, settings: Settings, post: Callable[[events.Event], None]) -> None:
        self._settings = settings
        self._post = post
        place = settings.checkpoint_dir
        self._place = place if isinstance(place, Path) else None
        shares = settings.rendezvous is not None and not settings.checkpoint_local
        self.nonce = os.urandom(8).hex() if shares and self._place is not None else ""
        """Name of the mark; "" where no other node has to see one."""
        self._marked = False

    def start(self) -> None:
        """Begin to look, if there is anything to look at."""
        if self._place is not None:
            threading.Thread(target=self._run, name="probe", daemon=True).start()

    def close(self) -> None:
        """Take the mark back, if the storage answers within CLOSE_S."""
        if self._marked and self._place is not None:
            from elaunch.checkpoint import probe
            from elaunch.checkpoint.storage import atonce

            atonce.within(CLOSE_S, partial(probe.remove_mark, self._place, self.nonce), "unprobe")

    def await_answer(self, inbox: Inbox) -> Interruption | None:
        """Wait until the directory was looked at; return what has interrupted that, if it was.

        Raises:
            UsageError: it cannot be used, or the storage has not answered within ANSWER_S.
        """
        if self._place is None:
            return None
        asking, keeping = preempting(self._settings)
        passing = self._settings.forward_signals
        kinds = (events.DirectoryProbed, *asking)
        event = await_one(inbox, kinds, passing, ANSWER_S, keeping=keeping)
        if isinstance(event, events.SignalReceived | events.PreemptAsked):
            return event
        if not isinstance(event, events.DirectoryProbed):
            raise UsageError(
                f"--checkpoint-dir {self._place}: the file system has not answered on "
                f"{os.uname().nodename} within {ANSWER_S:g} s; is its server up?"
            )
        if event.problem:
            raise UsageError(event.problem)
        if event.remark:
            log.warning("%s", event.remark)
        return None

    def _run(self) -> None:
        from elaunch.checkpoint import probe

        settings, place = self._settings, self._place
        assert place is not None  # start() has looked
        try:
            found = probe.check(place, settings.checkpoint_local, bool(settings.checkpoint_keep))
            if self.nonce:
                self._marked = True
                probe.leave_mark(place, self.nonce)
        except UsageError as error:
            self._post(events.DirectoryProbed(str(error)))
        else:
            self._post(events.DirectoryProbed(remark=found.remark))
