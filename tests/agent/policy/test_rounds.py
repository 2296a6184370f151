"""The decision table: a history of events, the last decision, its reason.

A history that is drawn at random may hold anything; one that a simulated server plays is what can
happen, and comes to its end.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    Action,
    AwaitChildren,
    EndTree,
    Finish,
    Forward,
    Hurry,
    KillServer,
    Meet,
    Nothing,
    Refuse,
    ReplaceServer,
    RestartServer,
    Settle,
    StartRound,
    StopWorkers,
)
from elaunch.agent.policy.rounds import SILENT
from elaunch.agent.policy.state import Limits, Phase
from elaunch.agent.policy.turn import Turn
from elaunch.checkpoint.records import Checkpoint
from elaunch.errors import ServerError, UsageError
from elaunch.rendezvous.plan import HeldShards
from tests.agent.histories import (
    DEADLINE,
    INT,
    READY,
    TERM,
    USR1,
    Decided,
    Job,
    Played,
    checkpoint,
    chosen,
    exited,
    gone,
    last,
    lost,
    play,
    started,
)
from tests.tables import each

TWO = Limits(2)
THREE_RESTARTS = Limits(2, max_restarts=3)
SAVING = Job(2, max_restarts=2, has_checkpoint_dir=True)
WAITS = Limits(2, wait_for_children=60.0)
FORWARDING = Limits(2, forwarded=frozenset({signal.SIGUSR1}))
RUNS = (READY, started(0), started(1))
FAILED = (*RUNS, exited(0, 7), exited(1, -15, stopped=True))
LOOKED = (READY, chosen(None), *FAILED[1:])
SUCCEEDED = (*RUNS, exited(0, 0), exited(1, 0))
USED, SETTLED = events.SaverUsed(0), events.SavesSettled(0, ("step-00000010.r0",))
SAVED = (READY, chosen(None), started(0), started(1), USED, *FAILED[3:])
BROKEN = events.ServerReady("--preload nope: ModuleNotFoundError: nope")
THREADED = events.ServerReady(None, unforkable="--preload x: threads")
SWEEP = EndTree(signal.SIGTERM, 5.0)

Row = tuple[Limits, tuple[events.Event, ...], Action, str]


def again(round: int, at: float = 1.0) -> tuple[events.Event, ...]:
    """Return the life of a round whose rank 1 dies at once, up to the end of its tree."""
    ends = (exited(1, 3, round, at), exited(0, -15, round, at, stopped=True))
    return (started(0, round), started(1, round), *ends, gone(round))


def still_held(round: int) -> events.SavesSettled:
    """Return that the save of step 10 is in memory, and is being written."""
    shards = HeldShards("/ck/step-00000010.r0", 10, 0, "u", 2, (0, 1), writing=True)
    return events.SavesSettled(round, held=(shards,))


HELD = (*SAVED, gone(), still_held(0))
ONCE = Job(2, max_restarts=1, has_checkpoint_dir=True)
NO_PROGRESS = "rank 1 exited with code 3; 1 restart brought no progress (--max-restarts)"

TABLE: dict[str, Row] = {
    "ready": (TWO, (READY,), StartRound(0, None), "first start"),
    "ready, with checkpoints": (SAVING, (READY,), Meet(), ""),
    "nothing to resume from": (SAVING, (READY, chosen(None)), StartRound(0, None), "first start"),
    "a checkpoint of an earlier job": (
        SAVING,
        (READY, chosen(40)),
        StartRound(0, checkpoint(40)),
        "first start",
    ),
    "the directory cannot be read": (
        SAVING,
        (READY, chosen(None, "/ck: Permission denied")),
        Finish(74),
        "cannot look for checkpoints: /ck: Permission denied",
    ),
    "a module cannot be preloaded": (TWO, (BROKEN,), Refuse(UsageError), BROKEN.problem or ""),
    "a module has started threads": (
        TWO,
        (THREADED,),
        ReplaceServer(),
        "--preload x: threads: the workers are started by --start-method spawn instead; leave the "
        "module out",
    ),
    "and its server is replaced": (TWO, (THREADED, READY), StartRound(0, None), "first start"),
    "a later server cannot preload": (TWO, (*RUNS, BROKEN), Nothing(), ""),
    "the first server dies": (
        TWO,
        (lost(1),),
        Refuse(ServerError),
        "the server that starts the workers exited with code 1",
    ),
    "it is killed": (
        TWO,
        (lost(-9),),
        Refuse(ServerError),
        "the server that starts the workers was killed by SIGKILL",
    ),
    "it is killed, and may be started again": (
        Limits(2, max_restarts=2),
        (lost(-9),),
        RestartServer(),
        "the server that starts the workers was killed by SIGKILL before it was ready; starting "
        "another: restart 1 of 2",
    ),
    "the next one is ready": (
        Limits(2, max_restarts=2),
        (lost(-9), READY),
        StartRound(0, None),
        "first start",
    ),
    "the next ones are killed, too": (
        Limits(2, max_restarts=2),
        (lost(-9), lost(-9), lost(-9)),
        Refuse(ServerError),
        "the server that starts the workers was killed by SIGKILL before it was ready; 2 of 2 "
        "restarts are used up",
    ),
    "one that ends by itself would again": (
        Limits(2, max_restarts=2),
        (lost(1),),
        Refuse(ServerError),
        "the server that starts the workers exited with code 1",
    ),
    # ── success ──
    "one of two is done": (TWO, (*RUNS, exited(1, 0)), Nothing(), ""),
    "both are done": (
        TWO,
        SUCCEEDED,
        SWEEP,
        "all workers ended with 0; ending what they left, if anything",
    ),
    "and their children": (TWO, (*SUCCEEDED, gone()), Finish(0), "all workers ended with 0"),
    "a signal comes too late to undo it": (
        TWO,
        (*SUCCEEDED, TERM, gone()),
        Finish(0),
        "all workers ended with 0",
    ),
    "the server dies in the last sweep": (
        THREE_RESTARTS,
        (*SUCCEEDED, lost(), gone()),
        Finish(0),
        "all workers ended with 0",
    ),
    # ── failure ──
    "one fails": (
        TWO,
        (*RUNS, exited(1, 7)),
        StopWorkers(signal.SIGTERM, 5.0),
        "rank 1 exited with code 7; stopping the other 1 worker, grace 5 s",
    ),
    "one is killed": (
        Limits(3, sibling_grace=0.5),
        (READY, exited(1, -9)),
        StopWorkers(signal.SIGTERM, 0.5),
        "rank 1 was killed by SIGKILL; stopping the other 2 workers, grace 0.5 s",
    ),
    "the last one fails": (
        TWO,
        (*RUNS, exited(0, 0), exited(1, 7)),
        EndTree(),
        "rank 1 exited with code 7; no other worker is left",
    ),
    "the others end in the grace": (TWO, FAILED, EndTree(), "all workers have ended"),
    "the others outlive the grace": (
        TWO,
        (*RUNS, exited(0, 7), DEADLINE),
        EndTree(),
        "the grace is over; killing 1 worker",
    ),
    "no restart is allowed": (
        TWO,
        (*FAILED, gone()),
        Finish(7),
        "rank 0 exited with code 7; --max-restarts is 0",
    ),
    "a signal's number as exit code": (
        Limits(1),
        (READY, exited(0, -11), gone()),
        Finish(139),
        "rank 0 was killed by SIGSEGV; --max-restarts is 0",
    ),
    "the first failure decides, not those after it": (
        TWO,
        (*RUNS, exited(1, 3), exited(0, 9), gone()),
        Finish(3),
        "rank 1 exited with code 3; --max-restarts is 0",
    ),
    "the tree of another round": (TWO, (*FAILED, gone(5)), Nothing(), ""),
    "an exit of another round": (TWO, (*RUNS, exited(1, 7, round=3)), Nothing(), ""),
    "an exit that was told twice": (
        TWO,
        (*RUNS, exited(1, 0), exited(1, 0)),
        Nothing(),
        "",
    ),
    # ── restart ──
    "the first restart is at once": (
        THREE_RESTARTS,
        (*FAILED, gone()),
        StartRound(1, None),
        "rank 0 exited with code 7; restart 1 of 3",
    ),
    "the second backs off": (
        THREE_RESTARTS,
        (*FAILED, gone(), *again(1)),
        Nothing(),
        "rank 1 exited with code 3; restart 2 of 3, after a backoff of up to 0.5 s: "
        "it failed within 10 s again",
    ),
    "the backoff is over": (
        THREE_RESTARTS,
        (*FAILED, gone(), *again(1), DEADLINE),
        StartRound(2, None),
        "rank 1 exited with code 3",
    ),
    "the third backs off for longer": (
        THREE_RESTARTS,
        (*FAILED, gone(), *again(1), DEADLINE, *again(2)),
        Nothing(),
        "rank 1 exited with code 3; restart 3 of 3, after a backoff of up to 1 s: "
        "it failed within 10 s again",
    ),
    "no backoff after a long life": (
        THREE_RESTARTS,
        (*FAILED, gone(), *again(1, at=10.5)),
        StartRound(2, None),
        "rank 1 exited with code 3; restart 2 of 3",
    ),
    "a crash after rounds that lived long is the first": (
        Limits(2, max_restarts=9),
        (*FAILED, gone(), *again(1, at=15.0), *again(2, at=15.0), *again(3)),
        StartRound(4, None),
        "rank 1 exited with code 3; restart 4 of 9",
    ),
    "the budget is used up": (
        Limits(2, max_restarts=1),
        (*FAILED, gone(), *again(1)),
        Finish(3),
        "rank 1 exited with code 3; 1 restart brought no progress (--max-restarts)",
    ),
    "before a restart, the checkpoint": (
        SAVING,
        (READY, chosen(None), *FAILED[1:], gone()),
        Meet(),
        "",
    ),
    "restart from a checkpoint": (
        SAVING,
        (READY, chosen(None), *FAILED[1:], gone(), chosen(20)),
        StartRound(1, checkpoint(20)),
        "rank 0 exited with code 7; restart 1 of 2 since the last progress, from step 20",
    ),
    "restart without one": (
        SAVING,
        (READY, chosen(None), *FAILED[1:], gone(), chosen(None)),
        StartRound(1, None),
        "rank 0 exited with code 7; restart 1 of 2 since the last progress, from the start",
    ),
    "storage fails between the rounds": (
        SAVING,
        (READY, chosen(20), *FAILED[1:], gone(), chosen(None, "/ck: Stale file handle")),
        Finish(74),
        "cannot look for checkpoints: /ck: Stale file handle",
    ),
    "lifetime: the last restart": (
        Job(2, max_restarts=2, lifetime_budget=True, has_checkpoint_dir=True),
        (READY, chosen(0), *FAILED[1:], gone(), chosen(10), *again(1), chosen(20)),
        StartRound(2, checkpoint(20)),
        "rank 1 exited with code 3; restart 2 of 2, from step 20",
    ),
    "lifetime: progress does not refill": (
        Job(2, max_restarts=1, lifetime_budget=True, has_checkpoint_dir=True),
        (READY, chosen(0), *FAILED[1:], gone(), chosen(10), *again(1)),
        Finish(3),
        "rank 1 exited with code 3; 1 of 1 restarts are used up",
    ),
    # ── the server dies ──
    "the server dies under its workers": (
        THREE_RESTARTS,
        (*RUNS, lost()),
        EndTree(),
        "the server that starts the workers was killed by SIGKILL; its workers ended with it",
    ),
    "that costs a restart": (
        THREE_RESTARTS,
        (*RUNS, lost(), gone()),
        StartRound(1, None),
        "the server that starts the workers was killed by SIGKILL; restart 1 of 3",
    ),
    "or the job": (
        TWO,
        (*RUNS, lost(), gone()),
        Finish(71),
        "the server that starts the workers was killed by SIGKILL; --max-restarts is 0",
    ),
    "a worker had failed before": (
        TWO,
        (*RUNS, exited(0, 7), lost(), gone()),
        Finish(7),
        "rank 0 exited with code 7; --max-restarts is 0",
    ),
    "the server does not answer": (
        TWO,
        (*FAILED, DEADLINE),
        KillServer(),
        "the server that starts the workers does not answer; killing it",
    ),
    "it cannot be killed": (
        THREE_RESTARTS,
        (*FAILED, DEADLINE, DEADLINE),
        Finish(7),
        "rank 0 exited with code 7; no restart: the server that starts the workers cannot be "
        "killed: it hangs in the kernel",
    ),
    "nor when all is done": (
        TWO,
        (*SUCCEEDED, DEADLINE, DEADLINE),
        Finish(0),
        "the server that starts the workers cannot be killed: it hangs in the kernel",
    ),
    "nor when a save is in memory": (
        TWO,
        (*RUNS, USED, *SUCCEEDED[3:], DEADLINE, DEADLINE),
        Settle(1800.0),
        "the server that starts the workers cannot be killed: it hangs in the kernel",
    ),
    "nor after a signal": (
        TWO,
        (*RUNS, TERM, DEADLINE, DEADLINE, DEADLINE),
        Finish(143),
        "stopped by SIGTERM; the server that starts the workers cannot be killed: it hangs in the "
        "kernel",
    ),
    "it is never ready": (
        TWO,
        (DEADLINE,),
        Refuse(ServerError),
        "the server that starts the workers has not been ready for 600 s: what it imports "
        "(--preload) hangs, or the file system of its Python does not answer",
    ),
    "it is dead then": (
        THREE_RESTARTS,
        (*FAILED, DEADLINE, lost(), gone()),
        StartRound(1, None),
        "rank 0 exited with code 7; restart 1 of 3",
    ),
    "the server dies while waiting": (
        THREE_RESTARTS,
        (*FAILED, gone(), *again(1), lost()),
        RestartServer(),
        "the server that starts the workers was killed by SIGKILL; starting another",
    ),
    # ── signals ──
    "SIGTERM while importing": (TWO, (TERM,), Finish(143), "stopped by SIGTERM"),
    "SIGTERM while choosing": (SAVING, (READY, TERM), Finish(143), "stopped by SIGTERM"),
    "SIGTERM": (
        TWO,
        (*RUNS, TERM),
        StopWorkers(signal.SIGTERM, 30.0),
        "SIGTERM received: forwarded to the workers, grace 30 s",
    ),
    "SIGTERM while a failure's siblings are stopped": (
        THREE_RESTARTS,
        (*RUNS, exited(0, 7), TERM),
        Hurry(THREE_RESTARTS.shutdown_timeout),
        "SIGTERM received: the workers are being stopped already; no restart",
    ),
    "a worker cannot be forked": (
        TWO,
        (READY, events.WorkerNotStarted(0, 1, "no more processes")),
        Finish(71),
        "cannot start rank 1: no more processes",
    ),
    "no worker starts": (TWO, (READY, DEADLINE), Finish(71), f"cannot start rank 0: {SILENT}"),
    "a worker of another round could not be forked": (
        TWO,
        (*RUNS, events.WorkerNotStarted(3, 1, "no more processes")),
        Nothing(),
        "",
    ),
    "SIGTERM again": (
        TWO,
        (*RUNS, TERM, TERM),
        Nothing(),
        "SIGTERM received: the workers are being stopped already",
    ),
    "SIGHUP is passed on as such": (
        Limits(1, shutdown_timeout=2.5),
        (READY, events.SignalReceived(signal.SIGHUP)),
        StopWorkers(signal.SIGHUP, 2.5),
        "SIGHUP received: forwarded to the workers, grace 2.5 s",
    ),
    "what the workers leave is waited for": (
        WAITS,
        SUCCEEDED,
        AwaitChildren(60.0),
        "all workers ended with 0; waiting up to 60 s for what they left",
    ),
    "for as long as was said": (
        WAITS,
        (*SUCCEEDED, events.DeadlinePassed()),
        SWEEP,
        "ending what the workers left",
    ),
    "or until a signal": (
        WAITS,
        (*SUCCEEDED, TERM),
        Hurry(0.0),
        "SIGTERM received: all workers have ended",
    ),
    "or a second one": (WAITS, (*SUCCEEDED, INT, INT), EndTree(), "SIGINT again: killing at once"),
    "not where the workers were told to end": (
        WAITS,
        (*RUNS, TERM, exited(0, 0), exited(1, 0)),
        EndTree(signal.SIGTERM, 30.0),
        "all workers have ended",
    ),
    "SIGINT twice": (TWO, (*RUNS, INT, INT), EndTree(), "SIGINT again: killing at once"),
    "SIGINT three times": (
        TWO,
        (*RUNS, INT, INT, INT),
        Nothing(),
        "SIGINT received: the workers are being stopped already",
    ),
    "SIGINT once after SIGTERM is not again": (
        TWO,
        (*RUNS, TERM, INT),
        Nothing(),
        "SIGINT received: the workers are being stopped already",
    ),
    "SIGINT twice while the siblings have their grace": (
        TWO,
        (*RUNS, exited(0, 7), INT, INT),
        EndTree(),
        "SIGINT again: killing at once",
    ),
    "SIGINT again, for what the workers left": (
        TWO,
        (*RUNS, INT, exited(0, -2), exited(1, -2), INT),
        EndTree(),
        "SIGINT again: killing at once",
    ),
    "the workers end after SIGTERM": (
        Limits(2, shutdown_timeout=9.0),
        (*RUNS, TERM, exited(0, 0), exited(1, -15)),
        EndTree(signal.SIGTERM, 9.0),
        "all workers have ended",
    ),
    "whatever they end with": (
        TWO,
        (*RUNS, TERM, exited(0, 0, stopped=True), exited(1, 1, stopped=True), gone()),
        Finish(143),
        "stopped by SIGTERM",
    ),
    "a scheduler that signals the workers, too": (
        THREE_RESTARTS,
        (*RUNS, TERM, exited(0, -15), exited(1, -15), gone()),
        Finish(143),
        "stopped by SIGTERM",
    ),
    "the workers outlive SIGINT": (
        TWO,
        (*RUNS, INT, DEADLINE),
        EndTree(),
        "the grace is over; killing 2 workers",
    ),
    "SIGINT ends with 130": (
        TWO,
        (*RUNS, INT, DEADLINE, exited(0, -9), exited(1, -9), gone()),
        Finish(130),
        "stopped by SIGINT",
    ),
    "SIGTERM ends the restarts": (
        THREE_RESTARTS,
        (*RUNS, exited(0, 7), TERM, exited(1, -15, stopped=True), gone()),
        Finish(7),
        "rank 0 exited with code 7; no restart after SIGTERM",
    ),
    "SIGTERM in the backoff": (
        THREE_RESTARTS,
        (*FAILED, gone(), *again(1), TERM),
        Finish(3),
        "rank 1 exited with code 3; no restart after SIGTERM",
    ),
    "SIGTERM while choosing for a restart": (
        SAVING,
        (READY, chosen(None), *FAILED[1:], gone(), TERM),
        Finish(7),
        "rank 0 exited with code 7; no restart after SIGTERM",
    ),
    "SIGTERM in a later round": (
        THREE_RESTARTS,
        (*FAILED, gone(), TERM, exited(0, -15, 1), exited(1, -15, 1), gone(1)),
        Finish(143),
        "stopped by SIGTERM",
    ),
    "USR1 is forwarded": (
        FORWARDING,
        (*RUNS, USR1),
        Forward(signal.SIGUSR1),
        "SIGUSR1 received: forwarded to the workers",
    ),
    "USR1 is forwarded to those who still save": (
        FORWARDING,
        (*RUNS, TERM, USR1),
        Forward(signal.SIGUSR1),
        "SIGUSR1 received: forwarded to the workers",
    ),
    "USR1 has nobody to go to": (
        FORWARDING,
        (USR1,),
        Nothing(),
        "SIGUSR1 received: no worker runs to forward it to",
    ),
    "a worker that dies of it has failed": (
        FORWARDING,
        (*RUNS, USR1, exited(0, -10)),
        StopWorkers(signal.SIGTERM, 5.0),
        "rank 0 was killed by SIGUSR1; stopping the other 1 worker, grace 5 s",
    ),
    "and the job goes on": (
        FORWARDING,
        (*RUNS, USR1, exited(0, 0), exited(1, 0), gone()),
        Finish(0),
        "all workers ended with 0",
    ),
    # ── checkpoints that are in memory only ──
    "what is in memory is written out first": (
        SAVING,
        (*SAVED, gone()),
        Settle(30.0, holds=True),
        "",
    ),
    "then the choice is made": (SAVING, (*SAVED, gone(), SETTLED), Meet(), ""),
    "what a round can load is not waited for": (
        SAVING,
        (*HELD, chosen(None)),
        StartRound(1, Checkpoint(Path("/ck/step-00000010.r0"), 10, "elaunch", uuid="u")),
        "rank 0 exited with code 7; restart 1 of 2 since the last progress, from step 10",
    ),
    "what is on the disk by then is taken from there": (
        SAVING,
        (*HELD, chosen(10, path="/ck/step-00000010.r0")),
        StartRound(1, Checkpoint(Path("/ck/step-00000010.r0"), 10, "torch.save")),
        "rank 0 exited with code 7; restart 1 of 2 since the last progress, from step 10",
    ),
    "a round that has loaded it may leave it there again": (
        SAVING,
        (*HELD, chosen(None), *again(1)),
        Settle(30.0, holds=True),
        "",
    ),
    "it is written out when no round follows": (
        ONCE,
        (*HELD, chosen(None), *again(1), still_held(1), chosen(None)),
        Settle(30.0, then=Finish(3), why=NO_PROGRESS),
        "",
    ),
    "and then the job ends": (
        ONCE,
        (*HELD, chosen(None), *again(1), still_held(1), chosen(None), events.SavesSettled(1)),
        Finish(3),
        NO_PROGRESS,
    ),
    "not when the wait before that reports what it still holds": (
        ONCE,
        (*HELD, chosen(None), *again(1), still_held(1), chosen(None), still_held(1)),
        Nothing(),
        "",
    ),
    "a signal during the first wait leaves nothing in memory": (
        SAVING,
        (*SAVED, gone(), TERM, still_held(0)),
        Settle(30.0, then=Finish(7), why="rank 0 exited with code 7; no restart after SIGTERM"),
        "",
    ),
    "a round that loads it cannot be started": (
        SAVING,
        (*HELD, chosen(None), events.WorkerNotStarted(1, 0, "no processes left")),
        Settle(30.0, then=Finish(71), why="cannot start rank 0: no processes left"),
        "",
    ),
    "and its end": (
        SAVING,
        (
            *(*HELD, chosen(None), events.WorkerNotStarted(1, 0, "no processes left")),
            events.SavesSettled(1),
        ),
        Finish(71),
        "cannot start rank 0: no processes left",
    ),
    "a server that cannot be killed": (
        SAVING,
        (*SAVED, DEADLINE, DEADLINE),
        Settle(
            30.0,
            then=Finish(7),
            why="rank 0 exited with code 7; no restart: the server that starts the workers cannot "
            "be killed: it hangs in the kernel",
        ),
        "",
    ),
    "or when the storage has had its time": (
        ONCE,
        (*HELD, chosen(None), *again(1), still_held(1), chosen(None), DEADLINE),
        Finish(3),
        NO_PROGRESS,
    ),
    "a signal between two rounds has it written out": (
        SAVING,
        (*HELD, TERM),
        Settle(30.0, then=Finish(7), why="rank 0 exited with code 7; no restart after SIGTERM"),
        "",
    ),
    "without a directory the next round begins": (
        THREE_RESTARTS,
        (*RUNS, USED, exited(0, 7), exited(1, -15, stopped=True), gone(), SETTLED),
        StartRound(1, None),
        "rank 0 exited with code 7; restart 1 of 3",
    ),
    "a signal has them written out, too": (
        TWO,
        (*RUNS, USED, TERM, exited(0, -15), exited(1, -15), gone()),
        Settle(30.0),
        "",
    ),
    "and the exit code is the same": (
        TWO,
        (*RUNS, USED, TERM, exited(0, -15), exited(1, -15), gone(), SETTLED),
        Finish(143),
        "stopped by SIGTERM",
    ),
    "at the end of a job that is done": (
        TWO,
        (*RUNS, USED, exited(0, 0), exited(1, 0), gone(), SETTLED),
        Finish(0),
        "all workers ended with 0",
    ),
    "which waits for it long": (
        TWO,
        (*RUNS, USED, exited(0, 0), exited(1, 0), gone()),
        Settle(1800.0),
        "",
    ),
    "and has not ended well if it is lost": (
        TWO,
        (*RUNS, USED, exited(0, 0), exited(1, 0), gone(), events.SavesSettled(0, (), ("step-1",))),
        Finish(74),
        "all workers ended with 0, but their last checkpoint was in memory only, and is lost",
    ),
    "or the storage hangs": (
        TWO,
        (*RUNS, USED, exited(0, 0), exited(1, 0), gone(), DEADLINE),
        Finish(74),
        "all workers ended with 0, but their last checkpoint was in memory only, and is lost",
    ),
    "a signal meanwhile": (
        SAVING,
        (*SAVED, gone(), TERM),
        Hurry(30.0),
        "SIGTERM received: the checkpoint in memory is being written out, grace 30 s",
    ),
    "after which nothing is restarted": (
        SAVING,
        (*SAVED, gone(), TERM, SETTLED),
        Finish(7),
        "rank 0 exited with code 7; no restart after SIGTERM",
    ),
    "the second SIGINT does not wait for it": (
        SAVING,
        (*SAVED, gone(), INT, INT),
        Finish(7),
        "SIGINT again: what is in memory only is lost; "
        "rank 0 exited with code 7; no restart after SIGINT",
    ),
    "the storage hangs": (SAVING, (*SAVED, gone(), DEADLINE), Meet(), ""),
    "and answers when it is too late": (
        SAVING,
        (*SAVED, gone(), DEADLINE, SETTLED),
        Nothing(),
        "",
    ),
    "what another round has left": (
        SAVING,
        (*SAVED, gone(), events.SavesSettled(3)),
        Nothing(),
        "",
    ),
    "the server dies while it is written": (
        SAVING,
        (*SAVED, gone(), lost()),
        EndTree(),
        "the server that starts the workers was killed by SIGKILL; its workers ended with it",
    ),
    "and it is settled after that": (
        SAVING,
        (*SAVED, gone(), lost(), gone()),
        Settle(30.0, holds=True),
        "",
    ),
    "the next round has left nothing": (
        SAVING,
        (*SAVED, gone(), SETTLED, chosen(10), *again(1)),
        Meet(),
        "",
    ),
    "a worker of the round before": (
        SAVING,
        (*SAVED[:4], events.SaverUsed(5), *FAILED[3:], gone()),
        Meet(),
        "",
    ),
    # ── a search, and what comes meanwhile ──
    "the server dies while a checkpoint is looked for": (
        SAVING,
        (*LOOKED, gone(), lost()),
        RestartServer(),
        "the server that starts the workers was killed by SIGKILL; starting another",
    ),
    "the search is waited for": (SAVING, (*LOOKED, gone(), lost(), READY), Nothing(), ""),
    "its result is the one": (
        SAVING,
        (*LOOKED, gone(), lost(), READY, chosen(10)),
        StartRound(1, checkpoint(10)),
        "rank 0 exited with code 7; restart 1 of 2 since the last progress, from step 10",
    ),
    "a signal meanwhile ends the job": (
        SAVING,
        (*LOOKED, gone(), TERM),
        Finish(7),
        "rank 0 exited with code 7; no restart after SIGTERM",
    ),
    "the server dies too often in a backoff": (
        THREE_RESTARTS,
        (*FAILED, gone(), *again(1), lost(), lost(), lost(), lost()),
        Finish(71),
        "the server that starts the workers was killed by SIGKILL 4 times while no worker ran",
    ),
}
UNCOUNTED, JOINING = Limits(0), Limits(0, meets=True)
PROBED, COUNTED = events.DirectoryProbed(), events.DevicesCounted(2, None)
UNUSABLE = events.DirectoryProbed("--checkpoint-dir /ck: it is full")
NO_GPU = events.DevicesCounted(None, "--nproc-per-node gpu: no CUDA GPU found")
BEGINS = (StartRound(0, None), "first start")
DRAIN = events.PreemptAsked("drain", print)
FRESH: dict[str, Row] = {
    "the directory comes last": (TWO, (READY, PROBED), *BEGINS),
    "the server comes last": (UNCOUNTED, (COUNTED, PROBED, READY), *BEGINS),
    "the count comes last": (UNCOUNTED, (READY, PROBED, COUNTED), *BEGINS),
    "one of several counts last": (
        JOINING,
        (READY, PROBED, COUNTED),
        Meet(),
        "ready; waiting for the other nodes",
    ),
    "the directory is missing": (UNCOUNTED, (READY, COUNTED), Nothing(), ""),
    "the count is missing": (UNCOUNTED, (PROBED, READY), Nothing(), ""),
    "a server that was replaced is not ready": (TWO, (THREADED, PROBED), Nothing(), ""),
    "the directory cannot be used": (
        TWO,
        (UNUSABLE,),
        Refuse(UsageError, "E-CHECKPOINT-DIR"),
        UNUSABLE.problem,
    ),
    "nor though the server is ready": (
        UNCOUNTED,
        (READY, COUNTED, UNUSABLE),
        Refuse(UsageError, "E-CHECKPOINT-DIR"),
        UNUSABLE.problem,
    ),
    "there are no devices": (
        UNCOUNTED,
        (NO_GPU,),
        Refuse(UsageError, "E-DEVICES"),
        NO_GPU.problem or "",
    ),
    "nothing can be preloaded for the count": (
        UNCOUNTED,
        (PROBED, BROKEN),
        Refuse(UsageError),
        BROKEN.problem or "",
    ),
    "nothing can be preloaded, and the number is known": (
        TWO,
        (PROBED, BROKEN),
        Refuse(UsageError),
        BROKEN.problem or "",
    ),
    "nothing can be preloaded, and the others know of this node": (
        JOINING,
        (COUNTED, PROBED, BROKEN),
        Finish(2),
        BROKEN.problem or "",
    ),
    "the server that counts ends": (
        UNCOUNTED,
        (PROBED, lost(1)),
        Refuse(ServerError),
        "the server that starts the workers exited with code 1",
    ),
    "it is killed, and may count again": (
        Limits(0, max_restarts=1),
        (PROBED, lost(-9), READY, COUNTED),
        *BEGINS,
    ),
    "a server that was ready is lost": (
        Limits(2, max_restarts=1),
        (READY, lost(-9), PROBED),
        Nothing(),
        "",
    ),
    "it never counts": (
        UNCOUNTED,
        (PROBED, DEADLINE),
        Refuse(ServerError),
        "the server has not counted the devices for 600 s: does the file system of its Python "
        "answer? --nproc-per-node with a number does not need it",
    ),
    "SIGTERM while it counts": (UNCOUNTED, (TERM,), Finish(143), "stopped by SIGTERM"),
    "SIGTERM while one of several counts": (JOINING, (TERM,), Finish(143), "stopped by SIGTERM"),
    "asked while it counts": (
        UNCOUNTED,
        (READY, DRAIN),
        Finish(75),
        "drain: no worker runs; to be continued",
    ),
    "one of several goes on, since the others have to learn of it": (
        JOINING,
        (DRAIN, PROBED, READY, COUNTED),
        Meet(),
        "ready; waiting for the other nodes",
    ),
    "a signal to forward": (
        Limits(0, forwarded=frozenset({signal.SIGUSR1})),
        (USR1,),
        Nothing(),
        "SIGUSR1 received: no worker runs to forward it to",
    ),
}


@each("name", TABLE)
def test_the_decision_table(name: str) -> None:
    """The last event of each history, the action, and the words for it."""
    limits, history, action, reason = TABLE[name]
    assert last(limits, *history) == Decided(action, reason)


@each("name", FRESH)
def test_the_first_moments(name: str) -> None:
    """The same for an agent that knows neither its directory nor, maybe, its workers."""
    limits, history, action, reason = FRESH[name]
    assert last(limits, *history, fresh=True) == Decided(action, reason)


def test_a_newer_checkpoint_refills_the_budget() -> None:
    """Two restarts without progress are allowed; three with progress between them are, too."""
    lives = [again(number) for number in range(4)]
    history = [READY, chosen(None), *lives[0], chosen(10), *lives[1], chosen(20), *lives[2]]
    state, decided = play(SAVING, [*history, chosen(30)])
    assert (state.round, state.restarts, state.without_progress) == (3, 3, 1)
    assert not any("backoff" in each.reason for each in decided)


def test_a_checkpoint_that_is_no_newer_does_not() -> None:
    """The same one, or an older one since the newest is torn, is no progress."""
    history = [READY, chosen(50), *again(0), chosen(50), *again(1), chosen(40), DEADLINE]
    state, decided = play(SAVING, [*history, *again(2), chosen(40)])
    assert (state.phase, state.restarts) == (Phase.ENDED, 2)
    assert decided[-1] == Decided(
        Finish(3),
        "rank 1 exited with code 3; 2 restarts in a row brought no progress (--max-restarts)",
    )


def test_the_backoff_doubles_up_to_its_bound() -> None:
    """Half a second, then twice as long each time; never more than half a minute."""
    history: list[events.Event] = [READY, *again(0)]
    for number in range(1, 10):
        history += [*again(number), DEADLINE]
    _, decided = play(Limits(2, max_restarts=99), history)
    waits = [each.reason for each in decided if isinstance(each.action, Nothing)]
    bounds = [reason.partition("up to ")[2].partition(" s:")[0] for reason in waits]
    assert bounds == ["0.5", "1", "2", "4", "8", "16", "30", "30", "30"]


def test_two_failures_in_one_moment_are_both_failures() -> None:
    """The second had not been told to end; a third that had is merely stopped."""
    history = [READY, exited(2, 1), exited(0, 1, at=1.001), exited(1, -15, at=1.1, stopped=True)]
    state, _ = play(Limits(3), history)
    assert (state.first, state.later, state.stopped) == (history[1], (history[2],), (history[3],))


# ── anything ─────────────────────────────────────────────────────────────────────────────────────

LIMITS = st.builds(
    Job,
    nproc=st.integers(0, 3),
    max_restarts=st.integers(0, 3),
    lifetime_budget=st.booleans(),
    has_checkpoint_dir=st.booleans(),
    forwarded=st.sampled_from([frozenset(), frozenset({signal.SIGUSR1})]),
)
CODES = st.sampled_from([0, 0, 1, 3, -9, -15])
ANY_EVENT = st.one_of(
    st.sampled_from([READY, BROKEN, DEADLINE, TERM, INT, USR1, events.StoreLost("x")]),
    st.sampled_from([PROBED, UNUSABLE, COUNTED, NO_GPU]),
    st.builds(started, st.integers(0, 2), st.integers(0, 3)),
    st.builds(
        exited, st.integers(0, 2), CODES, st.integers(0, 3), st.floats(0, 100), st.booleans()
    ),
    st.builds(gone, st.integers(0, 3)),
    st.builds(lost, CODES),
    st.builds(chosen, st.one_of(st.none(), st.integers(0, 9))),
    st.builds(events.SaverUsed, st.integers(0, 3)),
    st.builds(events.SavesSettled, st.integers(0, 3)),
)


@pytest.mark.slow
@given(LIMITS, st.lists(ANY_EVENT, max_size=40), st.booleans())
def test_no_history_breaks_the_policy(
    limits: Job, history: list[events.Event], fresh: bool
) -> None:
    """Never an exception; rounds count up; the end is the end; restarts keep to the budget."""
    played = Played(limits, fresh)
    for event in history:
        for taken in played.take(event):
            before, action = taken.before, taken.action
            if before.phase is Phase.ENDED:
                assert isinstance(action, Nothing)
            if isinstance(action, StartRound):
                assert action.round == (before.round + 1 if before.member else 0)
                assert before.phase in (Phase.STARTING, Phase.MEETING)
    state = played.state
    spent = state.restarts if limits.lifetime_budget else state.without_progress
    assert spent <= limits.max_restarts


# ── what can happen ──────────────────────────────────────────────────────────────────────────────


class PlayedServer(RuleBasedStateMachine):
    """A server and a clock that do what the policy says, in any order that the real ones may."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = Job(
            2, max_restarts=2, has_checkpoint_dir=True, forwarded=frozenset({signal.SIGUSR1})
        )
        self.played = Played(self.limits)
        self.actions: list[Action] = []
        self.alive: dict[int, int] = {}  # rank → round, what really runs
        self.server = True
        self.told = False
        self.sweeping: int | None = None
        self.settling: list[int] = []
        self.uses = False
        self.deadline = False
        self.step_saved = 0
        self.post(READY)

    def post(self, event: events.Event) -> None:
        """Give the loop an event, and do what it decides."""
        for taken in self.played.take(event):
            self.do(taken)

    def do(self, taken: Turn) -> None:
        """Do what a turn has decided."""
        before, action = taken.before, taken.action
        self.actions.append(action)
        if isinstance(action, StartRound):
            assert not self.alive, "a round was started while workers of the last one were alive"
            self.alive = dict.fromkeys(range(self.limits.nproc), action.round)
            self.server, self.told, self.deadline = True, False, False
            self.uses = False
        elif isinstance(action, Meet):
            assert not self.alive, "the choice was made before the old tree was dead"
            assert not self.uses, "the choice was made before memory was on the disk"
            self.deadline = False
        elif isinstance(action, Settle):
            assert not self.alive, "workers may still hand over"
            self.settling.append(before.round)
            self.deadline = True
        elif isinstance(action, StopWorkers):
            self.told = self.deadline = True
        elif isinstance(action, EndTree):
            self.told = self.deadline = True
            self.sweeping = before.round
        elif isinstance(action, RestartServer):
            self.server = True
        elif isinstance(action, KillServer) and self.server:
            self.lose_server()

    def running(self) -> bool:
        """Whether the job has not ended."""
        return self.played.state.phase is not Phase.ENDED

    @precondition(lambda self: self.alive)
    @rule(code=CODES, which=st.integers(0, 1), at=st.floats(0, 200))
    def end_worker(self, code: int, which: int, at: float) -> None:
        """A worker ends, by itself or because it was told to."""
        rank = sorted(self.alive)[which % len(self.alive)]
        number = self.alive.pop(rank)
        self.post(exited(rank, code, number, at, self.told))

    @precondition(lambda self: self.sweeping is not None)
    @rule()
    def end_sweep(self) -> None:
        """The sweep kills who is left, tells of it, and of its own end."""
        while self.alive:
            self.end_worker(-9, 0, 5.0)
        number, self.sweeping = self.sweeping, None
        assert number is not None
        self.post(gone(number))

    @precondition(lambda self: self.running() and self.server)
    @rule()
    def lose_server(self) -> None:
        """The server is killed, and all of its workers with it, whose ends nobody tells."""
        self.server, self.alive, self.sweeping = False, {}, None
        self.post(lost())

    @precondition(lambda self: self.alive)
    @rule()
    def use_keeper(self) -> None:
        """A worker leaves its checkpoints in the agent's memory."""
        self.uses = True
        self.post(events.SaverUsed(next(iter(self.alive.values()))))

    @precondition(lambda self: self.settling)
    @rule()
    def end_settling(self) -> None:
        """What is in memory is on the disk, perhaps when nobody waits for it any more."""
        self.uses = False
        self.post(events.SavesSettled(self.settling.pop(0)))

    @precondition(lambda self: self.played.searches)
    @rule(saved=st.integers(0, 1))
    def end_search(self, saved: int) -> None:
        """The search for checkpoints finds the last one, or a newer one."""
        self.step_saved += saved
        self.post(chosen(self.step_saved or None))

    @precondition(lambda self: self.deadline or self.played.due is not None)
    @rule()
    def pass_deadline(self) -> None:
        """A grace or a backoff is over."""
        self.deadline = False
        self.uses = self.uses and self.played.state.phase is not Phase.FLUSHING
        self.post(DEADLINE)

    @rule(event=st.sampled_from([TERM, INT, USR1]))
    def signal(self, event: events.SignalReceived) -> None:
        """Somebody signals the agent, perhaps after the end."""
        self.post(event)

    @invariant()
    def waits_for_something(self) -> None:
        """While the job has not ended, something will come that takes it on."""
        assert self.played.searches <= 1, "a second search beside the first one"
        coming = self.alive or self.played.searches or self.deadline or self.sweeping is not None
        coming = coming or self.settling or self.played.due is not None
        assert coming or not self.running()

    def teardown(self) -> None:
        """Whatever has happened, the job comes to its end when its workers are done."""
        for _ in range(100):
            if not self.running():
                break
            if self.sweeping is not None:
                self.end_sweep()
            elif self.alive:
                self.end_worker(0, 0, 9.0)
            elif self.played.searches:
                self.end_search(0)
            elif self.settling:
                self.end_settling()
            else:
                self.pass_deadline()
        assert sum(isinstance(action, Finish) for action in self.actions) == 1


PlayedServer.TestCase.settings = settings(stateful_step_count=30)
TestPlayedServer = pytest.mark.slow(PlayedServer.TestCase)
