"""The decision log: logs what happens, once and with the reason of the decision.

Where the first rank to fail is likely the victim of another one, the lines that say so are kept
until that one is known: the plan names it as soon as the ends of all workers, of all nodes, are
known. Nothing else waits for that, and the lines not longer than HOLD_S.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from elaunch import env, proc
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import Action, EndTree, Finish, Meet, Nothing, StartRound
from elaunch.agent.policy.state import State
from elaunch.agent.policy.turn import Turn
from elaunch.agent.resume import latest
from elaunch.checkpoint.formats import dcp
from elaunch.config import Settings
from elaunch.rendezvous import text
from elaunch.rendezvous.text import UNACCUSED
from elaunch.runs.verdict import BY_REASON

PASSED_OVER_SHOWN = 10
HOLD_S: Final = 1.0
"""Seconds for which a line is kept that accuses nobody."""

log = logging.getLogger("elaunch")


class DecisionLog:
    """Logs events and decisions; remembers what need not be logged again."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._passed_over: set[str] = set()
        self._lock = threading.Lock()
        self._held: list[tuple[int, str]] = []

    def see(self, turn: Turn) -> None:
        """Log what the event means to a reader, then why the action follows it."""
        event, reason = turn.event, turn.reason
        if culprit := _culprit(turn.before):
            self.release(culprit)
        if isinstance(event, events.TreeGone) and event.round >= 0:
            self._tell_leftovers(event, turn.before)
        elif isinstance(event, events.CheckpointChosen):
            self._tell_passed_over(event)
        elif isinstance(event, events.ServerWarmed):
            self._tell_warmed(event)
        elif isinstance(event, events.SavesSettled):
            self._tell_settled(event)
        elif isinstance(event, events.DirectoryProbed | events.DevicesCounted):
            self._tell_start(turn.before, event)
        elif isinstance(event, events.StoreLost):
            # A script that runs without torch never asks for the store.
            level = logging.INFO if "No module named 'torch'" in event.problem else logging.WARNING
            log.log(level, "the workers' TCPStore is gone: %s", event.problem)
        ends = isinstance(turn.action, Finish) and turn.action.exit_code in BY_REASON
        if reason and not ends:  # then the result, the last line, has the reason
            level = logging.INFO if _is_quiet(turn) else logging.WARNING
            sender = event.sender if isinstance(event, events.SignalReceived) else ""
            line = f"{_round(turn.before, turn.action)}{reason}{sender}"
            self._log(level, line, turn.before)

    def _log(self, level: int, line: str, state: State) -> None:
        """Log a line, or keep it if it accuses nobody and the plan may name somebody yet."""
        is_over = _is_over(state)
        if is_over:
            self.release()
        if UNACCUSED not in line or is_over:
            log.log(level, "%s", line)
            return
        with self._lock:
            self._held.append((level, line))
            is_first = len(self._held) == 1
        if is_first:
            timer = threading.Timer(HOLD_S, self.release)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # no thread can be had
                self.release()

    def release(self, culprit: str = "") -> None:
        """Log the lines that were kept, with the ``culprit`` if it is known; any thread."""
        with self._lock:
            held, self._held = self._held, []
        for level, line in held:
            before, _, after = line.partition(f"{UNACCUSED}: ")
            first, gap, rest = after.partition("; ")
            named = f"{before}{culprit} ({first}){gap}{rest}" if culprit else line
            log.log(level, "%s", named)

    def _tell_start(
        self, state: State, event: events.DirectoryProbed | events.DevicesCounted
    ) -> None:
        """Log what is odd about the directory, and how many threads a worker gets by default."""
        if isinstance(event, events.DirectoryProbed) and event.remark:
            log.warning("%s", event.remark)
        nproc = state.limits.nproc
        if state.can_join and env.default_omp_threads(self._environ, nproc):
            log.warning(
                "%s is not set: each of the %d workers gets 1 thread, so that they do not overload "
                "the machine; set it to tune your script",
                env.OMP_NUM_THREADS,
                nproc,
            )

    def _tell_settled(self, event: events.SavesSettled) -> None:
        for name in event.committed:
            log.info("round %d: %s was in memory and is committed now", event.round, name)
        for line in event.lost:
            log.warning("round %d: lost what was in memory only: %s", event.round, line)

    def _tell_warmed(self, event: events.ServerWarmed) -> None:
        if event.problem is not None:
            log.warning("%s; workers of the next rounds are started without it", event.problem)
        elif event.settings:
            log.info(
                "the later modules of --preload are left to the workers: the script sets %s, which "
                "they read when they are imported",
                ", ".join(event.settings),
            )
        else:
            log.info("the server has imported the later modules in %.2f s", event.seconds)

    def _tell_leftovers(self, event: events.TreeGone, state: State) -> None:
        if event.killed:
            names = ", ".join(f"{name} ({pid})" for pid, name in event.killed)
            level = logging.WARNING if state.completed else logging.INFO
            log.log(level, "round %d: ended what the workers had left: %s", event.round, names)
        for pid, name, user in event.survivors:
            why = "does not die: it hangs in the kernel"
            if user is not None:
                why = (
                    f"is left: it belongs to {proc.user_name(user)}, and elaunch may not signal it"
                )
            log.error("process %d (%s) %s", pid, name, why)

    def _tell_passed_over(self, event: events.CheckpointChosen) -> None:
        if event.search.checkpoint is None and event.problem is None:
            self._tell_none(len(event.search.passed_over))
        lines = [f"skipped {p.path}: {p.reason}" for p in event.search.passed_over]
        news = [line for line in lines if line not in self._passed_over]
        self._passed_over.update(news)
        for line in news[:PASSED_OVER_SHOWN]:
            log.warning("%s", line)
        if len(news) > PASSED_OVER_SHOWN:
            log.warning("skipped %d more", len(news) - PASSED_OVER_SHOWN)

    def _tell_none(self, passed_over: int) -> None:
        """Log that a directory that is not empty holds nothing that can be resumed from."""
        root, glob = self._settings.checkpoint_dir, self._settings.checkpoint_glob
        found = latest.count_entries(root) if isinstance(root, Path) else passed_over
        if not found:
            return
        fix = f"nothing matches {glob!r}" if glob else "name the files by --checkpoint-glob"
        if isinstance(root, Path) and os.path.lexists(root / dcp.METADATA):
            fix = "dcp.save wrote into it; save each step into a new directory below it"
        among = f"{found} {'entry' if found == 1 else 'entries'}"
        line = f"no checkpoint is recognised among {among} of {root}: {fix}"
        if passed_over:
            line = f"no checkpoint of {root} can be resumed from: {passed_over} were skipped"
        log.warning("%s; workers start without one (--require-resume makes this an error)", line)


def _is_over(state: State) -> bool:
    """Whether the plan says what follows the round that has failed."""
    plan = state.plan
    if plan is None:
        return False
    return plan.round != state.round or plan.phase not in ("running", "ending")


def _culprit(state: State) -> str:
    """Return who has caused the failure of the round, as the plan says, or ""."""
    plan = state.plan
    failed = None if plan is None else plan.failure
    # The plan of a round that runs has the failure of the one before.
    if plan is None or failed is None or (plan.round, plan.phase) == (state.round, "running"):
        return ""
    return "" if failed.summary == UNACCUSED else failed.summary or text.failure(failed)


def _round(state: State, action: Action) -> str:
    """Return "round 3: "; nothing for a newcomer that has been in no round yet."""
    if not state.limits.meets or state.member:
        return f"round {state.round}: "
    return f"round {action.round}: " if isinstance(action, StartRound) else ""


def _is_quiet(turn: Turn) -> bool:
    """Whether nothing went wrong: a job that runs as it should prints nothing of its own."""
    state, action = turn.before, turn.action
    if isinstance(action, Nothing):
        return isinstance(turn.event, events.PlanSeen) and state.limits.meets
    if isinstance(action, EndTree):
        return not state.alive
    if isinstance(action, Finish) and (
        action.exit_code or (state.limits.meets and not state.member)
    ):
        return False
    if isinstance(action, StartRound) and state.limits.meets and action.round > 0:
        return False
    return isinstance(action, StartRound | Finish | Meet) and not state.failed
