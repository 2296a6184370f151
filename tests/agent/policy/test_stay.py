"""Workers that stand stay when another one fails: who, for how long, and who not."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    AskRestart,
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
from elaunch.agent.policy.state import Limits, Phase, State, refusal
from elaunch.agent.policy.turn import Turn, make_turn
from elaunch.rendezvous.plan import Node, NodeStatus, Plan, RestartRequest
from elaunch.wire.worker import Notice
from tests.agent.histories import (
    DEADLINE,
    READY,
    TERM,
    Decided,
    Job,
    Played,
    chosen,
    decisions,
    started,
)
from tests.agent.histories import exited as ended

FOUR = Limits(4, max_restarts=3)
ALL = frozenset(range(4))
KILL = -9


def stands(rank: int, round: int = 0, yes: bool = True) -> events.WorkerStands:
    """Return the news that a worker stands, or does not any more."""
    return events.WorkerStands(round, rank, yes)


def enters(rank: int, round: int, done: bool = True) -> events.WorkerEnters:
    """Return the news that a kept worker is in a round."""
    return events.WorkerEnters(round, rank, done)


def gone(round: int = 0, kept: frozenset[int] = frozenset()) -> events.TreeGone:
    """Return the end of what a round has left, but for those."""
    return events.TreeGone(round, kept=kept)


RUNS = (READY, *(started(k) for k in range(4)), *(stands(k) for k in range(4)))
OTHERS = ALL - {2}
LOST = (ended(2, KILL), gone(kept=OTHERS))
"""Rank 2 is killed, and the next round begins."""
AGAIN = (*RUNS, *LOST)
JOINED = (started(2, 1), *(enters(k, 1) for k in sorted(OTHERS)), stands(2, 1))
"""All others have entered it, and rank 2 has what they have."""


def after(*history: events.Event, limits: Limits = FOUR) -> tuple[State, list[Decided]]:
    """Return the state after a history, and what was decided by its last event."""
    played, last = Played(limits), list[Decided]()
    for event in history:
        last = decisions(played.take(event))
    return played.state, last or [Decided(Nothing(), "")]


def test_those_that_stand_stay() -> None:
    """The tree of the one that died is swept, and the next round has the others."""
    state, (decided,) = after(*RUNS, ended(2, KILL))
    assert decided.action == EndTree(keeps=OTHERS)
    assert decided.reason == "rank 2 was killed by SIGKILL; ranks 0, 1, 3 stay for the next round"
    assert (state.phase, state.alive, state.stay) == (Phase.SWEEPING, OTHERS, OTHERS)
    state, (met, begun) = after(*AGAIN)
    assert isinstance(met.action, Meet)
    assert begun.action == StartRound(1, None, 0, OTHERS)
    assert begun.reason == "rank 2 was killed by SIGKILL; restart 1 of 3, the other workers go on"
    assert (state.phase, state.alive, state.stands) == (Phase.RUNNING, ALL, OTHERS)
    assert state.kept == {0: 0, 1: 0, 3: 0} and state.entering == state.silent == OTHERS


@pytest.mark.parametrize(
    ("limits", "history"),
    [
        pytest.param(FOUR, RUNS[:-1], id="one does not stand"),
        pytest.param(FOUR, (*RUNS, stands(1, yes=False)), id="one stands no more"),
        pytest.param(FOUR, RUNS[:5], id="nobody has said so"),
        pytest.param(replace(FOUR, max_restarts=0), RUNS, id="no restarts"),
        pytest.param(FOUR, (*RUNS, ended(1, 0)), id="one is done"),
        pytest.param(FOUR, (*RUNS, events.PreemptAsked("drain", print)), id="it is asked to end"),
        pytest.param(
            FOUR,
            (*RUNS, events.RestartAsked("new data", print, 99.0)),
            id="a restart was asked for",
        ),
    ],
)
def test_otherwise_all_are_stopped(limits: Limits, history: tuple[events.Event, ...]) -> None:
    """As in a job whose script knows nothing of it."""
    state, decided = after(*history, ended(2, KILL), limits=limits)
    assert state.phase is Phase.STOPPING and not state.staying
    if not any(isinstance(event, events.RestartAsked) for event in history):
        assert isinstance(decided[0].action, StopWorkers)


def test_a_notice_comes_before_all() -> None:
    """SIGTERM: those that listen save, and nobody stays when one dies meanwhile."""
    history = (*RUNS, events.WorkerListens(0, 0), TERM)
    state, (decided,) = after(*history, ended(2, KILL))
    assert isinstance(decided.action, StopWorkers) and not state.staying


def test_the_ends_of_those_that_stay_are_of_the_new_round() -> None:
    """The server knows them by the round in which they were started, also two rounds later."""
    state, (decided,) = after(*AGAIN, *JOINED, ended(0, KILL, 0))
    assert state.first is not None and (state.first.round, state.first.rank) == (1, 0)
    assert decided.action == EndTree(keeps=ALL - {0})
    history = (*AGAIN, *JOINED, ended(0, KILL, 0), gone(1, ALL - {0}))
    state, _ = after(*history)
    assert state.round == 2 and state.kept == {1: 0, 2: 1, 3: 0}
    state, (decided,) = after(*history, ended(2, 7, 1))
    assert state.first is not None and state.first.round == 2
    assert isinstance(decided.action, EndTree)
    state, _ = after(*history, ended(2, 7, 0))
    assert state.first is None  # of the process that was killed in round 0


def test_a_second_death_while_the_first_is_swept() -> None:
    """Its tree is swept as well; an answer to the first sweep counts no more."""
    both = ALL - {1, 2}
    history = (*RUNS, ended(2, KILL), ended(1, KILL))
    state, (decided,) = after(*history)
    assert decided.action == EndTree(keeps=both)
    assert decided.reason == "rank 1 was killed by SIGKILL, too; ranks 0, 3 stay for the next round"
    state, _ = after(*history, gone(kept=OTHERS))
    assert state.phase is Phase.SWEEPING
    state, _ = after(*history, gone(kept=both))
    assert state.kept.keys() == both and state.round == 1
    state, (decided,) = after(*history, ended(0, KILL), ended(3, KILL))
    assert decided == Decided(
        EndTree(keeps=frozenset()), "rank 3 was killed by SIGKILL, too; no other worker is left"
    )


def test_a_death_while_the_next_round_is_decided() -> None:
    """Nothing of it is left when the round begins, either."""
    saving = Job(4, max_restarts=3, has_checkpoint_dir=True)
    history = (READY, chosen(None), *RUNS[1:], *LOST)
    state, _ = after(*history, limits=saving)
    assert state.phase is Phase.MEETING and state.stay == OTHERS
    state, (decided,) = after(*history, ended(0, KILL), limits=saving)
    assert decided.action == EndTree(keeps=OTHERS - {0}) and state.phase is Phase.SWEEPING
    history = (*history, ended(0, KILL), chosen(40), gone(kept=OTHERS - {0}))
    state, _ = after(*history, limits=saving)
    assert state.round == 1 and state.kept.keys() == OTHERS - {0}
    assert state.checkpoint is not None and state.checkpoint.step == 40


def test_a_newcomer_that_is_killed_costs_the_others_nothing() -> None:
    """They work on meanwhile, so the next round may wait for a backoff."""
    state, (decided,) = after(*AGAIN, *JOINED[:-1], ended(2, KILL, 1))
    assert decided.action == EndTree(keeps=OTHERS)
    history = (*AGAIN, *JOINED[:-1], ended(2, KILL, 1), gone(1, OTHERS))
    state, decisions = after(*history)
    assert state.phase is Phase.MEETING
    assert decisions[-1].reason.endswith(
        "the other workers go on, after a backoff of up to 0.5 s: it failed within 10 s again"
    )
    state, _ = after(*history, DEADLINE)
    assert state.round == 2 and state.kept == {0: 0, 1: 0, 3: 0}


@pytest.mark.parametrize(
    "fails",
    [(ended(2, KILL, 1),), (stands(2, 1, yes=False), ended(2, 1, 1))],
    ids=["dies", "raises"],
)
def test_those_that_wait_are_not_kept_waiting(fails: tuple[events.Event, ...]) -> None:
    """One of them has failed again, soon: no backoff."""
    state, _ = after(*AGAIN, *JOINED, *fails, gone(1, OTHERS))
    assert state.round == 2


def test_a_newcomer_is_ended_with_the_one_that_dies() -> None:
    """It has nothing yet that it could lose, and counts as no failure."""
    entered = JOINED[:-1]
    state, (decided,) = after(*AGAIN, *entered, ended(0, KILL, 0))
    assert decided.action == EndTree(keeps=frozenset({1, 3}))
    history = (*AGAIN, *entered, ended(0, KILL, 0), ended(2, KILL, 1))
    state, _ = after(*history)
    assert [one.local_rank for one in state.stopped] == [2] and not state.later
    state, _ = after(*history, gone(1, frozenset({1, 3})))
    assert state.round == 2 and state.kept == {1: 0, 3: 0}


def test_a_newcomer_that_fails_by_itself_cannot_join() -> None:
    """All are started anew."""
    state, (decided,) = after(*AGAIN, *JOINED[:-1], ended(2, 1, 1))
    assert isinstance(decided.action, StopWorkers) and state.phase is Phase.STOPPING


def test_one_that_does_not_answer_is_killed() -> None:
    """That is the failure of the round; those that have answered stay."""
    history = (*AGAIN, started(2, 1), enters(0, 1, done=False), enters(3, 1))
    state, (decided,) = after(*history, DEADLINE)
    assert decided.action == EndTree(keeps=frozenset({0, 3}))
    assert decided.reason == (
        "rank 1 does not answer as round 1 begins; killing 2 workers; "
        "ranks 0, 3 stay for the next round"
    )
    history = (*history, DEADLINE, ended(1, KILL, 0), ended(2, KILL, 1))
    state, _ = after(*history)
    assert state.first is not None and state.first.local_rank == 1
    state, _ = after(*history, gone(1, frozenset({0, 3})))
    assert state.round == 2 and state.restarts == 2


def test_nobody_answers() -> None:
    """All are killed, and all are started anew."""
    state, (decided,) = after(*AGAIN, started(2, 1), DEADLINE)
    assert decided.action == EndTree(keeps=frozenset())
    ends = [ended(k, KILL, 0) for k in sorted(OTHERS)]
    state, _ = after(*AGAIN, started(2, 1), DEADLINE, *ends, ended(2, KILL, 1), gone(1), DEADLINE)
    assert (state.round, state.kept, state.alive) == (2, {}, ALL)


@pytest.mark.parametrize(
    "leaves",
    [
        pytest.param(stands(0, 1, yes=False), id="leaves"),
        pytest.param(stands(0, 0, yes=False), id="left as the round began"),
        pytest.param(ended(0, 0, 0), id="ends"),
    ],
)
def test_one_that_is_elsewhere_ends_the_round(leaves: events.Event) -> None:
    """Before it takes part: the others cannot go on without it. No second restart is used."""
    what = "rank 0 has left the loop before round 1 began"
    history = (*AGAIN, started(2, 1), enters(0, 1, done=False), leaves)
    state, decided = after(*history)
    assert decided[0] == Decided(AskRestart(RestartRequest(1, what)), "")
    assert decided[1] == Decided(EndTree(), f"{what}; killing {len(state.alive)} workers")
    ends = [ended(k, KILL, state.kept.get(k, 1), stopped=True) for k in sorted(state.alive)]
    state, _ = after(*history, *ends, gone(1))
    assert (state.round, state.kept, state.restarts) == (2, {}, 1)
    _, (decided_then,) = after(*AGAIN, *JOINED, leaves)
    assert decided_then == Decided(Nothing(), "")


def test_one_that_raises_what_the_loss_has_brought_uses_no_second_restart() -> None:
    """It has waited for the rank that died, in a call of its own; its end is seen at once."""
    raises = (stands(0, 1, yes=False), ended(0, 1, 0))
    ends = [ended(k, KILL, 0, stopped=True) for k in (1, 3)]
    last = ended(2, KILL, 1, stopped=True)
    state, _ = after(*AGAIN, started(2, 1), enters(0, 1, done=False), *raises, *ends, last, gone(1))
    assert (state.round, state.kept, state.restarts) == (2, {}, 1)


def test_one_that_leaves_its_loop_before_the_round_begins() -> None:
    """All are stopped, as if none had stood."""
    history = (*RUNS, ended(2, KILL), stands(0, yes=False))
    state, (decided,) = after(*history)
    assert decided.action == StopWorkers(signal.SIGTERM, 5.0)
    assert decided.reason == "rank 0 has left its loop; stopping 3 workers, grace 5 s"
    ends = [ended(k, -15, stopped=True) for k in sorted(OTHERS)]
    state, _ = after(*history, *ends, gone())
    assert (state.round, state.kept) == (1, {})


def test_the_last_restart_is_used_up() -> None:
    """The coordinator decides that when nothing is left but those that stay: they are stopped."""
    one = replace(FOUR, max_restarts=1)
    history = (*AGAIN, *JOINED, ended(0, KILL, 0), gone(1, ALL - {0}))
    _, decided = after(*history, limits=one)
    assert decided[-1].action == StopWorkers(signal.SIGTERM, 5.0)
    assert decided[-1].reason == (
        "rank 0 was killed by SIGKILL; 1 restart brought no progress (--max-restarts); "
        "stopping the other 3 workers, grace 5 s"
    )
    ends = [ended(k, -15, 0 if k != 2 else 1, stopped=True) for k in (1, 2, 3)]
    _, decided = after(*history, *ends, gone(1), limits=one)
    assert decided[-1].action == Finish(137)


WAITS = (*AGAIN, *JOINED[:-1], ended(2, KILL, 1), gone(1, OTHERS))
"""A backoff runs, and three workers are there."""
STOPPED = tuple(ended(k, -15, 0, stopped=True) for k in sorted(OTHERS))


def test_sigterm_while_the_next_round_is_decided() -> None:
    """Those that stay are stopped; the run ends as after any failure."""
    _, (decided,) = after(*WAITS, TERM)
    assert decided.action == StopWorkers(signal.SIGTERM, 5.0)
    _, decided = after(*WAITS, TERM, *STOPPED, gone(1))
    assert decided[-1].action == Finish(137) and "no restart after SIGTERM" in decided[-1].reason


def test_a_request_to_end_while_the_next_round_is_decided() -> None:
    """No round follows: they are stopped, and the job is to be continued."""
    asked = events.PreemptAsked("drain", print)
    _, decided = after(*WAITS, asked)
    assert [type(one.action) for one in decided] == [Notify, StopWorkers]
    assert decided[-1].reason.startswith("rank 2 was killed by SIGKILL; preempted: drain")
    _, decided = after(*WAITS, asked, *STOPPED, gone(1))
    assert decided[-1].action == Finish(75)


def test_the_server_dies_while_the_next_round_is_decided() -> None:
    """Its workers died with it: all are started anew."""
    state, _ = after(*WAITS, events.ServerLost(KILL), DEADLINE)
    assert (state.round, state.kept) == (2, {})


def test_what_is_in_memory_is_not_waited_for() -> None:
    """The workers go on; what they have staged is written beside them, and may be committed."""
    history = (*RUNS, events.SaverUsed(0), *LOST)
    state, decided = after(*history)
    assert isinstance(decided[-1].action, StartRound) and state.saves
    assert refusal(state, 0) == refusal(state, 1) == ""
    assert refusal(after(*WAITS)[0], 1) == refusal(after(*WAITS)[0], 0) == ""
    history = (*history, started(2, 1), stands(0, 1, yes=False))
    ends = [ended(k, KILL, 0) for k in sorted(OTHERS)]
    state, decided = after(*history, *ends, ended(2, KILL, 1), gone(1))
    assert isinstance(decided[-1].action, Settle)
    assert refusal(replace(state, round=2, kept={}), 1) == "the job is in round 2"


def test_a_newcomer_holds_up_no_end() -> None:
    """The others were asked to end, and have saved: it has nothing."""
    asked = events.PreemptAsked("drain", print)
    acks = [events.PreemptAcked(1, k, Notice("drain")) for k in sorted(OTHERS)]
    history = (*AGAIN, *JOINED[:-1], asked, *acks, ended(0, 0, 0), ended(1, 0, 0))
    state, (decided,) = after(*history)
    assert decided == Decided(Nothing(), "") and not state.completed
    history = (*history, ended(3, 0, 0))
    state, (decided,) = after(*history)
    assert decided.action == EndTree()
    assert decided.reason == (
        "all others have saved and ended; ending 1 worker with nothing to save"
    )
    _, decided = after(*history, ended(2, KILL, 1, stopped=True), gone(1))
    assert decided[-1] == Decided(Finish(75), "preempted: drain; to be continued")


def test_who_listens_goes_on_to_listen() -> None:
    """A notice in the new round reaches them, and is a new one."""
    history = (*RUNS, events.WorkerListens(0, 0), events.WorkerListens(0, 2), *LOST)
    state, _ = after(*history)
    assert state.listens == {0} and state.notice is None
    state, (decided,) = after(*history, TERM)
    assert isinstance(decided.action, Notify) and state.notice == Notice("SIGTERM received")


# ── one node of several ──────────────────────────────────────────────────────────────────────────

HERE, THERE = Node("aa", "node1", "10.0.0.1", 2, "x"), Node("bb", "node2", "10.0.0.2", 1, "x")
PAIR = Limits(2, max_restarts=3, meets=True)
FIRST = Plan("job", 0, "running", "first start", nodes=(THERE, HERE))
ENDS = replace(FIRST, phase="ending", cause="failure", reason="rank 0 on node2 was killed")
GOES_ON = replace(FIRST, round=1, reason="the other workers go on", anew={"bb": (0,)})
ANEW = replace(ENDS, phase="forming", reason="rank 0 on node2 was killed; all are started anew")
BOTH = frozenset({0, 1})


def seen(plan: Plan) -> events.PlanSeen:
    """Return the news of a plan."""
    return events.PlanSeen(plan, "aa")


UP = (READY, seen(FIRST), started(0), started(1), stands(0), stands(1))
STAYED = (*UP, seen(ENDS), gone(kept=BOTH))
OVER_THERE = (*STAYED, seen(GOES_ON))


def said(state: State) -> NodeStatus:
    """Return the record that an agent publishes in a state."""
    records: list[NodeStatus] = []
    told = SimpleNamespace(start=records.append, publish=records.append)
    publisher = StatusPublisher(told, NodeStatus("node1", "", 0, 0), show=print, post=print)  # type: ignore[arg-type]
    state = replace(state, probed=True)
    publisher.publish(Turn(state, DEADLINE, Nothing(), "", state))
    return records[-1]


def test_a_failure_on_another_node() -> None:
    """Those that stand here stay, which the record says, and go on as the plan says."""
    state, (decided,) = after(*UP, seen(ENDS), limits=PAIR)
    assert decided.action == EndTree(keeps=BOTH)
    assert decided.reason == "rank 0 on node2 was killed; ranks 1, 2 stay for the next round"
    assert said(state).state == "running" and not said(state).kept
    state, (decided,) = after(*STAYED, limits=PAIR)
    assert decided == Decided(
        Meet(), "ranks 1, 2 stay for the next round; waiting for the other nodes"
    )
    record = said(state)
    assert (record.state, record.round, record.kept) == ("ended", 0, (0, 1))
    assert record.survivors == "work" and record.failure is None
    state, (decided,) = after(*OVER_THERE, limits=PAIR)
    assert decided.action == StartRound(1, None, 1, BOTH)
    assert state.goes_on and not state.new and state.kept == {0: 0, 1: 0}


def test_the_only_worker_of_a_node() -> None:
    """Others go on without it; the one that follows it is new, and may be killed as well."""
    alone = replace(PAIR, nproc=1)
    plan = replace(FIRST, nodes=(HERE, THERE))
    history = (READY, seen(plan), started(0), stands(0), ended(0, KILL), gone())
    state, _ = after(*history, limits=alone)
    assert (said(state).kept, said(state).survivors) == ((), "wait")
    again = replace(plan, round=1, anew={"aa": (0,)})
    history = (*history, seen(again), started(0, 1))
    state, _ = after(*history, limits=alone)
    assert state.goes_on and state.new == {0}
    state, _ = after(*history, ended(0, KILL, 1), gone(1), limits=alone)
    assert said(state).survivors == "work"
    state, _ = after(*history, ended(0, 5, 1), gone(1), limits=alone)
    assert said(state).survivors == ""


@pytest.mark.parametrize(
    "history", [UP[:-1], (*UP, events.PreemptAsked("drain", print)), (*UP, ended(0, 0))]
)
def test_a_node_that_cannot_go_on(history: tuple[events.Event, ...]) -> None:
    """It stops its workers, and its record has those of all nodes started anew."""
    state, (decided,) = after(*history, seen(ENDS), limits=PAIR)
    assert isinstance(decided.action, StopWorkers | Hurry) and not state.staying
    state, _ = after(*history, seen(ENDS), ended(1, -15, stopped=True), gone(), limits=PAIR)
    assert (said(state).kept, said(state).survivors) == ((), "")


def test_another_node_is_lost() -> None:
    """Those that stand here go on with other ranks, and their ends are told by these."""
    lost = replace(ENDS, cause="lost", reason="node node2 was lost")
    state, (decided,) = after(*UP, seen(lost), limits=PAIR)
    assert decided.action == EndTree(keeps=BOTH)
    alone = replace(GOES_ON, nodes=(HERE,), anew={})
    history = (*UP, seen(lost), gone(kept=BOTH), seen(alone))
    state, (decided,) = after(*history, limits=PAIR)
    assert decided.action == StartRound(1, None, 0, BOTH)
    killed = events.Exit(0, 2, 1, 1001, KILL, 2.0, False)
    made = make_turn(state, killed)
    assert made.after.first is not None and made.after.first.rank == 1


@pytest.mark.parametrize(
    "plan", [ANEW, replace(GOES_ON, anew=None), replace(GOES_ON, nodes=(THERE,))]
)
def test_all_are_started_anew(plan: Plan) -> None:
    """Another node cannot go on, or has gone on without this one: those that stay are stopped."""
    state, (decided,) = after(*STAYED, seen(plan), limits=PAIR)
    assert decided.action == StopWorkers(signal.SIGTERM, 5.0)
    assert decided.reason == f"{plan.reason}; stopping 2 workers, grace 5 s"
    assert said(state).state == "running" and not said(state).kept
    ends = [ended(k, -15, stopped=True) for k in (0, 1)]
    state, _ = after(*STAYED, seen(plan), *ends, gone(), limits=PAIR)
    assert said(state).survivors == "" and not state.stay
    again = replace(GOES_ON, anew=None)
    state, _ = after(*STAYED, seen(ANEW), *ends, gone(), seen(again), limits=PAIR)
    assert (state.round, state.goes_on, state.kept) == (1, False, {})


def test_one_dies_before_the_plan_that_keeps_it_is_known() -> None:
    """That is the failure of the round, which does not begin here; the other one stays."""
    history = (*STAYED, ended(1, KILL), seen(GOES_ON), gone(kept=frozenset({0})))
    state, (decided,) = after(*history, limits=PAIR)
    assert isinstance(decided.action, Meet)
    record = said(state)
    assert (record.state, record.round, record.kept) == ("ended", 1, (0,))
    assert record.failure is not None
    assert (record.failure.rank, record.failure.exitcode) == (2, KILL)
    again = replace(GOES_ON, round=2, anew={"aa": (1,), "bb": (0,)})
    state, (decided,) = after(*history, seen(again), limits=PAIR)
    assert decided.action == StartRound(2, None, 1, frozenset({0}))


@pytest.mark.parametrize("event", [events.CutOff("no answer"), events.Fenced(0.1)])
def test_a_node_that_is_cut_off_keeps_nobody(event: events.Event) -> None:
    """The others may go on without those that stay here."""
    for history in (STAYED, STAYED[:-1]):
        state, (decided,) = after(*history, event, limits=PAIR)
        assert decided.action == EndTree() and not state.stay


def test_one_that_has_left_its_loop_is_waited_for_in_vain() -> None:
    """It ends with 0 before it is in the round: no node is done, and the round has failed."""
    ends = (ended(0, 0, 0), ended(1, 0, 0), gone(1))
    state, _ = after(*OVER_THERE, enters(0, 1), enters(1, 1), *ends, limits=PAIR)
    assert said(state).state == "finished" and said(state).failure is None
    state, _ = after(*OVER_THERE, enters(0, 1), *ends, limits=PAIR)
    record = said(state)
    assert (record.state, record.round, record.survivors) == ("ended", 1, "")
    assert record.failure is not None
    assert record.failure.summary == "rank 2 left its loop before it was in the round"
