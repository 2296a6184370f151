"""The agent's loop: it takes one event, has the policy decide, acts, and shows observers the turn.

The state changes only here, in the main thread. What blocks (the server, the search for
checkpoints, the log pump) is in threads and processes that post events.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable
from pathlib import Path

from elaunch.agent.failure.reporter import Reporter
from elaunch.agent.hangs import stacks
from elaunch.agent.hangs.sample import Sampler
from elaunch.agent.patience import logged_wait
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    AskRestart,
    AwaitChildren,
    EndTree,
    Finish,
    Forward,
    Hurry,
    KillServer,
    Meet,
    Notify,
    Refuse,
    ReplaceServer,
    RestartServer,
    Settle,
    StopWorkers,
    TakeStacks,
)
from elaunch.agent.policy.state import Limits, Phase, State, late_save, refusal
from elaunch.agent.policy.turn import Round, Turn, accused, make_turn
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.links import WorkerLinks
from elaunch.agent.workers.server import KILL_DEADLINE
from elaunch.config import Settings
from elaunch.rendezvous.coordinator import Standalone
from elaunch.server import devices

LATE_EVENTS = 100
"""Events that are served before a deadline that has come: the agent may have been suspended."""
SETTLE_LEAST = 5.0
"""Seconds for what is in memory to be written out, however little of a grace is left."""
SETTLE_OVERDUE = 2.0
"""Seconds beyond that after which the loop goes on without SavesSettled."""

PASSED = events.DeadlinePassed()

log = logging.getLogger("elaunch")


Observer = Callable[[Turn], None]


def limits_of(settings: Settings, meets: bool) -> Limits:
    """Return what bounds a job here; ``meets``: other nodes take part."""
    directory = settings.checkpoint_dir
    local = settings.checkpoint_local and meets
    return Limits(
        nproc=devices.known(settings.nproc_per_node) or 0,
        max_restarts=settings.max_restarts,
        shutdown_timeout=settings.shutdown_timeout,
        sibling_grace=settings.sibling_grace,
        wait_for_children=settings.wait_for_children,
        forwarded=frozenset(settings.forward_signals),
        preempting=frozenset(settings.preempt_signals),
        meets=meets,
        takes_stacks=settings.hang_timeout is not None,
        checkpoint_root=directory if local and isinstance(directory, Path) else None,
    )


class Agent:
    """One run's agent; :meth:`run` returns the exit code.

    What it works with is started and closed by elaunch.agent.main. The first of the ``observers``
    finds the culprit when a round has failed. The second ones see a turn before its action is done,
    but for the signal that goes out then, and the third ones after that.
    ``standalone`` is the coordinator of a job of one node; None where several meet.
    """

    def __init__(
        self,
        settings: Settings,
        inbox: queue.SimpleQueue[events.Event],
        *,
        group: WorkerGroup,
        links: WorkerLinks,
        sampler: Sampler,
        saver: AgentSaver,
        observers: tuple[Reporter, tuple[Observer, ...], tuple[Observer, ...]],
        standalone: Standalone | None,
    ) -> None:
        self._settings = settings
        self._group = group
        self._links = links
        self._sampler = sampler
        self._saver = saver
        self._reporter, self._early, self._late = observers
        self._standalone = standalone
        self._inbox = inbox
        self._state = State(limits_of(settings, meets=standalone is None))
        self._exit_code = 0
        self._deadline: float | None = None
        self._served_late = 0
        self._grace_until: float | None = None

    def run(self) -> int:
        """Serve events until the policy finishes; the group's server was started.

        Raises the error with which the policy refuses to start.
        """
        self._deadline = time.monotonic() + self._state.limits.start_timeout
        with logged_wait(self._still_starting):
            while self._state.phase is Phase.STARTING:
                self._serve(self._next_event())
        while self._state.phase is not Phase.ENDED:
            self._serve(self._next_event())
        return self._exit_code

    def _serve(self, event: events.Event) -> None:
        """Handle one event to its end."""
        turn = make_turn(self._state, event)
        fails = self._state.first is None and turn.before.first is not None
        is_stopping = fails and (isinstance(turn.action, StopWorkers) or bool(turn.after.staying))
        if fails:
            self._reporter.look(turn.before)
            if is_stopping:  # each millisecond in which the others go on is one more to restart
                self._perform(turn)
            turn = accused(turn, self._reporter.accuse(turn.before))
        self._state, action = turn.after, turn.action
        self._answer(turn)
        if isinstance(action, Refuse):
            raise action.error(turn.reason, code=action.code)
        for see in self._early:
            see(turn)
        if not is_stopping:
            self._perform(turn)
        for see in self._late:
            see(turn)
        self._coordinate()
        if isinstance(action, Finish):
            self._exit_code = action.exit_code

    def _coordinate(self) -> None:
        """Have the plan of a job of one node follow; between rounds its backoff is the deadline."""
        if self._standalone is not None:
            due = self._standalone.decide()
            self._deadline = self._deadline if due is None else due

    def _next_event(self) -> events.Event:
        if self._deadline is None:
            return self._inbox.get()
        left = max(0.0, self._deadline - time.monotonic())
        self._served_late = 0 if left else self._served_late + 1
        if self._served_late <= LATE_EVENTS:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=left)
        self._deadline, self._served_late = None, 0
        return PASSED

    def _still_starting(self, seconds: float) -> str:
        settings, state = self._settings, self._state
        if state.phase is not Phase.STARTING:
            return ""  # the first round is just being started
        modules = " ".join(name for name in settings.preload if not name.startswith("+"))
        what = f"importing {modules} (--preload)" if modules else "starting the workers' server"
        if not state.limits.nproc:
            what = "importing torch to count the devices"
        elif (directory := settings.checkpoint_dir) is not None and not state.probed:
            return f"still waiting for --checkpoint-dir {directory} to answer, for {seconds:.0f} s"
        return (
            f"still {what} after {seconds:.0f} s; "
            f"is the file system of {settings.interpreter} slow?"
        )

    # ── doing ────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, turn: Turn) -> None:
        state, action = turn.before, turn.action
        if turn.begun is not None:
            self._start_round(state, turn.begun)
        elif isinstance(action, StopWorkers):
            shielded = self._links.shielded()
            self._group.send_signal(action.signum, stops=True, shielded=shielded)
            self._grace_until = self._deadline = time.monotonic() + action.grace
        elif isinstance(action, Hurry):
            self._hurry(state, action)
        elif isinstance(action, EndTree):
            self._end_tree(state, action)
        elif isinstance(action, AwaitChildren):
            self._deadline = time.monotonic() + action.seconds
            self._group.server.end_tree(state.round, None, action.seconds + KILL_DEADLINE)
        elif isinstance(action, Meet):
            grace = state.limits.shutdown_timeout if state.asked_to_end else None
            self._deadline = None if grace is None else time.monotonic() + grace
            self._group.between_rounds()
        elif isinstance(action, Notify):
            self._links.notify(action.notice, action.grace)
            if action.grace is not None:
                self._grace_until = self._deadline = time.monotonic() + action.grace
                if action.grace and (late := late_save(self._saver.record(), action.grace)):
                    log.warning("%s", late)
        elif isinstance(action, TakeStacks):
            self._deadline = time.monotonic() + self._sampler.take_stacks()
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
        patience = KILL_DEADLINE if begun.kept else state.limits.start_timeout
        self._deadline = time.monotonic() + patience
        self._grace_until = None
        self._links.begin(begun)
        self._sampler.begin(begun)
        self._saver.begin(begun)
        for local_rank, environ in self._group.start(begun).items():
            self._links.enter(local_rank, environ, begun)

    def _hurry(self, state: State, action: Hurry) -> None:
        until = time.monotonic() + action.grace
        if until >= (self._deadline or math.inf):
            return
        self._deadline = until
        if state.phase is Phase.RUNNING and state.notice is not None:
            self._links.notify(state.notice, action.grace)  # their deadline is sooner, too

    def _end_tree(self, state: State, action: EndTree) -> None:
        grace, now = action.grace, time.monotonic()
        ranks = [state.first_rank + rank for rank in state.alive] if state.notice else []
        if found := stacks.stopped({rank: self._sampler.workers.pid(rank) for rank in ranks}):
            log.warning("%s", found)
        if state.phase is Phase.STOPPING and self._deadline is not None:
            grace = min(grace, max(0.0, self._deadline - now))  # what the workers left of it
        overdue = self._group.server.end_tree(state.round, action.signum, grace, action.keeps)
        self._deadline = now + overdue

    def _settle(self, state: State, action: Settle) -> None:
        seconds, now = action.grace, time.monotonic()
        stated = state.notice is not None and state.notice.grace is not None
        if self._grace_until is not None and (stated or state.interrupted is not None):
            # The sender of the signal, or the platform, may send SIGKILL when the grace is over.
            left = max(SETTLE_LEAST, self._grace_until - now)
            seconds = left if stated else min(seconds, left)
        self._saver.settle(seconds, holds=action.holds)
        self._deadline = now + seconds + SETTLE_OVERDUE

    def _answer(self, turn: Turn) -> None:
        """Answer threads that wait for the loop, and end the deadline of what has come."""
        event, state = turn.event, turn.before
        if isinstance(event, events.WorkerStarted | events.WorkerEnters):
            rests = self._grace_until is None and not (state.taking or state.silent)
            if state.phase is Phase.RUNNING and rests:
                self._deadline = None  # the start's: no other one runs
                if state.began is None:
                    self._deadline = time.monotonic() + state.limits.start_timeout
        elif isinstance(event, events.CheckpointChosen) and self._standalone is not None:
            self._standalone.found(event.result)
        elif isinstance(event, events.Ping):
            event.answer()
        elif isinstance(event, events.FenceAsked):
            event.answer(refusal(state, event.round, event.uuid))
        elif isinstance(event, events.PreemptAsked):
            event.answer(turn.reason)
        elif isinstance(event, events.RestartAsked):
            event.answer((turn.reason, isinstance(turn.action, AskRestart)))
