"""Every decision of the agent: ``decide(state, event) -> (action, reason)``.

Pure: no clock, no process, no store, no log. ``state`` has the event written into it already
(elaunch.agent.policy.state.observe); what the coordinator's plan means here is in
elaunch.agent.policy.nodes. The reason is the log line, the status text, and what the test table
asserts; it is empty where nothing is decided. A new cause of restart is one event, one arm here,
and one row in tests/agent/policy/test_decide.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Final

from elaunch.agent.policy import events, hang, nodes, requests
from elaunch.agent.policy.actions import (
    NOTHING,
    AwaitChildren,
    Decision,
    EndTree,
    Finish,
    Forward,
    Hurry,
    KillServer,
    Nothing,
    Refuse,
    ReplaceServer,
    RestartServer,
    Settle,
    StopWorkers,
)
from elaunch.agent.policy.state import (
    LOST,
    Limits,
    Phase,
    State,
    failure,
    failure_code,
    server_ended,
    workers,
)
from elaunch.errors import CheckpointError, ElaunchError, ServerError, UsageError

SILENT: Final = "its server is not ready: what it imports hangs, or its file system does not answer"
SERVER_RESTARTS: Final = 3
"""How often the server is started again in one wait for a plan: nothing of a round is lost."""
LAST_SAVE_S: Final = 1800.0
"""Seconds for the storage to take the last save of a job that is done; a signal cuts that short."""


def decide(state: State, event: events.Event) -> Decision:
    """Return what to do about ``event`` and why."""
    arm = _ARMS.get(type(event))
    if arm is None or state.phase is Phase.ENDED:
        return NOTHING
    action, reason = arm(state, event)
    if isinstance(action, Finish) and _unsettled(state):
        return Settle(state.limits.shutdown_timeout, then=action, why=reason), ""
    return action, reason


def _unsettled(state: State) -> bool:
    """Whether memory may hold saves that nobody writes out yet: no round follows to load them."""
    if state.finish is not None or not state.saves:
        return False
    if state.phase in (Phase.MEETING, Phase.FLUSHING):
        return bool(state.held)
    return state.phase in (Phase.RUNNING, Phase.SWEEPING)


def _on_ready(state: State, event: events.ServerReady) -> Decision:
    if state.phase is not Phase.STARTING:
        return NOTHING
    if event.problem is not None:
        return _cannot_start(state, UsageError, event.problem)
    if event.unforkable:
        fix = "the workers are started by --start-method spawn instead; leave the module out"
        return ReplaceServer(), f"{event.unforkable}: {fix}"
    return _started(state)


def _on_answer(state: State, event: events.DirectoryProbed | events.DevicesCounted) -> Decision:
    if state.phase is not Phase.STARTING:
        return NOTHING
    if not event.problem:
        return _started(state)
    probed = isinstance(event, events.DirectoryProbed)
    code = "E-CHECKPOINT-DIR" if probed else "E-DEVICES"
    return _cannot_start(state, UsageError, event.problem, code)


def _started(state: State) -> Decision:
    """Go on to MEETING when nothing is missing any more."""
    return nodes.at_rest(state, "ready") if state.can_join and state.ready else NOTHING


def _cannot_start(state: State, error: type[ElaunchError], what: str, code: str = "") -> Decision:
    """End in STARTING; where the others know nothing of this node yet, the command fails."""
    joined = state.can_join and state.limits.meets
    return Finish(error.exit_code) if joined else Refuse(error, code), what


def _on_exit(state: State, event: events.Exit) -> Decision:
    if event.round != state.round or state.alive:
        if state.phase is Phase.RUNNING and event == state.first:
            return _stop_siblings(state)
        return NOTHING
    if state.phase is Phase.RUNNING and not state.failed:
        what = "all workers ended with 0"
        if state.preempted and state.notice is not None:
            what = f"all workers have saved and ended ({state.notice.reason})"
        wait = state.limits.wait_for_children
        if wait and not state.preempted and not state.asked_to_end:
            return AwaitChildren(wait), f"{what}; waiting up to {wait:g} s for what they left"
        reason = f"{what}; ending what they left, if anything"
        return EndTree(signal.SIGTERM, state.limits.sibling_grace), reason
    if state.phase is Phase.RUNNING:
        what = failure(state) if event == state.first else event.text
        return EndTree(), f"{what}; no other worker is left"
    if state.phase is Phase.STOPPING and state.interrupted is not None and not state.failed:
        return EndTree(signal.SIGTERM, state.limits.shutdown_timeout), "all workers have ended"
    if state.phase is Phase.STOPPING:
        return EndTree(), "all workers have ended"
    return NOTHING


def _stop_siblings(state: State) -> Decision:
    others = len(state.alive)
    grace = state.limits.sibling_grace
    reason = f"{failure(state)}; stopping the other {workers(others)}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


def _on_signal(state: State, event: events.SignalReceived) -> Decision:
    what = f"{event.signum.name} received" if event.notice is None else event.notice.reason
    if event.signum in state.limits.forwarded:
        if state.phase in (Phase.RUNNING, Phase.STOPPING):
            return Forward(event.signum), f"{what}: forwarded to the workers"
        return Nothing(), f"{what}: no worker runs to forward it to"
    if event.signum in state.limits.preempting:
        return requests.asked(state, what)
    if event.signum is signal.SIGTERM:
        saving = requests.on_sigterm(state, event.notice)
        if saving is not None:
            return saving
    if state.phase is Phase.RUNNING:
        grace = state.limits.shutdown_timeout
        reason = f"{what}: forwarded to the workers, grace {grace:g} s"
        return StopWorkers(event.signum, grace), reason
    if state.phase in (Phase.STOPPING, Phase.SWEEPING):
        if event.signum is signal.SIGINT and state.sigints == 2:
            return EndTree(), "SIGINT again: killing at once"
        if state.waits:
            return Hurry(0.0), f"{what}: all workers have ended"
        reason = f"{what}: the workers are being stopped already"
        if state.phase is Phase.STOPPING and state.failed and state.interrupted is event.signum:
            return Hurry(state.limits.shutdown_timeout), f"{reason}; no restart"
        return Nothing(), reason
    if state.phase is Phase.FLUSHING:
        if event.signum is signal.SIGINT and state.sigints == 2:
            return _after_tree(state, "SIGINT again: what is in memory only is lost")
        grace = state.limits.shutdown_timeout
        reason = f"{what}: the checkpoint in memory is being written out, grace {grace:g} s"
        return Hurry(grace), reason
    if state.limits.meets:
        return nodes.stopped(event.signum)
    return _finish(state)


def _on_not_started(state: State, event: events.WorkerNotStarted) -> Decision:
    if event.round != state.round or state.phase is not Phase.RUNNING:
        return NOTHING
    return _not_started(state, event.local_rank, event.problem)


def _not_started(state: State, local_rank: int, problem: str) -> Decision:
    rank = state.first_rank + local_rank
    return Finish(ServerError.exit_code), f"cannot start rank {rank}: {problem}"


def _on_deadline(state: State, event: events.DeadlinePassed) -> Decision:
    if state.phase is Phase.RUNNING and state.taking:
        return hang.overdue(state)
    if state.phase is Phase.RUNNING and state.notice is not None:
        return requests.overdue(state)
    if state.phase is Phase.RUNNING and state.began is None:
        return _not_started(state, 0, SILENT)
    if state.phase is Phase.STOPPING:
        return EndTree(), f"the grace is over; killing {workers(len(state.alive))}"
    if state.waits:
        return EndTree(signal.SIGTERM, state.limits.sibling_grace), "ending what the workers left"
    if state.phase is Phase.SWEEPING and state.killing:
        return _unkillable(state)
    if state.phase is Phase.SWEEPING:
        return KillServer(), "the server that starts the workers does not answer; killing it"
    if state.phase is Phase.FLUSHING:
        return _after_tree(state)
    if state.phase in requests.AT_REST and state.asked_to_end:
        return requests.overdue_at_rest(state)
    if state.phase is Phase.STARTING:
        return _cannot_start(state, ServerError, _never_ready(state.limits))
    return NOTHING


def _never_ready(limits: Limits) -> str:
    if not limits.nproc:
        return (
            f"the server has not counted the devices for {limits.start_timeout:g} s: does the file "
            "system of its Python answer? --nproc-per-node with a number does not need it"
        )
    return (
        f"the server that starts the workers has not been ready for {limits.start_timeout:g} s: "
        "what it imports (--preload) hangs, or the file system of its Python does not answer"
    )


def _unkillable(state: State) -> Decision:
    """Decide what follows when not even SIGKILL ends the server: no worker may start beside it."""
    what = "the server that starts the workers cannot be killed: it hangs in the kernel"
    if state.completed:
        return Settle(LAST_SAVE_S) if state.saves else _next(state)[0], what
    if state.failed:
        return Finish(failure_code(state)), f"{failure(state)}; no restart: {what}"
    if state.interrupted is not None:
        return Finish(128 + state.interrupted), f"stopped by {state.interrupted.name}; {what}"
    return Finish(ServerError.exit_code), what


def _on_server_lost(state: State, event: events.ServerLost) -> Decision:
    if state.phase is Phase.STARTING:
        return _lost_at_start(state, event)
    if state.phase is Phase.MEETING:
        return _lost_at_rest(state, event)
    return EndTree(), f"{server_ended(event.exitcode)}; its workers ended with it"


def _lost_at_start(state: State, event: events.ServerLost) -> Decision:
    """Start the server again if a signal has killed it; one that ends by itself would again."""
    how, most = server_ended(event.exitcode), state.limits.max_restarts
    if event.exitcode >= 0 or most == 0 or state.interrupted is not None:
        return _cannot_start(state, ServerError, how)
    how += " before it was ready"
    if state.server_restarts >= most:
        return _cannot_start(state, ServerError, f"{how}; {most} of {most} restarts are used up")
    number = state.server_restarts + 1
    return RestartServer(), f"{how}; starting another: restart {number} of {most}"


def _lost_at_rest(state: State, event: events.ServerLost) -> Decision:
    """Start the server again at once: with static it shows the others where to meet."""
    how, most = server_ended(event.exitcode), max(SERVER_RESTARTS, state.limits.max_restarts)
    if state.server_restarts >= most:
        waited = "this node waited for others" if state.limits.meets else "no worker ran"
        how += f" {most + 1} times while {waited}"
        return Finish(ServerError.exit_code), how
    others = ", and waiting for the other nodes" if state.limits.meets else ""
    return RestartServer(), f"{how}; starting another{others}"


def _on_tree_gone(state: State, event: events.TreeGone) -> Decision:
    if event.round != state.round or state.phase is not Phase.SWEEPING:
        return NOTHING
    if state.saves:
        done = state.completed and not state.preempted and state.interrupted is None
        if done:
            return Settle(LAST_SAVE_S), ""
        ends = (
            state.interrupted is not None or state.asked_to_end or state.meeting_failed is not None
        )
        return Settle(state.limits.shutdown_timeout, holds=not ends), ""
    return _after_tree(state)


def _on_settled(state: State, event: events.SavesSettled) -> Decision:
    if event.round != state.round or state.phase is not Phase.FLUSHING:
        return NOTHING
    if state.finish is not None and event.held:
        return NOTHING  # news of the wait before the end: what is held is still to be committed
    return _after_tree(state)


def _after_tree(state: State, also: str = "") -> Decision:
    """Decide what follows a round of which nothing is left here that must be written first."""
    action, reason = _next(state) if state.finish is None else (state.finish, state.why)
    return action, f"{also}; {reason}" if also and reason else reason or also


def _next(state: State) -> Decision:
    if state.limits.meets or state.restarts_round:
        return nodes.on_tree_gone(state)
    asked = state.interrupted is not None or state.asked_in_round
    if state.failed and not state.completed and not asked:
        return nodes.at_rest(state, failure(state))
    return _finish(state)


def _finish(state: State) -> Decision:
    """Return the end of the job on its only node: all is done, or somebody has asked."""
    if state.notice is not None and (state.completed or not state.failed):
        return requests.ended(state)
    if state.lost_save:
        return Finish(CheckpointError.exit_code), LOST
    if state.completed:
        return Finish(0), "all workers ended with 0"
    if state.failed:
        code = failure_code(state)
        if state.interrupted is not None:
            return Finish(code), f"{failure(state)}; no restart after {state.interrupted.name}"
        assert state.notice is not None  # any other failure is for the coordinator to judge
        return Finish(code), f"{failure(state)}; no restart: {state.notice.reason}"
    assert state.interrupted is not None  # nothing else ends a job that neither failed nor is done
    return Finish(128 + state.interrupted), f"stopped by {state.interrupted.name}"


_ARMS: dict[type, Callable[[State, Any], Decision]] = {
    events.ServerReady: _on_ready,
    events.DirectoryProbed: _on_answer,
    events.DevicesCounted: _on_answer,
    events.WorkerNotStarted: _on_not_started,
    events.Exit: _on_exit,
    events.TreeGone: _on_tree_gone,
    events.SavesSettled: _on_settled,
    events.SignalReceived: _on_signal,
    events.DeadlinePassed: _on_deadline,
    events.ServerLost: _on_server_lost,
    **nodes.ARMS,
    **requests.ARMS,
    **hang.ARMS,
}
