"""One node of a job of several: what the plan makes it do, and what it says of itself."""

from __future__ import annotations

import signal

import pytest
from msgspec import structs

from elaunch.agent.policy import events
from elaunch.agent.policy import nodes as jobpolicy
from elaunch.agent.policy.actions import (
    Action,
    EndTree,
    Finish,
    Hurry,
    Meet,
    Nothing,
    RestartServer,
    Settle,
    StartRound,
    StopWorkers,
)
from elaunch.agent.policy.state import Limits
from elaunch.rendezvous.plan import Node, Plan, PlanCheckpoint
from tests.agent.histories import (
    READY,
    TERM,
    Decided,
    checkpoint,
    exited,
    gone,
    last,
    lost,
    play,
    started,
)
from tests.tables import each

HERE, THERE = Node("aa", "node1", "10.0.0.1", 2, "x"), Node("bb", "node2", "10.0.0.2", 3, "x")
FORMING = Plan("job")
FIRST = Plan("job", 0, "running", "first start", nodes=(THERE, HERE))
ENDING = structs.replace(FIRST, phase="ending", cause="failure", reason="rank 0 exited with code 3")
SECOND = structs.replace(FIRST, round=1, reason="rank 0 exited with code 3; restart 1 of 2")
ALONE = structs.replace(SECOND, nodes=(THERE,), reason="node node1 (10.0.0.1) was lost")
GROWN = structs.replace(ENDING, cause="joined", reason="node3 has joined")
OVER = structs.replace(FIRST, phase="over", exit_code=3, reason="rank 0 exited with code 3")
DONE = structs.replace(FIRST, phase="over", exit_code=0, reason="all workers ended with 0")
CHECKPOINT = PlanCheckpoint("/ck/step_40.pt", 40, "torch.save")

TWO = Limits(2, meets=True, sibling_grace=5.0, shutdown_timeout=30.0)


def seen(plan: Plan, name: str = "aa") -> events.PlanSeen:
    """Return the news of a plan."""
    return events.PlanSeen(plan, name)


CUT = events.CutOff("no answer from etcd for 2.5 s")
BACK = events.Rejoined("cc")
FAILED = events.MeetingFailed(69, "the store was lost")
RUNS = (READY, seen(FIRST), started(0), started(1))
BAD = (*RUNS, exited(1, 7))
ENDED = (*BAD, exited(0, -15, stopped=True), gone())
SAVED = (*RUNS, events.SaverUsed(0), exited(1, 7), exited(0, -15, stopped=True))
SETTLED = events.SavesSettled(0)
GOOD = (*RUNS, exited(0, 0), exited(1, 0))
KILLED = (exited(0, -9, stopped=True), exited(1, -9, stopped=True), gone())
WITH_IT = structs.replace(SECOND, nodes=(THERE, structs.replace(HERE, name="cc")))
SAY = "waiting for the other nodes"

TABLE: dict[str, tuple[tuple[events.Event, ...], Action, str]] = {
    # ── a round begins ──
    "ready before the others": ((READY,), Meet(), f"ready; {SAY}"),
    "the first plan": ((READY, seen(FIRST)), StartRound(0, None, 3), "first start"),
    "the plan comes before the imports are done": (
        (seen(FIRST), READY),
        StartRound(0, None, 3),
        "first start",
    ),
    "agents gather": ((READY, seen(FORMING)), Nothing(), ""),
    "a round without this node": ((READY, seen(ALONE)), Nothing(), ""),
    "a checkpoint": (
        (READY, seen(structs.replace(FIRST, checkpoint=CHECKPOINT))),
        StartRound(0, checkpoint(40), 3),
        "first start",
    ),
    "the same plan again": ((*RUNS, seen(FIRST)), Nothing(), ""),
    "a newcomer whose checkpoint directory is another one": (
        (READY, seen(structs.replace(ALONE, not_sharing=("zz", "aa")))),
        Finish(2),
        "--checkpoint-dir of this node is not that of the job: what was written here is not seen "
        "on node2; mount the same file system here, or give --checkpoint-local on all nodes",
    ),
    "it hears so while it still imports": (
        (seen(structs.replace(ALONE, not_sharing=("aa",))), READY),
        Finish(2),
        "--checkpoint-dir of this node is not that of the job: what was written here is not seen "
        "on node2; mount the same file system here, or give --checkpoint-local on all nodes",
    ),
    "another newcomer's is": (
        (READY, seen(structs.replace(ALONE, not_sharing=("zz",)))),
        Nothing(),
        "",
    ),
    # ── a failure here ──
    "a worker fails here": (
        BAD,
        StopWorkers(signal.SIGTERM, 5.0),
        "rank 4 exited with code 7; stopping the other 1 worker, grace 5 s",
    ),
    "the plan says what is known": ((*BAD, seen(ENDING)), Nothing(), ""),
    "all is gone": (ENDED, Meet(), f"rank 4 exited with code 7; {SAY}"),
    "the next round": ((*ENDED, seen(SECOND)), StartRound(1, None, 3), SECOND.reason),
    "no next round": ((*ENDED, seen(OVER)), Finish(3), OVER.reason),
    "the end is heard while the sweep runs": (
        (*ENDED[:-1], seen(OVER), gone()),
        Finish(3),
        OVER.reason,
    ),
    "the server dies": (
        (*RUNS, lost(), gone()),
        Meet(),
        f"the server that starts the workers was killed by SIGKILL; {SAY}",
    ),
    # ── a failure elsewhere ──
    "a worker fails on another node": (
        (*RUNS, seen(ENDING)),
        StopWorkers(signal.SIGTERM, 5.0),
        "rank 0 exited with code 3; stopping 2 workers, grace 5 s",
    ),
    "growth leaves time to save": (
        (*RUNS, seen(GROWN)),
        StopWorkers(signal.SIGTERM, 30.0),
        "node3 has joined; stopping 2 workers, grace 30 s",
    ),
    "they have gone": (
        (*RUNS, seen(ENDING), exited(0, -15, stopped=True), exited(1, -15, stopped=True), gone()),
        Meet(),
        f"the workers of this node have ended; {SAY}",
    ),
    "the job ends while it runs": (
        (*RUNS, seen(OVER)),
        StopWorkers(signal.SIGTERM, 5.0),
        "rank 0 exited with code 3; stopping 2 workers, grace 5 s",
    ),
    "an older plan is late": ((*ENDED, seen(SECOND), seen(ENDING)), Nothing(), ""),
    # ── done ──
    "done here": ((*GOOD, gone()), Meet(), f"all workers of this node ended with 0; {SAY}"),
    "done everywhere": ((*GOOD, gone(), seen(DONE)), Finish(0), "all workers ended with 0"),
    "done here, failed there": (
        (*GOOD, gone(), seen(ENDING), seen(SECOND)),
        StartRound(1, None, 3),
        SECOND.reason,
    ),
    "told to go while it waits for the others": (
        (*GOOD, gone(), TERM),
        Finish(143),
        "stopped by SIGTERM",
    ),
    "a spare hears the end": (
        (READY, seen(DONE, "zz")),
        Finish(0),
        "all workers ended with 0; this node took part in no round",
    ),
    # ── checkpoints that are in memory only ──
    "what is in memory is written out first": ((*SAVED, gone()), Settle(30.0, True), ""),
    "the plan is heard while it is": ((*SAVED, gone(), seen(ENDING)), Nothing(), ""),
    "then it meets the others": (
        (*SAVED, gone(), SETTLED),
        Meet(),
        f"rank 4 exited with code 7; {SAY}",
    ),
    "the end was heard while it was": (
        (*SAVED, gone(), seen(OVER), SETTLED),
        Finish(3),
        OVER.reason,
    ),
    "told to go while it is": (
        (*SAVED, gone(), TERM),
        Hurry(30.0),
        "SIGTERM received: the checkpoint in memory is being written out, grace 30 s",
    ),
    "and goes": ((*SAVED, gone(), TERM, SETTLED), Finish(143), "stopped by SIGTERM"),
    "cut off while it is": ((*SAVED, gone(), CUT), Nothing(), f"cut off: {CUT.reason}"),
    "the store is lost while it is": ((*SAVED, gone(), FAILED), Nothing(), ""),
    "and it ends": ((*SAVED, gone(), FAILED, SETTLED), Finish(69), "the store was lost"),
    # ── signals ──
    "told to go before the first round": ((READY, TERM), Finish(143), "stopped by SIGTERM"),
    "told to go": (
        (*RUNS, TERM, exited(0, -15, stopped=True), exited(1, -15, stopped=True), gone()),
        Finish(143),
        "stopped by SIGTERM",
    ),
    # ── cut off ──
    "cut off": ((*RUNS, CUT), EndTree(), f"cut off: {CUT.reason}; killing 2 workers"),
    "cut off at rest": ((READY, CUT), Nothing(), f"cut off: {CUT.reason}"),
    "no plan counts while cut off": ((READY, CUT, seen(FIRST)), Nothing(), ""),
    "on the members again": ((READY, CUT, BACK), Nothing(), "a member again, as cc"),
    "as a newcomer": (
        (*RUNS, CUT, *KILLED, BACK, seen(WITH_IT, "cc")),
        StartRound(1, None, 3),
        SECOND.reason,
    ),
    "the others went on without this one": (
        (*RUNS, seen(ALONE)),
        EndTree(),
        "round 1 has begun without this node; killing 2 workers",
    ),
    "fenced": (
        (*RUNS, events.Fenced(0.1)),
        EndTree(),
        "this agent could not renew its lease in time: its workers were killed, since the other "
        "nodes may go on without them",
    ),
    "fenced at rest": ((READY, events.Fenced(0.1)), Nothing(), ""),
    # ── the store ──
    "the server dies while others are waited for": (
        (READY, lost(-9)),
        RestartServer(),
        "the server that starts the workers was killed by SIGKILL; starting another, and waiting "
        "for the other nodes",
    ),
    "the round begins on the next one": (
        (READY, lost(-9), seen(FIRST)),
        StartRound(0, None, 3),
        "first start",
    ),
    "it does again and again": (
        (READY, *[lost(-9)] * 4),
        Finish(71),
        "the server that starts the workers was killed by SIGKILL 4 times while this node waited "
        "for others",
    ),
    "a long wait is logged": (
        (READY, events.StillWaiting("waiting for 30 s: no coordinator has published a plan")),
        Nothing(),
        "waiting for 30 s: no coordinator has published a plan",
    ),
    "but not by one that works": ((*RUNS, events.StillWaiting("waiting")), Nothing(), ""),
    "the store is silent": (
        (*RUNS, events.StoreSilent("etcd does not answer")),
        Nothing(),
        "etcd does not answer",
    ),
    "it is back": ((*RUNS, events.StoreBack()), Nothing(), "the store answers again"),
    "it is lost": (
        (*RUNS, FAILED),
        StopWorkers(signal.SIGTERM, 30.0),
        "the store was lost; stopping 2 workers, grace 30 s",
    ),
    "and the workers are gone": (
        (*RUNS, FAILED, exited(0, -15, stopped=True), exited(1, -15, stopped=True), gone()),
        Finish(69),
        "the store was lost",
    ),
    "it is lost when all has been done here": (
        (*GOOD, gone(), FAILED),
        Finish(0),
        "all workers of this node ended with 0; the store was lost",
    ),
    "it was never there": ((READY, FAILED), Finish(69), "the store was lost"),
}


@each("name", TABLE)
def test_the_decision_table(name: str) -> None:
    """The last event of each history, the action, and the words for it."""
    history, action, reason = TABLE[name]
    assert last(TWO, *history) == Decided(action, reason)


OWN: dict[str, tuple[tuple[events.Event, ...], tuple[str, int]]] = {
    "before the imports": ((), ("joining", -1)),
    "ready": ((READY,), ("ready", -1)),
    "a round has ended that it never heard of": ((READY, seen(ENDING)), ("ended", 0)),
    "in a round": (RUNS, ("running", 0)),
    "a worker has failed": (BAD, ("failed", 0)),
    "and all is gone": (ENDED, ("ended", 0)),
    "stopped from elsewhere": ((*RUNS, seen(ENDING)), ("running", 0)),
    "what is in memory is written out": ((*SAVED, gone()), ("failed", 0)),
    "it is on the disk": ((*SAVED, gone(), SETTLED), ("ended", 0)),
    "done, with children left": (GOOD, ("running", 0)),
    "done": ((*GOOD, gone()), ("finished", 0)),
    "told to go": ((*RUNS, TERM), ("leaving", 0)),
    "cut off": ((*RUNS, CUT), ("joining", -1)),
    "back before its workers are dead": ((*RUNS, CUT, BACK), ("joining", -1)),
    "back": (
        (*RUNS, CUT, BACK, *KILLED),
        ("ready", -1),
    ),
    "fenced, and dead": (
        (*RUNS, events.Fenced(0.0), *KILLED),
        ("ended", 0),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_it_says_of_itself(name: str) -> None:
    """State and round of its record on the members."""
    history, said = OWN[name]
    state, _ = play(TWO, history)
    assert jobpolicy.own_state(state) == said


def test_ranks_are_counted_over_unequal_nodes_and_roles() -> None:
    """Two slots, three slots, and one of another role in between."""
    nodes = (THERE, Node("cc", "node3", "10.0.0.3", 1, "y"), HERE)
    place = jobpolicy.place(structs.replace(FIRST, nodes=nodes), "aa")
    assert (place.node_rank, place.nodes, place.first_rank, place.world_size) == (2, 3, 4, 6)
    assert (place.first_role_rank, place.role_world_size) == (3, 5)
    assert place.addrs == ("10.0.0.2", "10.0.0.3", "10.0.0.1")
