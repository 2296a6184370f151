"""``--on-event``: a command, or a URL, that gets what happens to the job (docs/events.md).

===========  =================================================  =================================
event        when                                               of several nodes
===========  =================================================  =================================
started      the first round begins                             the agent of node 0
restarted    another round begins                               the agent of node 0
hang         a hang was seen, and the round is ended            each agent that sees it
saved        a checkpoint was committed                         the agent of node 0
preempted    the workers are asked to save and to end           each agent
ended        the job is over                                    the agent of node 0
===========  =================================================  =================================

A thread hands over one after the other, each within RUN_S; the loop only appends to its queue. At
the end of the job the last ones have CLOSE_S together. What cannot be handed over is logged once.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from elaunch.agent.background import BackgroundWork
from elaunch.agent.children import Reaper, ShellCommand
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import Finish, Notify
from elaunch.agent.policy.turn import Turn
from elaunch.agent.status.posting import REFUSED, post
from elaunch.endings import how_it_ended
from elaunch.text import one_line

RUN_S: Final = 10.0
"""Seconds for the command; then it is killed."""
CLOSE_S: Final = 5.0
"""Seconds that the end of the job waits for what is not handed over yet."""
SAVES_EVERY_S: Final = 1.0
"""Seconds between two looks at what was committed."""
MOST_WAITING: Final = 256
"""Events that wait; of more the newest are left out."""
SHOWN: Final = 300
LONGEST_TEXT: Final = 8000

log = logging.getLogger("elaunch")


class EventHook:
    """Owns the thread, from :meth:`start` to :meth:`close`; the loop calls :meth:`see`.

    Args:
        target: a command of the shell, or a URL.
        environ: variables of the command.
        reaper: starts it.
        snapshot: returns the run's record, with what was saved by now.
    """

    def __init__(
        self,
        target: str,
        environ: Mapping[str, str],
        reaper: Reaper,
        snapshot: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._target = target
        self._environ = environ
        self._reaper = reaper
        self._snapshot = snapshot
        self._queue: queue.Queue[dict[str, object] | None] = queue.Queue(MOST_WAITING)
        self._begun = False
        self._leads = True
        self._asked = False
        self._hang: events.HangSeen | None = None
        self._commits = 0
        self._running: ShellCommand | None = None
        self._until = float("inf")
        self._background = BackgroundWork("on-event", "--on-event:")

    def start(self) -> None:
        """Begin to hand over."""
        self._background.start(self._run)

    def close(self) -> None:
        """Have the last ones handed over; takes CLOSE_S, and a moment, at the most."""
        self._until = time.monotonic() + CLOSE_S
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.debug("--on-event: the command is too slow for what happens")
        if not self._background.close(CLOSE_S):
            self._report(f"what happened last was not taken within {CLOSE_S:g} s")
            if self._running is not None:
                self._running.cut()

    def see(self, turn: Turn) -> None:
        """Take what the turn means to others; the record has been written."""
        event, action, after = turn.event, turn.action, turn.after
        if turn.begun is not None:
            self._leads, self._asked = turn.begun.place.node_rank == 0, False
            resumed = turn.begun.resumes_from
            what = {"resumed_step": resumed.step if resumed else None}
            self._tell("restarted" if self._begun else "started", turn, self._leads, what)
            self._begun = True
        elif isinstance(event, events.HangSeen) and event == after.hang != self._hang:
            self._hang = event
            self._tell("hang", turn, True, {"reason": event.reason, "ranks": list(event.ranks)})
        elif isinstance(action, Notify) and action.notice.kind != "resize" and not self._asked:
            self._asked = True
            self._tell("preempted", turn, True, {"grace_s": action.grace})
        if isinstance(action, Finish):
            self._tell("ended", turn, self._leads, {})

    def _tell(self, name: str, turn: Turn, wanted: bool, more: Mapping[str, object]) -> None:
        if not wanted:
            return
        self._put(
            _described(name, self._snapshot(), {"reason": turn.reason[:LONGEST_TEXT], **more})
        )

    def _put(self, happened: dict[str, object]) -> None:
        try:
            self._queue.put_nowait(happened)
        except queue.Full:
            self._report(f"{MOST_WAITING} events wait to be taken; some are left out")

    # What follows is called by the thread only, but for _report.

    def _run(self) -> None:
        try:
            while True:
                try:
                    happened = self._queue.get(timeout=SAVES_EVERY_S)
                except queue.Empty:
                    self._look_for_saves()
                    continue
                if happened is None or happened["event"] == "ended":
                    self._look_for_saves()
                if happened is None:
                    return
                self._hand_over(happened)
        except Exception:
            log.exception("--on-event gets nothing more")

    def _look_for_saves(self) -> None:
        record = self._snapshot()
        saves = record.get("saves") or {}
        commits = saves.get("commits") or 0
        if commits > self._commits and self._leads:
            more = {"step": saves["step"], "seconds": saves["seconds"], "commits": commits}
            self._hand_over(_described("saved", record, {"reason": "", **more}))
        self._commits = commits

    def _hand_over(self, happened: Mapping[str, object]) -> None:
        try:
            if self._target.startswith(("http://", "https://")):
                self._post(happened)
            else:
                self._call(happened)
        except REFUSED as error:
            self._report(str(error))

    def _post(self, happened: Mapping[str, object]) -> None:
        """Post that; an error names the server, and not the path, which may hold a secret."""
        try:
            post(self._target, happened, {})
        except REFUSED as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            server = urlsplit(self._target).netloc.rpartition("@")[2]
            raise OSError(f"{server}: {why}") from None

    def _call(self, happened: Mapping[str, object]) -> None:
        """Run the command with that; raises OSError if it fails."""
        body = json.dumps(happened).encode() + b"\n"
        running = self._running = ShellCommand(
            self._target, self._environ, self._reaper, stdin=body
        )
        until = min(time.monotonic() + RUN_S, self._until)
        try:
            output = _read(running, until)
            in_time = running.wait(max(0.0, until - time.monotonic())) is not None
        finally:
            running.close()
        exitcode = running.wait(1.0)
        if not in_time:
            raise OSError("the command took too long, and was killed")
        if exitcode:
            last = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise OSError(f"the command {how_it_ended(exitcode)}: {last}".rstrip(": "))

    def _report(self, problem: str) -> None:
        self._background.report(one_line(problem[:SHOWN]))


def _described(
    name: str, record: Mapping[str, Any], more: Mapping[str, object]
) -> dict[str, object]:
    fields = ("run_id", "name", "dir", "state", "round", "world_size", "exit_code")
    return {
        "schema": 1,
        "event": name,
        "at": time.time(),
        "host": os.uname().nodename,
        **{field: record[field] for field in fields},
        "node_rank": record.get("node_rank") or 0,
        "restarts": record["restarts"]["used"],
        **more,
    }


def _read(running: ShellCommand, until: float) -> bytes:
    """Return the end of what a command prints, up to its end or the deadline."""
    kept = b""
    while data := running.read(until):
        kept = (kept + data)[-4096:]
    return kept
