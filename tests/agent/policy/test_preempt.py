"""A job that is asked to save and to end: what is done about it, on one node and on several."""

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
    Hurry,
    Meet,
    Nothing,
    Notify,
    Settle,
    StartRound,
    StopWorkers,
)
from elaunch.agent.policy.rounds import LAST_SAVE_S
from elaunch.agent.policy.state import Limits, late_save
from elaunch.rendezvous.plan import Node, Plan
from elaunch.runs.record import SavesRecord
from elaunch.wire.worker import Notice
from tests.agent.histories import (
    DEADLINE,
    INT,
    READY,
    TERM,
    USR1,
    Decided,
    Job,
    chosen,
    exited,
    gone,
    last,
    play,
    started,
)
from tests.tables import each

TWO = Job(2, max_restarts=3, preempting=frozenset({signal.SIGUSR1}), shutdown_timeout=30.0)
SAVING = replace(TWO, has_checkpoint_dir=True)
MANY = replace(TWO, meets=True)
RUNS = (READY, started(0), started(1))
HERE, THERE = Node("aa", "node1", "10.0.0.1", 2, "x"), Node("bb", "node2", "10.0.0.2", 3, "x")
FIRST = Plan("job", 0, "running", "first start", nodes=(THERE, HERE))
GROWS = structs.replace(FIRST, joining=("cc",))
LEFT = structs.replace(FIRST, phase="ending", cause="left", reason="node node2 leaves")
FAILED = structs.replace(FIRST, phase="ending", cause="failure", reason="rank 0 exited with code 3")
SECOND = structs.replace(FIRST, round=1, reason="going on with 1 node", nodes=(HERE,))
ASKS = structs.replace(FIRST, asked="drain")
SPARE = structs.replace(FIRST, nodes=(THERE,), spares=("aa",))
OVER = structs.replace(
    FIRST, phase="over", exit_code=75, reason="preempted: drain; to be continued"
)
SWEEP = EndTree(signal.SIGTERM, 5.0)
STOP, SIGNAL, TERMED = Notice("drain"), Notice("SIGUSR1 received"), Notice("SIGTERM received")
LEAVES, JOINS = Notice("a node leaves (SIGTERM)", "resize"), Notice("a node joins", "resize")
ASKED = events.PreemptAsked("drain", lambda _: None)
LEFT_120, LEFT_4 = (events.PreemptAsked("spot", lambda _: None, left) for left in (120.0, 4.0))
TAKEN = events.SignalReceived(signal.SIGTERM, Notice("spot", "resize", 120.0))
PLAIN_TAKEN = events.SignalReceived(signal.SIGTERM, Notice("spot", "resize"))
SPOT = Notice("spot", "stop", 115.0)


def seen(plan: Plan) -> events.PlanSeen:
    """Return the news of a plan."""
    return events.PlanSeen(plan, "aa")


def listens(rank: int) -> events.WorkerListens:
    """Return that a worker can be asked."""
    return events.WorkerListens(0, rank)


def acked(rank: int, notice: Notice = STOP) -> events.PreemptAcked:
    """Return that a worker ends because it was asked."""
    return events.PreemptAcked(0, rank, notice)


LISTEN = (listens(0), listens(1))
DONE = (exited(0, 0), exited(1, 0))
SAVES, SETTLED = events.SaverUsed(0), events.SavesSettled(0)
WRITES = (*RUNS, SAVES, *DONE)
IDLE = (Nothing(), "")
SAVED = (acked(0), acked(1), *DONE)
JOB = (READY, seen(FIRST), started(0), started(1), *LISTEN)

Row = tuple[Limits, tuple[events.Event, ...], Action, str]
TABLE: dict[str, Row] = {
    "a signal": (
        TWO,
        (*RUNS, *LISTEN, USR1),
        Notify(SIGNAL, 30.0),
        "SIGUSR1 received: the workers are asked to save and to end (2 of 2 workers listen), "
        "grace 30 s",
    ),
    "a person": (
        TWO,
        (*RUNS, *LISTEN, ASKED),
        Notify(STOP, 30.0),
        "drain: the workers are asked to save and to end (2 of 2 workers listen), grace 30 s",
    ),
    "nobody listens yet": (
        TWO,
        (*RUNS, ASKED),
        Notify(STOP, 30.0),
        "drain: the workers are asked to save and to end (no worker has called should_preempt() "
        "yet), grace 30 s",
    ),
    "again": (TWO, (*RUNS, *LISTEN, ASKED, USR1), Nothing(), "SIGUSR1 received: drain already"),
    "a deadline leaves time to end them": (
        TWO,
        (*RUNS, *LISTEN, LEFT_120),
        Notify(SPOT, 115.0),
        "spot: the workers are asked to save and to end (2 of 2 workers listen), grace 115 s",
    ),
    "half of a short one": (
        TWO,
        (*RUNS, *LISTEN, LEFT_4),
        Notify(Notice("spot", "stop", 2.0), 2.0),
        "spot: the workers are asked to save and to end (2 of 2 workers listen), grace 2 s",
    ),
    "a deadline after a notice without one": (
        TWO,
        (*RUNS, *LISTEN, ASKED, LEFT_120),
        Notify(Notice("drain", "stop", 115.0), 115.0),
        "spot: drain already, grace 115 s",
    ),
    "the newest deadline counts": (
        TWO,
        (*RUNS, *LISTEN, LEFT_120, LEFT_4),
        Notify(Notice("spot", "stop", 2.0), 2.0),
        "spot: spot already, grace 2 s",
    ),
    "a notice without one changes nothing": (
        TWO,
        (*RUNS, *LISTEN, LEFT_120, ASKED),
        Nothing(),
        "drain: spot already",
    ),
    "a deadline is over": (
        TWO,
        (*RUNS, *LISTEN, LEFT_120, DEADLINE),
        SWEEP,
        "the notice was not followed for 115 s; ending 2 workers",
    ),
    "a deadline that another node knows": (
        MANY,
        (*JOB, seen(ASKS), events.NoticeKnown(0, Notice("drain", "stop", 115.0))),
        Notify(Notice("drain", "stop", 115.0), 115.0),
        "drain: the workers are asked to save and to end (2 of 2 workers listen), grace 115 s",
    ),
    "it is known already": (
        MANY,
        (*JOB, LEFT_120, events.NoticeKnown(0, SPOT)),
        *IDLE,
    ),
    "the machine of one node of several is taken": (
        MANY,
        (*JOB, TAKEN),
        Notify(Notice("spot", "resize", 115.0), 115.0),
        "spot: the workers are asked to save and to end (2 of 2 workers listen), grace 115 s",
    ),
    "and its workers cannot save": (
        MANY,
        (READY, seen(FIRST), *RUNS[1:], TAKEN),
        StopWorkers(signal.SIGTERM, 30.0),
        "spot: forwarded to the workers, grace 30 s",
    ),
    "the platform's SIGTERM after that": (
        MANY,
        (*JOB, TAKEN, TERM),
        Nothing(),
        "SIGTERM received: spot already, grace 115 s",
    ),
    "and a second one": (
        MANY,
        (*JOB, TAKEN, TERM, TERM),
        StopWorkers(signal.SIGTERM, 30.0),
        "SIGTERM received: forwarded to the workers, grace 30 s",
    ),
    "the platform's SIGTERM comes first": (
        MANY,
        (*JOB, TERM, TAKEN),
        Notify(LEAVES._replace(grace=115.0), 115.0),
        "spot: a node leaves (SIGTERM) already, grace 115 s",
    ),
    "and the notice has no time": (
        MANY,
        (*JOB, TERM, PLAIN_TAKEN),
        Nothing(),
        "spot: a node leaves (SIGTERM) already",
    ),
    "the machine of a job that is asked to end is taken": (
        MANY,
        (*JOB, ASKED, TAKEN),
        Notify(STOP._replace(grace=115.0), 115.0),
        "spot: drain already, grace 115 s",
    ),
    "another node's machine, and then this one's": (
        MANY,
        (*JOB, events.NoticeKnown(0, LEAVES), PLAIN_TAKEN),
        Notify(Notice("spot", "resize"), 30.0),
        "spot: the workers are asked to save and to end (2 of 2 workers listen), grace 30 s",
    ),
    "another node's machine is taken, and its time is its own": (
        MANY,
        (*JOB, events.NoticeKnown(0, Notice("spot", "resize", 115.0))),
        Notify(Notice("spot", "resize"), None),
        "spot: the workers are asked to save (2 of 2 workers listen)",
    ),
    "on one node the platform's SIGTERM leaves the deadline, too": (
        TWO,
        (*RUNS, *LISTEN, LEFT_120, TERM),
        Nothing(),
        "SIGTERM received: spot already, grace 115 s",
    ),
    "a second one does not": (
        TWO,
        (*RUNS, *LISTEN, LEFT_120, TERM, TERM),
        StopWorkers(signal.SIGTERM, 30.0),
        "SIGTERM received: forwarded to the workers, grace 30 s",
    ),
    "on one node it comes first": (
        TWO,
        (*RUNS, *LISTEN, TERM, LEFT_120),
        Notify(TERMED._replace(grace=115.0), 115.0),
        "spot: SIGTERM received already, grace 115 s",
    ),
    "the platform's SIGTERM while the last save is written": (
        TWO,
        (*RUNS, SAVES, *LISTEN, LEFT_120, *SAVED, gone(), TERM),
        Nothing(),
        "SIGTERM received: spot already, grace 115 s",
    ),
    "a second one then": (
        TWO,
        (*RUNS, SAVES, *LISTEN, LEFT_120, *SAVED, gone(), TERM, TERM),
        Hurry(30.0),
        "SIGTERM received: the checkpoint in memory is being written out, grace 30 s",
    ),
    "a node that leaves does not shorten a deadline": (
        MANY,
        (*JOB, LEFT_120, seen(LEFT)),
        Nothing(),
        "node node2 leaves; 2 workers may save, grace 115 s",
    ),
    "SIGTERM to a job that can save": (
        TWO,
        (*RUNS, *LISTEN, TERM),
        Notify(TERMED, 30.0),
        "SIGTERM received: the workers are asked to save and to end (2 of 2 workers listen), "
        "grace 30 s",
    ),
    "SIGTERM to one that cannot": (
        TWO,
        (*RUNS, TERM),
        StopWorkers(signal.SIGTERM, 30.0),
        "SIGTERM received: forwarded to the workers, grace 30 s",
    ),
    "SIGTERM again": (
        TWO,
        (*RUNS, *LISTEN, TERM, TERM),
        StopWorkers(signal.SIGTERM, 30.0),
        "SIGTERM received: forwarded to the workers, grace 30 s",
    ),
    "SIGTERM after a notice": (
        TWO,
        (*RUNS, *LISTEN, ASKED, TERM),
        Hurry(30.0),
        "SIGTERM received: drain already, grace 30 s",
    ),
    "SIGINT is not a request to save": (
        TWO,
        (*RUNS, *LISTEN, INT),
        StopWorkers(signal.SIGINT, 30.0),
        "SIGINT received: forwarded to the workers, grace 30 s",
    ),
    "all have ended": (
        TWO,
        (*RUNS, *LISTEN, ASKED, *SAVED),
        SWEEP,
        "all workers have saved and ended (drain); ending what they left, if anything",
    ),
    "and are gone": (
        TWO,
        (*RUNS, *LISTEN, ASKED, *SAVED, gone()),
        Finish(75),
        "preempted: drain; to be continued",
    ),
    "the same by SIGTERM": (
        TWO,
        (*RUNS, *LISTEN, TERM, acked(0, TERMED), *DONE, gone()),
        Finish(75),
        "preempted: SIGTERM received; to be continued",
    ),
    "nobody said why it ended": (
        TWO,
        (*RUNS, *LISTEN, ASKED, *DONE, gone()),
        Finish(0),
        "all workers ended with 0",
    ),
    "one fails instead": (
        TWO,
        (*RUNS, *LISTEN, ASKED, acked(0), exited(0, 3), exited(1, -15, stopped=True), gone()),
        Finish(3),
        "rank 0 exited with code 3; no restart: drain",
    ),
    "one fails after SIGTERM": (
        TWO,
        (*RUNS, *LISTEN, TERM, exited(0, 3), exited(1, -15, stopped=True), gone()),
        Finish(3),
        "rank 0 exited with code 3; no restart after SIGTERM",
    ),
    "they take too long": (
        TWO,
        (*RUNS, *LISTEN, ASKED, DEADLINE),
        SWEEP,
        "the notice was not followed for 30 s; ending 2 workers",
    ),
    "nobody has asked": (
        TWO,
        (*RUNS, ASKED, DEADLINE),
        SWEEP,
        "the notice was not followed for 30 s; no worker has asked should_preempt(); ending 2 "
        "workers",
    ),
    "one of them has not asked": (
        TWO,
        (*RUNS, listens(0), ASKED, DEADLINE),
        SWEEP,
        "the notice was not followed for 30 s; rank 1 has not asked should_preempt(); ending 2 "
        "workers",
    ),
    "one of them does not end": (
        TWO,
        (*RUNS, *LISTEN, ASKED, acked(0), DEADLINE),
        SWEEP,
        "the notice was not followed for 30 s; rank 1 has not ended for it; ending 2 workers",
    ),
    "one of them has ended": (
        TWO,
        (*RUNS, *LISTEN, ASKED, acked(0), acked(1), exited(1, 0), DEADLINE),
        SWEEP,
        "the notice was not followed for 30 s; rank 0 has not ended for it; ending 1 worker",
    ),
    "and are killed": (
        TWO,
        (
            *(*RUNS, *LISTEN, ASKED, DEADLINE),
            *(exited(0, -15, stopped=True), exited(1, -9, stopped=True), gone()),
        ),
        Finish(137),
        "killed: drain; the workers had not saved and ended before",
    ),
    "killed after SIGTERM": (
        TWO,
        (
            *(*RUNS, *LISTEN, TERM, DEADLINE),
            *(exited(0, -15, stopped=True), exited(1, -9, stopped=True), gone()),
        ),
        Finish(143),
        "stopped by SIGTERM; the workers had not saved and ended before",
    ),
    "asked before anything runs": (
        TWO,
        (ASKED,),
        Finish(75),
        "drain: no worker runs; to be continued",
    ),
    "asked while a checkpoint is looked for": (
        SAVING,
        (READY, ASKED),
        Finish(75),
        "drain: no worker runs; to be continued",
    ),
    "asked while a failed round is ended": (
        TWO,
        (*RUNS, exited(0, 3), ASKED),
        Notify(STOP, None),
        "drain: no round follows this one",
    ),
    "and so it is": (
        TWO,
        (*RUNS, exited(0, 3), ASKED, exited(1, -15, stopped=True), gone()),
        Finish(3),
        "rank 0 exited with code 3; no restart: drain",
    ),
    "asked while what is done is written out": (
        TWO,
        (*WRITES, gone(), ASKED),
        Notify(STOP, None),
        "drain: no round follows this one",
    ),
    "which ends as it would have": (
        TWO,
        (*WRITES, gone(), USR1, SETTLED),
        Finish(0),
        "all workers ended with 0",
    ),
    "asked just before that": (TWO, (*WRITES, ASKED, gone()), Settle(LAST_SAVE_S), ""),
    "asked while it ran": (TWO, (*RUNS, SAVES, ASKED, *DONE, gone()), Settle(LAST_SAVE_S), ""),
    "workers that saved because of it have its grace": (
        TWO,
        (*RUNS, SAVES, *LISTEN, ASKED, *SAVED, gone()),
        Settle(30.0),
        "",
    ),
    "a last checkpoint that is lost": (
        TWO,
        (*WRITES, gone(), ASKED, structs.replace(SETTLED, lost=("step 40",))),
        Finish(74),
        "all workers ended with 0, but their last checkpoint was in memory only, and is lost",
    ),
    "SIGTERM hurries it all the same": (
        TWO,
        (*WRITES, gone(), ASKED, TERM),
        Hurry(30.0),
        "SIGTERM received: the checkpoint in memory is being written out, grace 30 s",
    ),
    "asked while a failed round is written out": (
        TWO,
        (*RUNS, SAVES, exited(0, 3), exited(1, -15, stopped=True), gone(), ASKED, SETTLED),
        Finish(75),
        "rank 0 exited with code 3; preempted: drain; to be continued",
    ),
    "without a restart left that is a failure": (
        replace(TWO, max_restarts=0),
        (*RUNS, SAVES, exited(0, 3), exited(1, -15, stopped=True), gone(), ASKED, SETTLED),
        Finish(3),
        "rank 0 exited with code 3; --max-restarts is 0",
    ),
    "what an older round says": (TWO, (*RUNS, events.NoticeKnown(7, STOP)), Nothing(), ""),
    # ── several nodes ──
    "heard from another node": (
        MANY,
        (*JOB, events.NoticeKnown(0, STOP)),
        Notify(STOP, 30.0),
        "drain: the workers are asked to save and to end (2 of 2 workers listen), grace 30 s",
    ),
    "a resize has no limit here": (
        MANY,
        (*JOB, events.NoticeKnown(0, LEAVES)),
        Notify(LEAVES, None),
        "a node leaves (SIGTERM): the workers are asked to save (2 of 2 workers listen)",
    ),
    "this node leaves": (
        MANY,
        (*JOB, TERM),
        Notify(LEAVES, 30.0),
        "a node leaves (SIGTERM): the workers are asked to save and to end (2 of 2 workers "
        "listen), grace 30 s",
    ),
    "and has left": (
        MANY,
        (*JOB, TERM, acked(0, LEAVES), *DONE, gone()),
        Finish(75),
        "preempted: a node leaves (SIGTERM); to be continued",
    ),
    "the others wait for the next round": (
        MANY,
        (*JOB, events.NoticeKnown(0, LEAVES), acked(0, LEAVES), *DONE, gone()),
        Meet(),
        "all workers of this node have saved (a node leaves (SIGTERM)); waiting for the other "
        "nodes",
    ),
    "and take part in it": (
        MANY,
        (*JOB, events.NoticeKnown(0, LEAVES), acked(0, LEAVES), *DONE, gone(), seen(SECOND)),
        StartRound(1, None),
        "going on with 1 node",
    ),
    "those who save are not hurried": (
        MANY,
        (*JOB, events.NoticeKnown(0, LEAVES), seen(LEFT)),
        Hurry(30.0),
        "node node2 leaves; 2 workers may save, grace 30 s",
    ),
    "nor when the host of the store has saved and left": (
        MANY,
        (*JOB, events.NoticeKnown(0, LEAVES), seen(OVER)),
        Hurry(30.0),
        "preempted: drain; to be continued; 2 workers may save, grace 30 s",
    ),
    "but a peer that failed ends all": (
        MANY,
        (*JOB, events.NoticeKnown(0, LEAVES), seen(FAILED)),
        StopWorkers(signal.SIGTERM, 5.0),
        "rank 0 exited with code 3; stopping 2 workers, grace 5 s",
    ),
    "a newcomer": (
        MANY,
        (*JOB, seen(GROWS)),
        Notify(JOINS, None),
        "a node joins: the workers are asked to save (2 of 2 workers listen)",
    ),
    "a newcomer, before anybody listens": (
        MANY,
        (*JOB[:-2], seen(GROWS), listens(1)),
        Notify(JOINS, None),
        "a node joins: the workers are asked to save (1 of 2 workers listen)",
    ),
    "the job is asked to end": (
        MANY,
        (*JOB, ASKED, *SAVED, gone()),
        Meet(),
        "all workers of this node have saved (drain); waiting for the other nodes",
    ),
    "and is over": (
        MANY,
        (*JOB, ASKED, *SAVED, gone(), seen(OVER)),
        Finish(75),
        "preempted: drain; to be continued",
    ),
    "no new round after that": (
        MANY,
        (*JOB, ASKED, *SAVED, gone(), seen(SECOND)),
        Finish(75),
        "preempted: drain; to be continued",
    ),
    "asked where the workers are done": (
        MANY,
        (*JOB, *DONE, gone(), ASKED),
        Notify(STOP, 30.0),
        "drain: no worker runs on this node; the other nodes are asked, too",
    ),
    "which then waits for the others": (MANY, (*JOB, *DONE, gone(), ASKED, seen(ASKS)), *IDLE),
    "and takes part in no round": (MANY, (*JOB, *DONE, gone(), ASKED, seen(SECOND)), *IDLE),
    "and ends with them": (
        MANY,
        (*JOB, *DONE, gone(), ASKED, seen(ASKS), seen(OVER)),
        Finish(75),
        "preempted: drain; to be continued",
    ),
    "asked on a spare": (
        MANY,
        (READY, seen(SPARE), USR1),
        Notify(SIGNAL, 30.0),
        "SIGUSR1 received: no worker runs on this node; the other nodes are asked, too",
    ),
    "asked on a spare, with a deadline": (
        MANY,
        (READY, seen(SPARE), LEFT_120),
        Notify(Notice("spot"), 30.0),
        "spot: no worker runs on this node; the other nodes are asked, too, without the deadline: "
        "they have --shutdown-timeout",
    ),
    "asked while it imports": (
        MANY,
        (ASKED, READY),
        Meet(),
        "ready; waiting for the other nodes",
    ),
    "no coordinator takes it up": (
        MANY,
        (READY, seen(SPARE), ASKED, DEADLINE),
        Finish(75),
        "drain: no coordinator has answered for 30 s; this node leaves, to be continued",
    ),
    "one that has taken it up is waited for": (
        MANY,
        (READY, seen(SPARE), ASKED, seen(structs.replace(SPARE, asked="drain")), DEADLINE),
        *IDLE,
    ),
    "asked on a node without workers": (
        MANY,
        (*JOB, seen(ASKS)),
        Notify(STOP, 30.0),
        "drain: the workers are asked to save and to end (2 of 2 workers listen), grace 30 s",
    ),
    "once is enough": (MANY, (*JOB, ASKED, seen(ASKS)), *IDLE),
    "a failed round of several nodes that is written out": (
        MANY,
        (*JOB, SAVES, exited(0, 3), exited(1, -15, stopped=True), gone(), ASKED, SETTLED),
        Meet(),
        "rank 3 exited with code 3; waiting for the other nodes",
    ),
    "a failure while the job is asked to end": (
        MANY,
        (*JOB, ASKED, exited(0, 3), exited(1, -15, stopped=True), gone()),
        Meet(),
        "rank 3 exited with code 3; waiting for the other nodes",
    ),
}


@each("name", TABLE)
def test_the_decision_table(name: str) -> None:
    """The last event of each history, the action, and the words for it."""
    limits, history, action, reason = TABLE[name]
    assert last(limits, *history) == Decided(action, reason)


def test_a_save_that_may_be_late_is_named() -> None:
    """By how long the last one took until its commit; nothing is known before the first."""
    saves: SavesRecord = {
        "step": 7,
        "committed_at": 1.0,
        "seconds": 90.0,
        "saving": None,
        "problem": "",
    }
    text = "the last save took 1m 30s until its commit, and there are 30 s for the next one"
    assert late_save(saves, 30.0) == text
    assert late_save(saves, 90.0) == late_save(None, 30.0) == ""


OWN: dict[str, tuple[tuple[events.Event, ...], tuple[str, int]]] = {
    "saving": ((*JOB, TERM), ("running", 0)),
    "saved, and ended": ((*JOB, TERM, acked(0, LEAVES), *DONE), ("running", 0)),
    "leaves": ((*JOB, TERM, acked(0, LEAVES), *DONE, gone()), ("leaving", 0)),
    "leaves, and cannot save": ((READY, seen(FIRST), *RUNS[1:], TERM), ("leaving", 0)),
    "waits for the others": ((*JOB, ASKED, *SAVED, gone()), ("finished", 0)),
    "waits for a resize": (
        (*JOB, events.NoticeKnown(0, JOINS), acked(0, JOINS), *DONE, gone()),
        ("finished", 0),
    ),
    "a spare that was asked stays": ((READY, seen(SPARE), ASKED), ("ready", -1)),
    "done, and asked": ((*JOB, *DONE, gone(), ASKED), ("finished", 0)),
    "was killed": ((*JOB, ASKED, DEADLINE, exited(0, -9, stopped=True)), ("running", 0)),
}


@pytest.mark.parametrize("name", OWN)
def test_what_the_agent_says_of_itself(name: str) -> None:
    """Workers that save are left in peace by the other nodes: their agent is not leaving yet."""
    history, said = OWN[name]
    state, _ = play(MANY, history)
    assert nodes.own_state(state) == said


def test_a_new_round_forgets_the_notice() -> None:
    """It was for the workers of the round before."""
    history = (*JOB, events.NoticeKnown(0, JOINS), acked(0, JOINS), *DONE, gone(), seen(SECOND))
    state, _ = play(MANY, history)
    assert (state.round, state.notice, state.acked, state.listens) == (1, None, set(), set())


def test_a_restart_while_asked_is_none() -> None:
    """Not even when the budget has restarts left and a checkpoint was found."""
    ends = (exited(0, 3), ASKED, exited(1, -15, stopped=True), gone(), chosen(40))
    state, decided = play(SAVING, (READY, chosen(None), *RUNS[1:], *ends))
    assert decided[-1].action == Finish(3) and state.round == 0
