"""The agent's loop: takes one event, lets the policy decide, does it, writes it down.

Everything that changes the state happens here, in the main thread. What blocks (the server, the
search for checkpoints, the log pump) is in threads and processes that post events.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from elaunch import env
from elaunch.agent.failure import errorfile
from elaunch.agent.failure.ends import FailureReport
from elaunch.agent.failure.report import write_launcher_file
from elaunch.agent.failure.reporter import Reporter
from elaunch.agent.hangs.watch import HangWatch
from elaunch.agent.patience import bounded, telling
from elaunch.agent.policy import decide, events, fencing, nodes
from elaunch.agent.policy.actions import (
    Action,
    Backoff,
    ChooseCheckpoint,
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
    StartRound,
    StopWorkers,
    TakeStacks,
)
from elaunch.agent.policy.limits import known_nproc, limits_of
from elaunch.agent.policy.state import START_S, Phase, State, follow, observe
from elaunch.agent.resume import latest
from elaunch.agent.resume.probe import DirectoryProbe
from elaunch.agent.saver.round import round_of
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.startup import Interruption, count_devices
from elaunch.agent.status import eventlog
from elaunch.agent.status.decisionlog import DecisionLog
from elaunch.agent.status.eventlog import EventLog
from elaunch.agent.status.record import StatusRecord
from elaunch.agent.status.workerfacts import worker_facts
from elaunch.agent.workers.group import RoundStart, WorkerGroup
from elaunch.agent.workers.links import WorkerLinks
from elaunch.agent.workers.server import KILL_DEADLINE
from elaunch.config import Settings
from elaunch.endings import PREEMPTED

if TYPE_CHECKING:
    from elaunch.agent.nodes.status import StatusPublisher

SETTLE_LEAST = 5.0
"""Seconds for what is in memory to be written out, however little of a grace is left."""
SETTLE_OVERDUE = 2.0
"""Seconds beyond that after which the loop goes on without SavesSettled."""

SILENT = "its server is not ready: what it imports hangs, or its file system does not answer"
PASSED = events.DeadlinePassed()

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class LoopParts:
    """What the loop works with; each is started and closed by elaunch.agent.main.

    ``publisher`` is there in a job of several nodes only.
    """

    group: WorkerGroup
    status_record: StatusRecord
    reporter: Reporter
    events: EventLog
    links: WorkerLinks
    hangs: HangWatch
    saver: AgentSaver
    probing: DirectoryProbe
    publisher: StatusPublisher | None = None


class Agent:
    """One run's agent; :meth:`run` returns the exit code."""

    def __init__(
        self, settings: Settings, parts: LoopParts, inbox: queue.SimpleQueue[events.Event]
    ) -> None:
        self._settings = settings
        self._group = parts.group
        self._status_record = parts.status_record
        self._reporter = parts.reporter
        self._events = parts.events
        self._links = parts.links
        self._hangs = parts.hangs
        self._saver = parts.saver
        self._probing = parts.probing
        self._publisher = parts.publisher
        self._inbox = inbox
        self._made: FailureReport | None = None
        self._told = False
        self._exit_code = 0
        self._deadline: float | None = None
        self._grace_until: float | None = None
        self._starting: tuple[float | None, int] = (None, -1)
        self._decisions = DecisionLog(settings)

    def run(self, environ: Mapping[str, str]) -> int:
        """Start the server, then serve events until the policy finishes."""
        port = self._group.open_endpoint()
        nproc = known_nproc(self._settings.nproc_per_node)
        self._group.prepare(nproc, env.default_omp_threads(environ, nproc or 2))
        if nproc is None:
            counted = count_devices(self._settings, self._group, self._inbox, START_S)
            if not isinstance(counted, int):
                return self._stopped_early(counted)
            nproc = counted
            self._group.settle(nproc, env.default_omp_threads(environ, nproc))
        stopped = self._probing.await_answer(self._inbox)
        if stopped is not None:
            return self._stopped_early(stopped)
        self._decisions.tell_threads(environ, nproc)
        limits = limits_of(self._settings, nproc, meets=self._publisher is not None)
        state = State(limits=limits)
        if self._publisher is not None:
            self._publisher.join(nproc, port)
        self._deadline = time.monotonic() + limits.start_timeout
        with telling(self._still_starting):
            while state.phase is Phase.STARTING:
                state = self._serve(state, self._next_event())
        while state.phase is not Phase.ENDED:
            state = self._serve(state, self._next_event())
        return self._exit_code

    def _serve(self, state: State, event: events.Event) -> State:
        """Take one event to its end; return the state after it."""
        state = observe(state, event)
        action, reason = decide.decide(state, event)
        self._tell(state, event, action, reason)
        before, state = state, follow(state, action)
        self._perform(before, action, reason)
        if isinstance(action, Meet):
            self._report(before, action)
        if self._publisher is not None:
            self._publisher.say(state, self._group.open_endpoint())
        self._status_record.note(state, event, action, reason)
        if isinstance(action, StartRound | Finish):
            self._report(before, action)
        elif self._publisher is not None and state.phase is Phase.MEETING:
            self._tell_cause(self._publisher, state)
        if isinstance(action, Finish):
            self._exit_code = action.exit_code
            name: eventlog.State = "FAILED" if action.exit_code else "SUCCEEDED"
            self._events.record(name, restarts=state.restarts)
        return state

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

    def _perform(self, state: State, action: Action, reason: str) -> None:
        if isinstance(action, StartRound):
            self._start_round(state, action, reason)
        elif isinstance(action, ChooseCheckpoint):
            if not state.searching:
                number = (state.search + 1,)
                threading.Thread(
                    target=self._choose, args=number, name="checkpoints", daemon=True
                ).start()
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
        elif isinstance(action, Backoff):
            # The jitter keeps many jobs that died of one cause from coming back in step.
            seconds = action.seconds * random.uniform(0.5, 1.0)
            self._deadline = time.monotonic() + seconds
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

    def _start_round(self, state: State, action: StartRound, reason: str) -> None:
        # A server that was lost is replaced, and may hang in its imports as the first one may.
        self._deadline = time.monotonic() + state.limits.start_timeout
        self._starting, self._grace_until = (self._deadline, action.round), None
        if action.round > 0 and self._publisher is None:
            self._reporter.keep(state)
        plan = state.plan
        restarts = action.round if plan is None else plan.restarts
        why = reason if action.round > 0 else ""
        start = RoundStart(action.round, restarts, why, action.checkpoint)
        if plan is not None:
            place, store = nodes.place(plan, state.name), (plan.master_addr, plan.master_port)
            start = replace(start, place=place, store=store, job=plan.job)
        self._links.begin(action.round)
        self._hangs.begin(action.round, action.first_rank)
        self._saver.begin(round_of(state, action))
        self._group.start(start)
        self._events.record("RENDEZVOUS", restarts=restarts, duration_ms=0.0)

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

    def _choose(self, number: int) -> None:
        """Look for the newest complete checkpoint; a thread of its own, since storage may hang."""
        found = latest.look(self._settings, self._saver.finishing)
        self._inbox.put(replace(found, number=number))

    # ── reporting ────────────────────────────────────────────────────────────────────────────────

    def _tell(self, state: State, event: events.Event, action: Action, reason: str) -> None:
        self._hangs.hear(event)
        if isinstance(event, events.WorkerStarted):
            if self._deadline == self._starting[0]:
                self._deadline = None
            self._events.record("START", worker_facts(state, event), restarts=state.restarts)
        elif isinstance(event, events.WorkerExited):
            self._record_exit(state, event)
        elif isinstance(event, events.HangSeen) and event == state.hang:
            self._reporter.notice(event)
        elif isinstance(event, events.StacksTaken) and event == state.stacks and not state.hang:
            self._reporter.tell_stacks(event)
        elif isinstance(event, events.TreeGone):
            self._group.flush_logs()
        elif isinstance(event, events.PlanSeen) and self._publisher is not None:
            self._publisher.tell_plan(event.plan, event.name)
        elif isinstance(event, events.Ping):
            event.answer()
        elif isinstance(event, events.FenceAsked):
            event.answer(fencing.refusal(state, event.round))
        elif isinstance(event, events.PreemptAsked):
            event.answer(reason)
        self._decisions.tell(state, event, action, reason)

    def _record_exit(self, state: State, event: events.WorkerExited) -> None:
        if event == state.first:
            self._reporter.notice(event)
        if not self._events.writes:
            return  # the siblings of a failed worker wait for what comes next
        if event in state.stopped:
            name: eventlog.State = "TERMINATED"
        else:
            name = "SUCCEEDED" if event.exitcode == 0 else "FAILED"
        path = self._group.error_file(event.round, event.local_rank)
        left = bounded(partial(errorfile.read, path), None, f"cannot read {path}")
        self._events.record(
            name,
            worker_facts(state, event),
            restarts=state.restarts,
            raw_error=None if left is None or left.record is None else json.dumps(left.record),
        )

    def _report(self, state: State, action: Action) -> None:
        """Report why the round that ``state`` describes has failed, here or on another node."""
        final = isinstance(action, Finish)
        if self._publisher is None:
            if state.reportable:
                self._note_report(self._reporter.report(state, "all" if final else "cause"))
                if final and self._made is not None:
                    write_launcher_file(self._made, os.environ)
            return
        if state.reportable and self._made is None:
            made = self._reporter.report(state, "nothing")
            self._note_report(made)
            self._publisher.keep(made)
        self._tell_cause(self._publisher, state, final)
        if final:
            self._tell_end(self._publisher, state)
        if not isinstance(action, Meet):
            self._made, self._told = None, False

    def _tell_cause(self, publisher: StatusPublisher, state: State, final: bool = False) -> None:
        """Print what ended the round, as soon as the plan says whose failure was the first."""
        if not (final or nodes.is_decided(state)):
            return
        if publisher.failed_elsewhere(state) is not None:
            found = publisher.tell_failure(state)
            if found is not None:
                self._status_record.note_job_failure(dict(found))
        elif self._made is not None and not self._told:
            self._reporter.show_cause(self._made)
            self._told = True

    def _tell_end(self, publisher: StatusPublisher, state: State) -> None:
        found = publisher.failed_elsewhere(state)
        if found is not None:
            publisher.write_launcher_file(found, os.environ)
        elif self._made is not None:
            self._reporter.show_table(self._made)
            write_launcher_file(self._made, os.environ)

    def _note_report(self, made: FailureReport) -> None:
        self._made = made
        self._status_record.note_failure(made.to_dict())
