"""What follows a hang: a history of events, the last decision, its reason."""

from __future__ import annotations

import signal

import pytest
from msgspec import structs
from msgspec.structs import replace

from elaunch.agent.policy import events, nodes
from elaunch.agent.policy.actions import (
    Action,
    EndTree,
    Finish,
    Meet,
    Nothing,
    Notify,
    StartRound,
    StopWorkers,
    TakeStacks,
)
from elaunch.agent.policy.state import Limits, Phase
from elaunch.rendezvous.plan import Node, Plan, WorkerFailure
from elaunch.wire.worker import Notice
from tests.agent.histories import (
    DEADLINE,
    READY,
    TERM,
    Decided,
    exited,
    gone,
    last,
    lost,
    play,
    started,
)
from tests.tables import each

TWO = Limits(2)
ONE_RESTART = Limits(2, max_restarts=1)
WHY = "rank 1 has made no progress for 60 s (step 41; the others are at step 42)"
RUNS = (READY, started(0), started(1))


def hang(round: int = 0, at: float = 61.0) -> events.HangSeen:
    """Return the news of a hang of rank 1."""
    return events.HangSeen((1,), WHY, "script", round=round, at=at, pid=1001)


def taken(round: int = 0) -> events.StacksTaken:
    """Return the news that the stacks are there."""
    return events.StacksTaken(round)


HANGS = (*RUNS, hang())
KNOWN = (*HANGS, taken())
STOPPED = (exited(0, -15, stopped=True), exited(1, -9, stopped=True))
ENDED = (*KNOWN, *STOPPED, gone())
LISTENS = (*RUNS, events.WorkerListens(0, 0))

TABLE: dict[str, tuple[Limits, tuple[events.Event, ...], Action, str]] = {
    "a hang": (TWO, HANGS, TakeStacks(), f"{WHY}; taking the stacks of 2 workers"),
    "of another round": (TWO, (*RUNS, hang(3)), Nothing(), ""),
    "told twice": (TWO, (*HANGS, hang(at=62.0)), Nothing(), ""),
    "before a worker runs": (TWO, (READY, *STOPPED, hang()), Nothing(), ""),
    "while it is being stopped": (TWO, (*RUNS, exited(0, 7), hang()), Nothing(), ""),
    "after SIGTERM": (TWO, (*RUNS, TERM, hang()), Nothing(), ""),
    "after a notice that has a grace of its own": (
        TWO,
        (*LISTENS, TERM, hang()),
        Nothing(),
        "",
    ),
    "the stacks are there": (
        TWO,
        KNOWN,
        StopWorkers(signal.SIGTERM, 5.0),
        "round hung; stacks captured; stopping 2 workers, grace 5 s",
    ),
    "those of another round": (TWO, (*HANGS, taken(2)), Nothing(), ""),
    "stacks that nobody waits for": (TWO, (*RUNS, taken()), Nothing(), ""),
    "the stacks do not come": (
        TWO,
        (*HANGS, DEADLINE),
        StopWorkers(signal.SIGTERM, 5.0),
        "round hung; no stacks captured in time; stopping 2 workers, grace 5 s",
    ),
    "and then they do": (TWO, (*HANGS, DEADLINE, taken()), Nothing(), ""),
    "who outlives the grace": (
        TWO,
        (*KNOWN, exited(0, -15, stopped=True), DEADLINE),
        EndTree(),
        "the grace is over; killing 1 worker",
    ),
    "all have ended": (TWO, (*KNOWN, *STOPPED), EndTree(), "all workers have ended"),
    "the end": (TWO, ENDED, Finish(77), f"{WHY}; --max-restarts is 0"),
    "a restart": (ONE_RESTART, ENDED, StartRound(1, None), f"{WHY}; restart 1 of 1"),
    "a second hang": (
        ONE_RESTART,
        (
            *ENDED,
            started(0, 1),
            started(1, 1),
            hang(1),
            taken(1),
            exited(0, -15, 1, stopped=True),
            exited(1, -15, 1, stopped=True),
            gone(1),
        ),
        Finish(77),
        f"{WHY}; 1 restart brought no progress (--max-restarts)",
    ),
    "a crash while the stacks are taken": (
        TWO,
        (*HANGS, exited(0, -6)),
        Nothing(),
        "",
    ),
    "is no cause": (
        TWO,
        (*HANGS, exited(0, -6), taken(), exited(1, -15, stopped=True), gone()),
        Finish(77),
        f"{WHY}; --max-restarts is 0",
    ),
    "all crash meanwhile": (
        TWO,
        (*HANGS, exited(0, -6), exited(1, 1)),
        EndTree(),
        "rank 1 exited with code 1; no other worker is left",
    ),
    "all are done meanwhile: it was none": (
        ONE_RESTART,
        (*HANGS, exited(0, 0), exited(1, 0), gone()),
        Finish(0),
        "all workers ended with 0",
    ),
    "SIGTERM while the stacks are taken": (
        TWO,
        (*HANGS, TERM),
        StopWorkers(signal.SIGTERM, 30.0),
        "SIGTERM received: forwarded to the workers, grace 30 s",
    ),
    "and no restart then": (
        ONE_RESTART,
        (*HANGS, TERM, *STOPPED, gone()),
        Finish(77),
        f"{WHY}; no restart after SIGTERM",
    ),
    "the server dies while they are taken": (
        TWO,
        (*HANGS, lost(), gone()),
        Finish(77),
        f"{WHY}; --max-restarts is 0",
    ),
    "workers that may save for a newcomer hang as any others": (
        TWO,
        (*LISTENS, events.NoticeKnown(0, Notice("a node joins", "resize")), hang()),
        TakeStacks(),
        f"{WHY}; taking the stacks of 2 workers",
    ),
    "a notice while the stacks are taken": (
        TWO,
        (*HANGS, events.WorkerListens(0, 0), events.PreemptAsked("asked", print), taken()),
        StopWorkers(signal.SIGTERM, 5.0),
        "round hung; stacks captured; stopping 2 workers, grace 5 s",
    ),
}


@each("name", TABLE)
def test_the_decision_table(name: str) -> None:
    """The last event of each history, the action, and the words for it."""
    limits, history, action, reason = TABLE[name]
    assert last(limits, *history) == Decided(action, reason)


def test_a_notice_is_an_action_of_its_own() -> None:
    """The row above would mean nothing otherwise."""
    decided = last(TWO, *HANGS, events.WorkerListens(0, 0), events.PreemptAsked("asked", print))
    assert isinstance(decided.action, Notify)


def test_what_is_kept_for_the_report() -> None:
    """The hang, its stacks, and the ends of the workers."""
    state, _ = play(TWO, (*HANGS, exited(0, -6), taken(), exited(1, -9, stopped=True)))
    assert (state.hang, state.stacks, state.first) == (hang(), taken(), None)
    assert state.later == (exited(0, -6),)
    assert state.failed and state.hung and state.reportable
    state, _ = play(TWO, (*HANGS, exited(0, 0), exited(1, 0)))
    assert not (state.failed or state.hung or state.reportable)


def test_a_new_round_has_no_hang() -> None:
    """It is of its round."""
    state, _ = play(ONE_RESTART, ENDED)
    assert (state.phase, state.round, state.hang, state.stacks) == (Phase.RUNNING, 1, None, None)


# ── several nodes ────────────────────────────────────────────────────────────────────────────────

HERE, THERE = Node("aa", "node1", "10.0.0.1", 2, "x"), Node("bb", "node2", "10.0.0.2", 2, "x")
PLAN = Plan("job", 0, "running", "first start", nodes=(THERE, HERE))
CRASH = structs.replace(PLAN, phase="ending", cause="failure", reason="rank 0 exited with code 3")
TOLD = WorkerFailure(rank=0, exitcode=77, summary="rank 0 has made no progress")
OTHERS = structs.replace(CRASH, reason="rank 0 has made no progress (on node2)", failure=TOLD)
MEETS = replace(TWO, meets=True, takes_stacks=True)
IN_A_JOB = (READY, events.PlanSeen(PLAN, "aa"), started(0), started(1))


def test_a_node_tells_its_hang_when_the_stacks_are_taken() -> None:
    """Told at once, the others' failure would end the round before."""
    history = (*IN_A_JOB, hang())
    state, _ = play(MEETS, history)
    assert nodes.own_state(state) == ("running", 0)
    state, _ = play(MEETS, (*history, taken()))
    assert nodes.own_state(state) == ("failed", 0)
    decided = last(MEETS, *history, taken(), *STOPPED, gone())
    assert decided == Decided(Meet(), f"{WHY}; waiting for the other nodes")


def seen(plan: Plan) -> events.PlanSeen:
    """Return the news of a plan."""
    return events.PlanSeen(plan, "aa")


STOP = StopWorkers(signal.SIGTERM, 5.0)
VICTIM = replace(TOLD, exitcode=1, summary="rank 1 has ended before all_reduce #7")
JOB_TABLE: dict[str, tuple[Limits, tuple[events.Event, ...], Action]] = {
    "a hang on another node": (MEETS, (seen(OTHERS),), TakeStacks()),
    "a failure there": (MEETS, (seen(replace(CRASH, failure=VICTIM)),), STOP),
    "its plan again": (MEETS, (seen(OTHERS), seen(OTHERS)), Nothing()),
    "then the workers are stopped": (MEETS, (seen(OTHERS), taken()), STOP),
    "also if the stacks do not come": (MEETS, (seen(OTHERS), DEADLINE), STOP),
    "this node takes stacks already": (MEETS, (hang(), seen(OTHERS)), Nothing()),
    "and then stops": (MEETS, (hang(), seen(OTHERS), taken()), STOP),
    "where nothing can be asked": (replace(MEETS, takes_stacks=False), (seen(OTHERS),), STOP),
    "another failure needs no stacks": (MEETS, (seen(CRASH),), STOP),
}


@pytest.mark.parametrize("name", JOB_TABLE)
def test_a_hang_on_another_node_ends_the_round_here(name: str) -> None:
    """But first it is asked what the workers here are doing."""
    limits, history, action = JOB_TABLE[name]
    assert last(limits, *IN_A_JOB, *history).action == action


def test_the_stacks_of_a_hang_elsewhere_are_no_failure_of_this_node() -> None:
    """They are kept and told, nothing more."""
    state, _ = play(MEETS, (*IN_A_JOB, seen(OTHERS), taken()))
    assert (state.hang, state.stacks, state.failed) == (None, taken(), False)
