"""A round that somebody asks to end: what one agent does, alone and among several."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    Action,
    AskRestart,
    EndTree,
    Finish,
    Nothing,
    Notify,
    StartRound,
    StopWorkers,
)
from elaunch.agent.policy.state import Limits
from elaunch.rendezvous.plan import Node, Plan, RestartRequest
from elaunch.wire.worker import Notice
from tests.agent.histories import (
    DEADLINE,
    READY,
    TERM,
    Job,
    Played,
    checkpoint,
    chosen,
    decisions,
    exited,
    gone,
    last,
    started,
)
from tests.tables import each

ONE = Job(2, max_restarts=0, shutdown_timeout=30.0)
SAVING = replace(ONE, has_checkpoint_dir=True)
MANY = replace(ONE, meets=True)
FIRST = Plan("job", 0, "running", nodes=(Node("aa", "node1", "10.0.0.1", 2, "x"),))
ENDS = replace(FIRST, phase="ending", cause="asked", reason="new data")
RUNS = (READY, started(0), started(1))
THERE = (READY, events.PlanSeen(FIRST, "aa"), started(0), started(1))
ASK = events.RestartAsked("new data", lambda _: None)
JOINED = AskRestart(RestartRequest(0, "new data"))
DRAIN = events.PreemptAsked("drain", lambda _: None)
LISTENS = events.WorkerListens(0, 1)
ENDED = (exited(0, -15, stopped=True), exited(1, -15, stopped=True))
NOTICE = Notice("new data", "resize")
ACKED = tuple(events.PreemptAcked(0, rank, NOTICE) for rank in range(2))
SECOND = replace(FIRST, round=1)
FEW = replace(ENDS, phase="forming", reason="too few")
AGAIN = (*RUNS, ASK, *ENDED, gone(), started(0, 1, 10.0), started(1, 1, 10.1))
STOP = StopWorkers(signal.SIGTERM, 30.0)
CALLED = "round 0 is to end, and the next begins from the newest checkpoint"

Row = tuple[Limits, tuple[events.Event, ...], Action, str]
TABLE: dict[str, Row] = {
    "workers that cannot save are stopped": (
        *(ONE, (*RUNS, ASK), STOP, "new data; stopping 2 workers, grace 30 s"),
    ),
    "others save": (
        ONE,
        (*RUNS, LISTENS, ASK),
        Notify(NOTICE, 30.0),
        "new data; 2 workers may save, grace 30 s",
    ),
    "and do not in time": (
        ONE,
        (*RUNS, LISTENS, ASK, DEADLINE),
        EndTree(signal.SIGTERM, 5.0),
        "the notice was not followed for 30 s; rank 0 has not asked should_preempt(); "
        "ending 2 workers",
    ),
    "the next round follows": (
        *(ONE, (*RUNS, ASK, *ENDED, gone()), StartRound(1, None), "new data"),
    ),
    "also where all have saved": (
        ONE,
        (*RUNS, LISTENS, ASK, *ACKED, exited(0, 0), exited(1, 0), gone()),
        *(StartRound(1, None), "new data"),
    ),
    "also where one fails over it": (
        ONE,
        (*RUNS, LISTENS, ASK, exited(0, 1), exited(1, -15, stopped=True), gone()),
        *(StartRound(1, None), "new data"),
    ),
    "from the newest checkpoint": (
        SAVING,
        (READY, chosen(None), *RUNS[1:], ASK, *ENDED, gone(), chosen(40)),
        StartRound(1, checkpoint(40)),
        "new data, from step 40",
    ),
    "all were done already": (
        ONE,
        (*RUNS, LISTENS, ASK, exited(0, 0), exited(1, 0), gone()),
        *(Finish(0), "all workers ended with 0"),
    ),
    "a signal ends the job": (
        *(ONE, (*RUNS, ASK, TERM, *ENDED, gone()), Finish(143), "stopped by SIGTERM"),
    ),
    "a request to end it, too": (
        ONE,
        (*RUNS, LISTENS, ASK, DRAIN, *ACKED, exited(0, 0), exited(1, 0), gone()),
        *(Finish(75), "preempted: drain; to be continued"),
    ),
    "two at once": (
        *(ONE, (*RUNS, ASK, ASK), JOINED, "new data: round 0 is being restarted already"),
    ),
    "again, when the round has just begun": (
        ONE,
        (*AGAIN, events.RestartAsked("new data", lambda _: None, 12.0)),
        *(
            JOINED,
            "new data: round 1 has begun for this 2.0 s ago; for another, ask 5 s after that",
        ),
    ),
    "on another node, too": (
        MANY,
        (*THERE, events.PlanSeen(ENDS, "aa"), *ENDED, gone(), events.PlanSeen(SECOND, "aa"), ASK),
        *(
            JOINED,
            "new data: round 1 has begun for this 0.00 s ago; for another, ask 5 s after that",
        ),
    ),
    "later it is another one": (
        *(
            ONE,
            (*AGAIN, events.RestartAsked("new data", lambda _: None, 15.0)),
            STOP,
            "new data; stopping 2 workers, grace 30 s",
        ),
    ),
    "and so it is for another reason": (
        ONE,
        (*AGAIN, events.RestartAsked("new code", lambda _: None, 12.0)),
        *(STOP, "new code; stopping 2 workers, grace 30 s"),
    ),
    "between the rounds": (
        MANY,
        (*THERE, events.PlanSeen(ENDS, "aa"), *ENDED, gone(), events.PlanSeen(FEW, "aa"), ASK),
        *(JOINED, "new data: round 0 is being restarted already"),
    ),
    "before a round": (SAVING, (ASK,), Nothing(), "new data: no round runs yet"),
    "after a request to end": (
        *(ONE, (*RUNS, LISTENS, DRAIN, ASK)),
        *(Nothing(), "new data: the job is asked to end: drain"),
    ),
    "after a signal": (
        *(ONE, (*RUNS, TERM, ASK), Nothing(), "new data: not while this node ends after SIGTERM"),
    ),
    "a round that fails": (
        *(ONE, (*RUNS, exited(0, 1), ASK), Nothing(), "new data: round 0 ends already"),
    ),
    "a round that is done": (
        *(ONE, (*RUNS, exited(0, 0), exited(1, 0), ASK)),
        *(Nothing(), "new data: round 0 ends already"),
    ),
    "of several nodes the coordinator is asked": (
        MANY,
        (*THERE, ASK),
        AskRestart(RestartRequest(0, "new data")),
        f"new data: {CALLED}",
    ),
    "and has all of them do it": (
        *(MANY, (*THERE, events.PlanSeen(ENDS, "aa"))),
        *(STOP, "new data; stopping 2 workers, grace 30 s"),
    ),
    "a backoff runs": (
        MANY,
        (READY, events.PlanSeen(replace(FIRST, phase="forming", reason="too few"), "aa"), ASK),
        *(Nothing(), "new data: no round runs: too few"),
    ),
}


@each("row", TABLE.values())
def test_decision(row: Row) -> None:
    """One row per rule: the last decision that follows from the last event."""
    limits, history, action, reason = row
    found = last(limits, *history)
    assert (found.action, found.reason) == (action, reason)


def test_whether_it_is_done() -> None:
    """What the command reports: it is asked, or refused."""
    played = Played(ONE)
    for event in RUNS:
        played.take(event)
    turns = played.take(ASK)
    assert decisions(turns)[0].action == AskRestart(RestartRequest(0, "new data"))
    assert turns[0].after.restarts_round
    for event in (*ENDED, gone()):
        played.take(event)
    assert (played.state.round, played.state.restarts_round) == (1, False)
    assert played.state.restarts == 0
