"""The agent's loop: takes one event, lets the policy decide, does it, writes it down.

Everything that changes the state happens here, in the main thread. What blocks (the server, the
search for checkpoints, the log pump) is in threads and processes that post events.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elaunch import env
from elaunch.agent.hangs.watch import HangWatch
from elaunch.agent.patience import telling
from elaunch.agent.policy import events, turn
from elaunch.agent.policy.actions import (
    EndTree,
    Finish,
    Forward,
    Hurry,
    KillServer,
    Meet,
    Notify,
    ReplaceServer,
    RestartServer,
    Settle,
    StopWorkers,
    TakeStacks,
)
from elaunch.agent.policy.state import START_S, Phase, State, refusal
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.resume.probe import DirectoryProbe
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.startup import Interruption, count_devices, known_nproc, limits_of
from elaunch.agent.status.decisionlog import tell_threads
from elaunch.agent.status.record import StatusRecord
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.links import WorkerLinks
from elaunch.agent.workers.server import KILL_DEADLINE
from elaunch.config import Settings
from elaunch.endings import PREEMPTED

if TYPE_CHECKING:
    from elaunch.agent.nodes.status import StatusPublisher
    from elaunch.rendezvous.standalone import Standalone

SETTLE_LEAST = 5.0
"""Seconds for what is in memory to be written out, however little of a grace is left."""
SETTLE_OVERDUE = 2.0
"""Seconds beyond that after which the loop goes on without SavesSettled."""

SILENT = "its server is not ready: what it imports hangs, or its file system does not answer"
PASSED = events.DeadlinePassed()

log = logging.getLogger("elaunch")


Observer = Callable[[Turn], None]


@dataclass(frozen=True)
class LoopParts:
    """What the loop works with; each is started and closed by elaunch.agent.main.

    ``early`` observers see a turn before its action is done, ``late`` ones after it, both in their
    order. ``standalone`` is the coordinator of a job of one node; None where several meet.
    """

    group: WorkerGroup
    status_record: StatusRecord
    links: WorkerLinks
    hangs: HangWatch
    saver: AgentSaver
    probing: DirectoryProbe
    early: tuple[Observer, ...]
    late: tuple[Observer, ...]
    publisher: StatusPublisher
    standalone: Standalone | None


class Agent:
    """One run's agent; :meth:`run` returns the exit code."""

    def __init__(
        self, settings: Settings, parts: LoopParts, inbox: queue.SimpleQueue[events.Event]
    ) -> None:
        self._settings = settings
        self._group = parts.group
        self._status_record = parts.status_record
        self._links = parts.links
        self._hangs = parts.hangs
        self._saver = parts.saver
        self._probing = parts.probing
        self._early, self._late = parts.early, parts.late
        self._publisher = parts.publisher
        self._standalone = parts.standalone
        self._inbox = inbox
        self._exit_code = 0
        self._deadline: float | None = None
        self._grace_until: float | None = None
        self._starting: tuple[float | None, int] = (None, -1)

    def run(self, environ: Mapping[str, str]) -> int:
        """Serve events until the policy finishes; the group's server was started."""
        port = self._group.open_endpoint()
        nproc = known_nproc(self._settings.nproc_per_node)
        if nproc is None:
            counted = count_devices(self._settings, self._group, self._inbox, START_S)
            if not isinstance(counted, int):
                return self._stopped_early(counted)
            nproc = counted
            self._group.settle(nproc, env.default_omp_threads(environ, nproc))
        stopped = self._probing.await_answer(self._inbox)
        if stopped is not None:
            return self._stopped_early(stopped)
        tell_threads(environ, nproc)
        limits = limits_of(self._settings, nproc, meets=self._standalone is None)
        state = State(limits=limits)
        self._publisher.join(nproc, port)
        self._coordinate()
        self._deadline = time.monotonic() + limits.start_timeout
        with telling(self._still_starting):
            while state.phase is Phase.STARTING:
                state = self._serve(state, self._next_event())
        while state.phase is not Phase.ENDED:
            state = self._serve(state, self._next_event())
        return self._exit_code

    def _serve(self, state: State, event: events.Event) -> State:
        """Take one event to its end; return the state after it."""
        taken = turn.take(state, event)
        self._answer(taken)
        for see in self._early:
            see(taken)
        self._perform(taken)
        for see in self._late:
            see(taken)
        self._coordinate()
        if isinstance(taken.action, Finish):
            self._exit_code = taken.action.exit_code
        return taken.after

    def _coordinate(self) -> None:
        """Have the plan of a job of one node follow; between rounds its backoff is the deadline."""
        if self._standalone is not None:
            due = self._standalone.decide()
            self._deadline = self._deadline if due is None else due

    def _next_event(self) -> events.Event:
        try:
            if self._deadline is None:
                return self._inbox.get()
            return self._inbox.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            passed, self._deadline = self._deadline, None
            until, number = self._starting
            return events.WorkerNotStarted(number, 0, SILENT) if passed == until else PASSED

    def _still_starting(self, seconds: float) -> str:
        modules = " ".join(name for name in self._settings.preload if not name.startswith("+"))
        what = f"it imports {modules} (--preload), " if modules else ""
        return (
            f"still waiting for the server that starts the workers, for {seconds:.0f} s: {what}if "
            f"the file system of {self._settings.interpreter} answers at all"
        )

    def _stopped_early(self, by: Interruption) -> int:
        """End before the loop has served anything: no worker was started."""
        if isinstance(by, events.PreemptAsked) or by.signum in self._settings.preempt_signals:
            what = (
                by.reason if isinstance(by, events.PreemptAsked) else f"{by.signum.name} received"
            )
            code, state, reason = PREEMPTED, "PREEMPTED", f"{what}: no worker runs; to be continued"
        else:
            code, state, reason = 128 + by.signum, "STOPPED", f"stopped by {by.signum.name}"
        if isinstance(by, events.PreemptAsked):
            by.answer(reason)
        self._status_record.note_exit_code(code, reason, state)
        log.warning("%s", reason)
        return code

    # ── doing ────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, taken: Turn) -> None:
        state, action = taken.before, taken.action
        if taken.begun is not None:
            self._start_round(state, taken.begun)
        elif isinstance(action, StopWorkers):
            self._group.send_signal(action.signum, stops=True)
            self._grace_until = self._deadline = time.monotonic() + action.grace
        elif isinstance(action, Hurry):
            now = time.monotonic()
            self._deadline = min(self._deadline or math.inf, now + action.grace)
        elif isinstance(action, EndTree):
            self._end_tree(state, action)
        elif isinstance(action, Meet):
            grace = state.limits.shutdown_timeout if state.told_to_stop else None
            self._deadline = None if grace is None else time.monotonic() + grace
            self._group.between_rounds()
        elif isinstance(action, Notify):
            self._links.notify(action.notice, action.grace)
            if action.grace is not None:
                self._grace_until = self._deadline = time.monotonic() + action.grace
        elif isinstance(action, TakeStacks):
            self._deadline = time.monotonic() + self._hangs.take_stacks(state.round)
        elif isinstance(action, Forward):
            self._group.send_signal(action.signum, stops=False)
        elif isinstance(action, Settle):
            self._settle(state, action)
        elif isinstance(action, ReplaceServer):
            self._group.spawn_from_now_on()
        elif isinstance(action, RestartServer):
            self._group.replace_server()
            if state.phase is Phase.STARTING:
                self._deadline = time.monotonic() + state.limits.start_timeout
        elif isinstance(action, KillServer):
            self._group.server.kill()
            self._deadline = time.monotonic() + KILL_DEADLINE

    def _start_round(self, state: State, begun: Round) -> None:
        # A server that was lost is replaced, and may hang in its imports as the first one may.
        self._deadline = time.monotonic() + state.limits.start_timeout
        self._starting, self._grace_until = (self._deadline, begun.round), None
        self._links.begin(begun)
        self._hangs.begin(begun)
        self._saver.begin(begun)
        self._group.start(begun)

    def _end_tree(self, state: State, action: EndTree) -> None:
        grace, now = action.grace, time.monotonic()
        if state.phase is Phase.STOPPING and self._deadline is not None:
            grace = min(grace, max(0.0, self._deadline - now))  # what the workers left of it
        overdue = self._group.end_tree(state.round, action.signum, grace)
        self._deadline = now + overdue

    def _settle(self, state: State, action: Settle) -> None:
        seconds, now = action.grace, time.monotonic()
        if state.interrupted is not None and self._grace_until is not None:
            # The sender of the signal may send SIGKILL when the grace is over.
            seconds = min(seconds, max(SETTLE_LEAST, self._grace_until - now))
        self._saver.settle(seconds)
        self._deadline = now + seconds + SETTLE_OVERDUE

    def _answer(self, taken: Turn) -> None:
        """Answer those who wait for the loop, and stop waiting for what has come."""
        event = taken.event
        if isinstance(event, events.WorkerStarted):
            if self._deadline == self._starting[0]:
                self._deadline = None
        elif isinstance(event, events.SearchEnded) and self._standalone is not None:
            self._standalone.found(event.result)
        elif isinstance(event, events.Ping):
            event.answer()
        elif isinstance(event, events.FenceAsked):
            event.answer(refusal(taken.before, event.round))
        elif isinstance(event, events.PreemptAsked):
            event.answer(taken.reason)
