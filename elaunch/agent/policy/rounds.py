"""Cells of the policy's table: how a round starts, runs and ends on this node. Pure.

``*_start`` are of STARTING, ``*_meet`` of MEETING, ``*_run`` of RUNNING, ``*_stop`` of STOPPING,
``*_sweep`` of SWEEPING, ``*_flush`` of FLUSHING (elaunch.agent.policy.table).
"""

from __future__ import annotations

import signal
from typing import Final

from elaunch.agent.policy import events, nodes, requests
from elaunch.agent.policy.actions import (
    NOTHING,
    AskRestart,
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
    TakeStacks,
)
from elaunch.agent.policy.state import LOST, State, failure, failure_code, server_ended, workers
from elaunch.errors import CheckpointError, ElaunchError, ServerError, UsageError
from elaunch.rendezvous.plan import RestartRequest
from elaunch.text import ranks_do

SILENT: Final = "its server is not ready: what it imports hangs, or its file system does not answer"
SERVER_RESTARTS: Final = 3
"""How often the server is started again in one wait for a plan: nothing of a round is lost."""
LAST_SAVE_S: Final = 1800.0
"""Seconds for the storage to take the last save of a job that is done; a signal cuts that short."""

# ── STARTING ─────────────────────────────────────────────────────────────────────────────────────


def ready_start(state: State, event: events.ServerReady) -> Decision:
    """Go on with a server that can start workers, or replace it."""
    if event.problem is not None:
        return _cannot_start(state, UsageError, event.problem)
    if event.unforkable:
        fix = "the workers are started by --start-method spawn instead; leave the module out"
        return ReplaceServer(), f"{event.unforkable}: {fix}"
    return _started(state)


def found_start(state: State, event: events.DirectoryProbed | events.DevicesCounted) -> Decision:
    """Go on with the checkpoint directory, and with as many workers as there are devices."""
    if not event.problem:
        return _started(state)
    probed = isinstance(event, events.DirectoryProbed)
    code = "E-CHECKPOINT-DIR" if probed else "E-DEVICES"
    return _cannot_start(state, UsageError, event.problem, code)


def lost_start(state: State, event: events.ServerLost) -> Decision:
    """Start the server again if a signal has killed it; one that ends by itself would again."""
    how, most = server_ended(event.exitcode), state.limits.max_restarts
    if event.exitcode >= 0 or most == 0 or state.interrupted is not None:
        return _cannot_start(state, ServerError, how)
    how += " before it was ready"
    if state.server_restarts >= most:
        return _cannot_start(state, ServerError, f"{how}; {most} of {most} restarts are used up")
    number = state.server_restarts + 1
    return RestartServer(), f"{how}; starting another: restart {number} of {most}"


def due_start(state: State, _: events.DeadlinePassed) -> Decision:
    """Fail: the server was not ready in time."""
    if state.asked_to_end:
        return requests.overdue_at_rest(state)
    seconds = f"for {state.limits.start_timeout:g} s"
    if not state.limits.nproc:
        what = f"the server has not counted the devices {seconds}: does the file system of its "
        what += "Python answer? --nproc-per-node with a number does not need it"
    else:
        what = f"the server that starts the workers has not been ready {seconds}: what it imports "
        what += "(--preload) hangs, or the file system of its Python does not answer"
    return _cannot_start(state, ServerError, what)


def _started(state: State) -> Decision:
    """Go on to MEETING when nothing is missing any more."""
    return nodes.at_rest(state, "ready") if state.can_join and state.ready else NOTHING


def _cannot_start(state: State, error: type[ElaunchError], what: str, code: str = "") -> Decision:
    """End in STARTING; where the others know nothing of this node yet, the command fails."""
    joined = state.can_join and state.limits.meets
    return Finish(error.exit_code) if joined else Refuse(error, code), what


# ── MEETING ──────────────────────────────────────────────────────────────────────────────────────


def lost_meet(state: State, event: events.ServerLost) -> Decision:
    """Start the server again at once: with static it shows the others where to meet."""
    how, most = server_ended(event.exitcode), max(SERVER_RESTARTS, state.limits.max_restarts)
    if state.server_restarts >= most:
        waited = "this node waited for others" if state.limits.meets else "no worker ran"
        how += f" {most + 1} times while {waited}"
        return Finish(ServerError.exit_code), how
    others = ", and waiting for the other nodes" if state.limits.meets else ""
    return RestartServer(), f"{how}; starting another{others}"


def due_meet(state: State, _: events.DeadlinePassed) -> Decision:
    """Leave where a request was not taken up; a backoff's end is the coordinator's to see."""
    return requests.overdue_at_rest(state) if state.asked_to_end else NOTHING


# ── workers and their ends ───────────────────────────────────────────────────────────────────────


def no_start(state: State, event: events.WorkerNotStarted) -> Decision:
    """Fail: the system starts no more processes."""
    return _not_started(state, event.local_rank, event.problem)


def _not_started(state: State, local_rank: int, problem: str) -> Decision:
    rank = state.first_rank + local_rank
    return Finish(ServerError.exit_code), f"cannot start rank {rank}: {problem}"


def exit_run(state: State, event: events.Exit) -> Decision:
    """Stop the others after the first failure, or keep them; sweep when no worker is left."""
    if state.alive:
        return _exit_beside(state, event)
    if state.failed:
        what = failure(state) if event == state.first else event.text
        return EndTree(keeps=state.may_stay), f"{what}; no other worker is left"
    if state.preempted and state.notice is not None:
        return _sweep(state, f"all workers have saved and ended ({state.notice.reason})")
    what, wait = "all workers ended with 0", state.limits.wait_for_children
    if wait and not state.preempted and not state.asked_to_end:
        return AwaitChildren(wait), f"{what}; waiting up to {wait:g} s for what they left"
    return _sweep(state, what)


def _exit_beside(state: State, event: events.Exit) -> Decision:
    """Return what the end of a worker means to those that live."""
    if event == state.first:
        return _stop_siblings(state)
    if state.preempted and not state.failed:
        rest = f"ending {workers(len(state.alive))} with nothing to save"
        return EndTree(), f"all others have saved and ended; {rest}"
    return _left_early(state)


def _sweep(state: State, what: str) -> Decision:
    reason = f"{what}; ending what they left, if anything"
    return EndTree(signal.SIGTERM, state.limits.sibling_grace), reason


def _stop_siblings(state: State) -> Decision:
    others, grace = workers(len(state.alive)), state.limits.sibling_grace
    if (keeps := state.may_stay) is not None:
        return EndTree(keeps=keeps), f"{failure(state)}; {nodes.stay(state, keeps)}"
    reason = f"{failure(state)}; stopping the other {others}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


def exit_stay(state: State, event: events.Exit) -> Decision:
    """End what one has left that was to stay."""
    if event.local_rank not in state.staying:
        return NOTHING
    if state.stay:
        return EndTree(keeps=state.stay), f"{event.text}, too; {nodes.stay(state, state.stay)}"
    return EndTree(keeps=frozenset()), f"{event.text}, too; no other worker is left"


def stands_run(state: State, _: events.WorkerStands) -> Decision:
    """End the round if one that was kept is elsewhere: nobody can go on without it."""
    return _left_early(state) if state.alive else NOTHING


def _left_early(state: State) -> Decision:
    """Ask for another round: what has brought that about has cost a restart already."""
    if not state.left or state.restarts_round:
        return NOTHING
    who = ranks_do((state.first_rank + local_rank for local_rank in state.left), "have")
    what = f"{who} left the loop before round {state.round} began"
    return AskRestart(RestartRequest(state.round, what)), ""


def stands_stay(state: State, event: events.WorkerStands) -> Decision:
    """Stop those that were to stay: one of them is elsewhere."""
    if event.stands or event.local_rank not in state.stay:
        return NOTHING
    others, grace = workers(len(state.stay)), state.limits.sibling_grace
    what = f"rank {state.first_rank + event.local_rank} has left its loop"
    return StopWorkers(signal.SIGTERM, grace), f"{what}; stopping {others}, grace {grace:g} s"


def exit_stop(state: State, _: events.Exit) -> Decision:
    """Sweep when the last worker has ended; what a person's signal has left has a grace, too."""
    if state.alive:
        return NOTHING
    asked = state.interrupted is not None and not state.failed
    tree = EndTree(signal.SIGTERM, state.limits.shutdown_timeout) if asked else EndTree()
    return tree, "all workers have ended"


def lost_round(_: State, event: events.ServerLost) -> Decision:
    """Sweep: the server's workers end with it."""
    return EndTree(), f"{server_ended(event.exitcode)}; its workers ended with it"


def gone_sweep(state: State, event: events.TreeGone) -> Decision:
    """Write out what is in memory, or go on to what follows."""
    if event.kept != state.staying:
        return NOTHING  # another sweep was asked for since
    if not state.saves or state.stay:
        return after_tree(state)
    if state.completed and not state.preempted and state.interrupted is None:
        return Settle(LAST_SAVE_S), ""
    asked = state.interrupted is not None or state.asked_to_end
    ends = asked or state.meeting_failed is not None
    return Settle(state.limits.shutdown_timeout, holds=not ends), ""


def saved_flush(state: State, event: events.SavesSettled) -> Decision:
    """Go on to what follows."""
    if state.finish is not None and event.held:
        return NOTHING  # news of the wait before the end: what is held is still to be committed
    return after_tree(state)


# ── a hang: until the stacks are there, everything else goes on as in any round ──────────────────


def hang_run(state: State, event: events.HangSeen) -> Decision:
    """Take the stacks, unless the round ends already (elaunch.agent.policy.state)."""
    if state.hang != event:
        return NOTHING
    return TakeStacks(), f"{event.reason}; taking the stacks of {workers(len(state.alive))}"


def stacks_run(state: State, _: events.StacksTaken) -> Decision:
    """Stop the workers: what they were doing is known."""
    return _end_hung(state, "stacks captured") if state.taking else NOTHING


def _end_hung(state: State, what: str) -> Decision:
    grace, others = state.limits.sibling_grace, workers(len(state.alive))
    reason = f"round hung; {what}; stopping {others}, grace {grace:g} s"
    return StopWorkers(signal.SIGTERM, grace), reason


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────


def due_run(state: State, _: events.DeadlinePassed) -> Decision:
    """End what was waited for: stacks, the save that a notice asks for, the first worker."""
    if state.taking:
        return _end_hung(state, "no stacks captured in time")
    if state.notice is not None:
        return requests.overdue(state)
    if late := state.silent & state.alive:
        return _silent(state, late)
    return _not_started(state, 0, SILENT) if state.began is None else NOTHING


def _silent(state: State, late: frozenset[int]) -> Decision:
    """Kill the workers that were kept and do not answer: that is this round's failure."""
    who = ranks_do((state.first_rank + local_rank for local_rank in late), "do")
    what = f"{who} not answer as round {state.round} begins"
    keeps = (state.may_stay or frozenset()) - late
    stay = f"; {nodes.stay(state, keeps)}" if keeps else ""
    return EndTree(keeps=keeps), f"{what}; killing {workers(len(state.alive - keeps))}{stay}"


def due_stop(state: State, _: events.DeadlinePassed) -> Decision:
    """Kill who has outlived the grace."""
    return EndTree(), f"the grace is over; killing {workers(len(state.alive))}"


def due_sweep(state: State, _: events.DeadlinePassed) -> Decision:
    """End what was waited for; kill the server that does not."""
    if state.waits:
        return EndTree(signal.SIGTERM, state.limits.sibling_grace), "ending what the workers left"
    if not state.killing:
        return KillServer(), "the server that starts the workers does not answer; killing it"
    return _unkillable(state)


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


def due_flush(state: State, _: events.DeadlinePassed) -> Decision:
    """Go on though it is not known whether all is on the disk."""
    return after_tree(state)


# ── signals ──────────────────────────────────────────────────────────────────────────────────────


def forward(_: State, event: events.SignalReceived) -> Decision:
    """Pass a signal of --forward-signals on."""
    return Forward(event.signum), f"{event.reason}: forwarded to the workers"


def forward_no(_: State, event: events.SignalReceived) -> Decision:
    """Say that nobody can take it."""
    return Nothing(), f"{event.reason}: no worker runs to forward it to"


def sig_rest(state: State, event: events.SignalReceived) -> Decision:
    """Leave: no worker runs here."""
    return nodes.stopped(event.signum) if state.limits.meets else _finish(state)


def sig_run(state: State, event: events.SignalReceived) -> Decision:
    """Ask the workers to save, where they can be asked; or else stop them."""
    saving = requests.on_sigterm(state, event)
    if saving is not None:
        return saving
    grace = state.limits.shutdown_timeout
    reason = f"{event.reason}: forwarded to the workers, grace {grace:g} s"
    return StopWorkers(event.signum, grace), reason


def sig_stop(state: State, event: events.SignalReceived) -> Decision:
    """Do not restart afterwards; kill at once when a person asks again."""
    ending = sig_sweep(state, event)
    if state.failed and state.interrupted is event.signum and isinstance(ending[0], Nothing):
        return Hurry(state.limits.shutdown_timeout), f"{ending[1]}; no restart"
    return ending


def sig_sweep(state: State, event: events.SignalReceived) -> Decision:
    """Go on ending the round; kill at once when a person asks again."""
    if event.signum is signal.SIGINT and state.sigints == 2:
        return EndTree(), "SIGINT again: killing at once"
    if state.waits:
        return Hurry(0.0), f"{event.reason}: all workers have ended"
    return Nothing(), f"{event.reason}: the workers are being stopped already"


def sig_flush(state: State, event: events.SignalReceived) -> Decision:
    """Write out what is in memory first; not when a person asks again."""
    saving = requests.on_sigterm(state, event)
    if saving is not None:
        return saving
    if event.signum is signal.SIGINT and state.sigints == 2:
        return after_tree(state, "SIGINT again: what is in memory only is lost")
    grace = state.limits.shutdown_timeout
    reason = f"{event.reason}: the checkpoint in memory is being written out, grace {grace:g} s"
    return Hurry(grace), reason


# ── what follows ─────────────────────────────────────────────────────────────────────────────────


def after_tree(state: State, also: str = "") -> Decision:
    """Decide what follows a round of which nothing is left here that must be written first."""
    action, reason = _next(state) if state.finish is None else (state.finish, state.why)
    return action, f"{also}; {reason}" if also and reason else reason or also


def _next(state: State) -> Decision:
    is_over = state.plan is not None and state.plan.phase == "over"
    is_over = is_over and state.interrupted is None  # the plan that says so may follow from that
    if state.limits.meets or state.restarts_round or is_over:
        return nodes.after_round(state)
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
    return nodes.stopped(state.interrupted)
