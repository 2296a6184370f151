"""The agent's whole behaviour on one screen: what it does about each event in each phase.

``decide(state, event) -> (action, reason)`` looks the cell up and calls it. It is pure: no clock,
no process, no store, no log. ``state`` has the event written into it already
(elaunch.agent.policy.state.observe). The reason is the log line, the status text, and what tests
assert; it is empty where nothing is decided.

The cells are functions of ``rounds`` (how a round starts, runs and ends here), ``nodes`` (the
coordinator's plan, and the store) and ``requests`` (to end, to restart). A cell in which nothing is
decided says why. A new event is one row here and one in tests/agent/policy/test_table.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from elaunch.agent.policy import events as on
from elaunch.agent.policy.actions import NOTHING, Decision, Finish, Settle, StopWorkers
from elaunch.agent.policy.nodes import (
    cut_rest,
    cut_run,
    fail_rest,
    fail_run,
    fenced_rest,
    fenced_run,
    logged,
    plan_meet,
    plan_run,
    plan_start,
    rejoined,
)
from elaunch.agent.policy.requests import (
    asked_end,
    asked_rest,
    asked_run,
    listen_run,
    notice_run,
    restart,
)
from elaunch.agent.policy.rounds import (
    due_flush,
    due_meet,
    due_run,
    due_start,
    due_stop,
    due_sweep,
    exit_run,
    exit_stay,
    exit_stop,
    forward,
    forward_no,
    found_start,
    gone_sweep,
    hang_run,
    lost_meet,
    lost_round,
    lost_start,
    no_start,
    ready_start,
    saved_flush,
    sig_flush,
    sig_rest,
    sig_run,
    sig_stop,
    sig_sweep,
    stacks_run,
    stands_run,
    stands_stay,
)
from elaunch.agent.policy.state import Phase, State, is_unsettled, workers


class Ignored(Struct, frozen=True):
    """A cell in which nothing is decided, and ``why``."""

    why: str

    def __call__(self, state: State, event: on.Event) -> Decision:
        """Decide nothing."""
        return NOTHING


Cell = Callable[[State, Any], Decision]

noted = Ignored("it changes the state (observe), and a later event is decided by that")
shown = Ignored("it is for the log, the record and other nodes")
other = Ignored("the loop answers whoever has asked, or has the coordinator decide by it")
past = Ignored("what it is about is over")
never = Ignored("it is about workers, and none was started yet")
early = Ignored("it follows a sweep, and none was asked for")
later = Ignored("it is looked at again when nothing of the round is left here")

FORWARDED: Final = "a signal to forward"
"""A row of its own; a signal of --preempt-signals is a request as any other."""

PHASES: Final = tuple(Phase)[:-1]
"""The columns. ENDED has none: nothing is decided any more."""
# fmt: off
TABLE: Final[Mapping[object, tuple[Cell, ...]]] = {
    #                     STARTING     MEETING     RUNNING     STOPPING    SWEEPING    FLUSHING
    on.ServerReady:      (ready_start, past,       past,       past,       past,       past),
    on.ServerWarmed:     (shown,       shown,      shown,      shown,      shown,      shown),
    on.DevicesCounted:   (found_start, past,       past,       past,       past,       past),
    on.DirectoryProbed:  (found_start, past,       past,       past,       past,       past),
    on.ServerLost:       (lost_start,  lost_meet,  lost_round, lost_round, lost_round, lost_round),
    on.WorkerStarted:    (never,       past,       noted,      noted,      noted,      past),
    on.WorkerNotStarted: (never,       past,       no_start,   past,       past,       past),
    on.Exit:             (never,       exit_stay,  exit_run,   exit_stop,  exit_stay,  past),
    on.TreeGone:         (never,       past,       early,      early,      gone_sweep, past),
    on.StoreLost:        (shown,       shown,      shown,      shown,      shown,      shown),
    on.SaverUsed:        (never,       past,       noted,      noted,      noted,      past),
    on.SavesSettled:     (never,       noted,      noted,      noted,      noted,      saved_flush),
    on.DeadlinePassed:   (due_start,   due_meet,   due_run,    due_stop,   due_sweep,  due_flush),
    # somebody asks
    on.SignalReceived:   (sig_rest,    sig_rest,   sig_run,    sig_stop,   sig_sweep,  sig_flush),
    FORWARDED:           (forward_no,  forward_no, forward,    forward,    forward_no, forward_no),
    on.PreemptAsked:     (asked_rest,  asked_rest, asked_run,  asked_end,  asked_end,  asked_end),
    on.RestartAsked:     (restart,     restart,    restart,    restart,    restart,    restart),
    on.NoticeKnown:      (never,       past,       notice_run, past,       past,       past),
    on.WorkerStands:     (never,       stands_stay, stands_run, noted,     stands_stay, noted),
    on.WorkerEnters:     (never,       past,       noted,      noted,      noted,      past),
    on.WorkerListens:    (never,       past,       listen_run, noted,      noted,      noted),
    on.PreemptAcked:     (never,       past,       noted,      noted,      noted,      noted),
    on.FenceAsked:       (other,       other,      other,      other,      other,      other),
    on.Ping:             (other,       other,      other,      other,      other,      other),
    # hangs
    on.HangSeen:         (never,       past,       hang_run,   past,       past,       past),
    on.StacksTaken:      (never,       past,       stacks_run, past,       past,       past),
    on.RanksAsked:       (shown,       shown,      shown,      shown,      shown,      shown),
    # the coordinator, the other nodes, the store
    on.CheckpointChosen: (other,       other,      other,      other,      other,      other),
    on.PlanSeen:         (plan_start,  plan_meet,  plan_run,   later,      later,      later),
    on.StillWaiting:     (past,        logged,     past,       past,       past,       past),
    on.CutOff:           (cut_rest,    cut_rest,   cut_run,    cut_run,    cut_rest,   cut_rest),
    on.Rejoined:         (rejoined,    rejoined,   rejoined,   rejoined,   rejoined,   rejoined),
    on.Fenced:           (never,       fenced_rest, fenced_run, fenced_run, fenced_rest, past),
    on.StoreSilent:      (logged,      logged,     logged,     logged,     logged,     logged),
    on.StoreBack:        (logged,      logged,     logged,     logged,     logged,     logged),
    on.MeetingFailed:    (fail_rest,   fail_rest,  fail_run,   later,      later,      later),
}
# fmt: on


def decide(state: State, event: on.Event) -> Decision:
    """Return what to do about ``event`` and why; nothing about one of another round."""
    if state.phase is Phase.ENDED or getattr(event, "round", state.round) != state.round:
        return NOTHING
    action, reason = TABLE[row(state, event)][PHASES.index(state.phase)](state, event)
    if isinstance(action, Finish) and state.stay:
        grace, others = state.limits.sibling_grace, workers(len(state.stay))
        why = f"{reason}; stopping the other {others}, grace {grace:g} s"
        return StopWorkers(signal.SIGTERM, grace), why
    if isinstance(action, Finish) and is_unsettled(state):
        return Settle(state.limits.shutdown_timeout, then=action, why=reason), ""
    return action, reason


def row(state: State, event: on.Event) -> object:
    """Return the key of the row that ``event`` has in the table."""
    if isinstance(event, on.SignalReceived) and event.signum in state.limits.forwarded:
        return FORWARDED
    if isinstance(event, on.SignalReceived) and event.signum in state.limits.preempting:
        return on.PreemptAsked
    return type(event)
