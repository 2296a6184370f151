"""The look at the checkpoint directory before the first round, in a thread of its own.

Storage may hang: the answer, ``events.DirectoryProbed``, comes after ANSWER_S at the latest. It is
posted at once where there is no directory to look at. With several nodes and one directory this
also leaves the mark by which the coordinator sees that they share it (elaunch.checkpoint.probe,
elaunch.rendezvous.decide.sharing).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from elaunch.agent.policy import events
from elaunch.config import Settings
from elaunch.errors import UsageError

ANSWER_S: Final = 30.0
CLOSE_S: Final = 2.0
"""Seconds at the end for the storage to take the mark back."""


class DirectoryProbe:
    """Owns the thread, and the mark in the directory while the agent lives.

    Args:
        settings: of the job; without a directory on a file system there is nothing to look at.
        post: takes the answer.
    """

    def __init__(self, settings: Settings, post: Callable[[events.Event], None]) -> None:
        self._settings = settings
        self._post = post
        root = settings.checkpoint_dir
        self._root = root if isinstance(root, Path) else None
        shares = settings.rendezvous is not None and not settings.checkpoint_local
        self.nonce = os.urandom(8).hex() if shares and self._root is not None else ""
        """Name of the mark; "" where no other node has to see one."""
        self._marked = False

    def start(self) -> None:
        """Begin to look, if there is anything to look at."""
        if self._root is None:
            self._post(events.DirectoryProbed())
        else:
            threading.Thread(
                target=self._run, args=(self._root,), name="probe", daemon=True
            ).start()

    def close(self) -> None:
        """Take the mark back, if the storage answers within CLOSE_S."""
        if self._marked and self._root is not None:
            from elaunch.checkpoint import probe
            from elaunch.checkpoint.storage import atonce

            atonce.within(CLOSE_S, partial(probe.remove_mark, self._root, self.nonce), "unprobe")

    def _run(self, root: Path) -> None:
        from elaunch.checkpoint.storage import atonce

        found: list[str] = []
        try:
            if not atonce.within(ANSWER_S, lambda: found.append(self._look(root)), "probe files"):
                raise UsageError(
                    f"--checkpoint-dir {root}: the file system has not answered on "
                    f"{os.uname().nodename} within {ANSWER_S:g} s; is its server up?"
                )
        except UsageError as error:
            self._post(events.DirectoryProbed(str(error)))
        except Exception as error:  # the loop waits for the answer, whatever it is
            problem = f"--checkpoint-dir {root}: {type(error).__name__}: {error}"
            self._post(events.DirectoryProbed(problem))
        else:
            self._post(events.DirectoryProbed(remark=found[0]))

    def _look(self, root: Path) -> str:
        """Return what is odd about the directory, or ""; leave the mark, if any."""
        from elaunch.checkpoint import probe

        settings = self._settings
        found = probe.check(root, settings.checkpoint_local, bool(settings.checkpoint_keep))
        if self.nonce:
            self._marked = True
            probe.leave_mark(root, self.nonce)
        return found.remark
