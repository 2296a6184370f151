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
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from elaunch import env
from elaunch.agent import errorfile, eventlog, events, policy
from elaunch.agent.endings import how_it_ended
from elaunch.agent.eventlog import EventLog, WorkerFacts
from elaunch.agent.group import RoundStart, WorkerGroup
from elaunch.agent.journal import Journal
from elaunch.agent.report import write_launcher_file
from elaunch.agent.reporter import Reporter
from elaunch.agent.state import (
    Action,
    Backoff,
    ChooseCheckpoint,
    EndTree,
    Finish,
    Forward,
    Hurry,
    KillServer,
    Limits,
    Phase,
    StartRound,
    State,
    StopWorkers,
    follow,
    observe,
)
from elaunch.checkpoint.records import Search
from elaunch.config import Settings
from elaunch.errors import ServerError, UsageError

PASSED_OVER_SHOWN = 10

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class Parts:
    """What the loop works with; each is started and closed by elaunch.agent.main."""

    group: WorkerGroup
    journal: Journal
    reporter: Reporter
    events: EventLog


class Agent:
    """One run's agent; :meth:`run` returns the exit code."""

    def __init__(
        self, settings: Settings, parts: Parts, inbox: queue.SimpleQueue[events.Event]
    ) -> None:
        self._settings = settings
        self._group = parts.group
        self._journal = parts.journal
        self._reporter = parts.reporter
        self._events = parts.events
        self._inbox = inbox
        self._deadline: float | None = None
        self._passed_over: set[str] = set()

    def run(self, environ: Mapping[str, str]) -> int:
        """Start the server, then serve events until the policy finishes."""
        self._group.open_endpoint()
        nproc = known_nproc(self._settings.nproc_per_node)
        self._group.prepare(nproc, env.default_omp_threads(environ, nproc or 2))
        if nproc is None:
            counted = self._count_devices(environ)
            if isinstance(counted, signal.Signals):
                reason = f"stopped by {counted.name}"
                self._journal.note_exit_code(128 + counted, reason, "STOPPED")
                log.warning("%s", reason)
                return 128 + counted
            nproc = counted
        self._say_omp(environ, nproc)
        state = State(limits=_limits(self._settings, nproc))
        while state.phase is not Phase.ENDED:
            event = self._next_event()
            state = observe(state, event)
            action, reason = policy.decide(state, event)
            self._tell(state, event, action, reason)
            before, state = state, follow(state, action)
            self._perform(before, action, reason)
            self._journal.note(state, event, action, reason)
            if isinstance(action, StartRound | Finish) and before.first is not None:
                self._report(before, final=isinstance(action, Finish))
            if isinstance(action, Finish):
                self._events.record(
                    "FAILED" if action.exit_code else "SUCCEEDED", restarts=state.restarts
                )
                return action.exit_code
        raise AssertionError("only Finish ends the loop")

    def _next_event(self) -> events.Event:
        try:
            if self._deadline is None:
                return self._inbox.get()
            return self._inbox.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            self._deadline = None
            return events.DeadlinePassed()

    def _count_devices(self, environ: Mapping[str, str]) -> int | signal.Signals:
        """Ask the server how many devices there are; return the signal when one came first."""
        kind = self._settings.nproc_per_node
        interpreter = self._settings.interpreter
        self._group.server.send({"op": "count_devices", "kind": kind, "interpreter": interpreter})
        later: list[events.Event] = []
        while True:
            event = self._inbox.get()
            if isinstance(event, events.DevicesCounted):
                break
            if isinstance(event, events.SignalReceived):
                if event.signum not in self._settings.forward_signals:
                    return event.signum
                continue  # no worker runs to forward it to
            later.append(event)
            if isinstance(event, events.ServerLost):
                how = how_it_ended(event.exitcode)
                raise ServerError(f"the server that counts the devices {how}")
        for waiting in later:
            self._inbox.put(waiting)
        if event.count is None:
            raise UsageError(f"--nproc-per-node {kind}: {event.problem}; give a number, or cpu")
        self._group.settle(event.count, env.default_omp_threads(environ, event.count))
        return event.count

    def _say_omp(self, environ: Mapping[str, str], nproc: int) -> None:
        if env.default_omp_threads(environ, nproc):
            log.warning(
                "%s is not set: each of the %d workers gets 1 thread, so that they do not overload "
                "the machine; set it to tune your script",
                env.OMP_NUM_THREADS,
                nproc,
            )

    # ── doing ────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, state: State, action: Action, reason: str) -> None:
        if isinstance(action, StartRound):
            self._start_round(state, action, reason)
        elif isinstance(action, ChooseCheckpoint):
            threading.Thread(target=self._choose, name="checkpoints", daemon=True).start()
        elif isinstance(action, StopWorkers):
            self._group.send_signal(action.signum, stops=True)
            self._deadline = time.monotonic() + action.grace
        elif isinstance(action, Hurry):
            now = time.monotonic()
            self._deadline = min(self._deadline or math.inf, now + action.grace)
        elif isinstance(action, EndTree):
            self._end_tree(state, action)
        elif isinstance(action, Forward):
            self._group.send_signal(action.signum, stops=False)
        elif isinstance(action, Backoff):
            # The jitter keeps many jobs that died of one cause from coming back in step.
            seconds = action.seconds * random.uniform(0.5, 1.0)
            self._deadline = time.monotonic() + seconds
        elif isinstance(action, KillServer):
            self._group.server.kill()

    def _start_round(self, state: State, action: StartRound, reason: str) -> None:
        self._deadline = None
        if action.round > 0:
            self._reporter.keep(state)
        restarts = action.round
        why = reason if action.round > 0 else ""
        self._group.start(RoundStart(action.round, restarts, why, action.checkpoint))
        self._events.record("RENDEZVOUS", restarts=restarts, duration_ms=0.0)

    def _end_tree(self, state: State, action: EndTree) -> None:
        grace, now = action.grace, time.monotonic()
        if state.phase is Phase.STOPPING and self._deadline is not None:
            grace = min(grace, max(0.0, self._deadline - now))  # what the workers left of it
        overdue = self._group.end_tree(state.round, action.signum, grace)
        self._deadline = now + overdue

    def _choose(self) -> None:
        """Look for the newest complete checkpoint; a thread of its own, since storage may hang."""
        from elaunch.checkpoint.latest import find_latest  # only jobs with checkpoints pay for it

        settings = self._settings
        root = settings.checkpoint_dir
        assert root is not None  # the policy asks only then
        run_id = settings.run_id if settings.run_id_given else None
        problem = None
        try:
            search = find_latest(root, glob=settings.checkpoint_glob, run_id=run_id)
        except Exception as error:  # the loop waits for the answer, whatever it is
            search, problem = Search(None), f"{root}: {type(error).__name__}: {error}"
        unreadable = [passed.reason for passed in search.passed_over if passed.path == root]
        if unreadable:  # not the same as a directory without checkpoints: nobody may start afresh
            problem = f"{root}: {unreadable[0]}"
        self._inbox.put(events.CheckpointChosen(search, problem))

    # ── telling ──────────────────────────────────────────────────────────────────────────────────

    def _tell(self, state: State, event: events.Event, action: Action, reason: str) -> None:
        if isinstance(event, events.WorkerStarted):
            self._events.record("START", self._facts(state, event), restarts=state.restarts)
        elif isinstance(event, events.WorkerExited):
            self._record_exit(state, event)
        elif isinstance(event, events.TreeGone):
            self._group.flush_logs()
            self._tell_leftovers(event)
        elif isinstance(event, events.CheckpointChosen):
            self._tell_passed_over(event)
        elif isinstance(event, events.ServerWarmed):
            self._tell_warmed(event)
        elif isinstance(event, events.StoreLost):
            # A script that runs without torch never asks for the store.
            level = logging.INFO if "No module named 'torch'" in event.problem else logging.WARNING
            log.log(level, "the workers' TCPStore is gone: %s", event.problem)
        elif isinstance(event, events.ServerReady) and event.threads > 1:
            log.warning(
                "a module of --preload has started %d threads; forked workers do not have them, "
                "and may hang on what they held: leave it out, or use --start-method spawn",
                event.threads - 1,
            )
        elif isinstance(event, events.Ping):
            event.answer()
        if reason:
            quiet = isinstance(action, StartRound | Finish | EndTree) and not state.failed
            quiet = quiet and not (isinstance(action, Finish) and action.exit_code)
            quiet = quiet or (isinstance(action, EndTree) and not state.alive)
            log.log(logging.INFO if quiet else logging.WARNING, "round %d: %s", state.round, reason)

    def _tell_warmed(self, event: events.ServerWarmed) -> None:
        if event.problem is not None:
            log.warning("%s; workers of the next rounds are started without it", event.problem)
        else:
            log.info("the server has imported the later modules in %.2f s", event.seconds)

    def _tell_leftovers(self, event: events.TreeGone) -> None:
        if event.killed:
            names = ", ".join(f"{name} ({pid})" for pid, name in event.killed)
            log.info("round %d: killed what the workers had left: %s", event.round, names)
        for pid, name in event.survivors:
            log.error("process %d (%s) does not die: it hangs in the kernel; left alone", pid, name)

    def _tell_passed_over(self, event: events.CheckpointChosen) -> None:
        if event.search.checkpoint is None and event.problem is None:
            self._tell_none(len(event.search.passed_over))
        lines = [f"passed over {p.path}: {p.reason}" for p in event.search.passed_over]
        news = [line for line in lines if line not in self._passed_over]
        self._passed_over.update(news)
        for line in news[:PASSED_OVER_SHOWN]:
            log.warning("%s", line)
        if len(news) > PASSED_OVER_SHOWN:
            log.warning("passed over %d more", len(news) - PASSED_OVER_SHOWN)

    def _tell_none(self, passed_over: int) -> None:
        """Say so when a directory that is not empty holds nothing that is recognised."""
        root, glob = self._settings.checkpoint_dir, self._settings.checkpoint_glob
        assert root is not None  # it was searched
        try:
            found = sum(not name.startswith(".") for name in os.listdir(root))
        except OSError:
            return  # it is not there yet
        if found and not passed_over:
            fix = f"nothing matches {glob!r}" if glob else "name the files by --checkpoint-glob"
            line = f"no checkpoint is recognised among {found} entries of {root}: {fix}"
            if line not in self._passed_over:
                self._passed_over.add(line)
                log.warning("%s", line)

    def _record_exit(self, state: State, event: events.WorkerExited) -> None:
        if event == state.first:
            self._reporter.notice(event)
        if not self._events.writes:
            return  # the siblings of a failed worker wait for what comes next
        if event in state.stopped:
            name: eventlog.State = "TERMINATED"
        else:
            name = "SUCCEEDED" if event.exitcode == 0 else "FAILED"
        left = errorfile.read(self._group.error_file(event.round, event.local_rank))
        self._events.record(
            name,
            self._facts(state, event),
            restarts=state.restarts,
            raw_error=None if left is None or left.record is None else json.dumps(left.record),
        )

    def _facts(
        self, state: State, event: events.WorkerStarted | events.WorkerExited
    ) -> WorkerFacts:
        rank = event.local_rank
        code = event.exitcode if isinstance(event, events.WorkerExited) else None
        return WorkerFacts(rank, rank, rank, state.limits.nproc, event.pid, code)

    def _report(self, state: State, final: bool) -> None:
        made = self._reporter.report(state, final)
        self._journal.note_failure(made.to_dict())
        if final:
            write_launcher_file(made, os.environ)


def known_nproc(name: str) -> int | None:
    """Return the number of workers that ``--nproc-per-node`` means; None if torch must count."""
    if name == "cpu":
        return len(os.sched_getaffinity(0))
    return int(name) if name.isdigit() else None


def _limits(settings: Settings, nproc: int) -> Limits:
    return Limits(
        nproc=nproc,
        max_restarts=settings.max_restarts,
        lifetime_budget=settings.restart_budget == "lifetime",
        shutdown_timeout=settings.shutdown_timeout,
        sibling_grace=settings.sibling_grace,
        has_checkpoint_dir=settings.checkpoint_dir is not None,
        forwarded=frozenset(settings.forward_signals),
    )
