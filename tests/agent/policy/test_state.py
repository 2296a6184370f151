"""What an event writes into the state, and what an action does."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    Action,
    EndTree,
    Finish,
    Forward,
    KillServer,
    Meet,
    Nothing,
    StartRound,
    StopWorkers,
)
from elaunch.agent.policy.state import Limits, Phase, State, follow, observe, refusal
from elaunch.rendezvous.plan import Plan
from tests.agent.histories import INT, TERM, USR1, checkpoint, exited, lost, started

RUNNING = State(Limits(3), Phase.RUNNING, 1, alive=frozenset({0, 1, 2}))


def test_the_round_begins_with_its_first_worker() -> None:
    """The time of the first start is kept."""
    state = observe(observe(RUNNING, started(1, 1, at=5.0)), started(0, 1, at=6.0))
    assert state.began == 5.0


def test_an_exit_with_0_is_no_failure() -> None:
    """The rank has succeeded and is not alive any more."""
    state = observe(RUNNING, exited(1, 0, round=1))
    assert (state.alive, state.succeeded, state.failed) == ({0, 2}, {1}, False)
    assert not state.completed


def test_the_job_is_complete_when_all_have_succeeded() -> None:
    """Not when one of them was stopped."""
    state = RUNNING
    for rank in range(3):
        state = observe(state, exited(rank, 0, round=1))
    assert state.completed
    stopping = replace(RUNNING, phase=Phase.STOPPING, interrupted=signal.SIGTERM)
    for rank in range(3):
        stopping = observe(stopping, exited(rank, 0, round=1))
    assert not stopping.completed and len(stopping.stopped) == 3


@pytest.mark.parametrize("event", [exited(1, 3, round=0), exited(1, 3, round=2), exited(7, 3, 1)])
def test_exits_that_belong_to_no_worker_of_the_round_change_nothing(
    event: events.Exit,
) -> None:
    """Late ones of the last round, and impossible ones."""
    assert observe(RUNNING, event) == RUNNING


def test_who_fails_after_the_first_is_not_the_first() -> None:
    """By itself, or because it was told to."""
    state = observe(RUNNING, exited(2, 1, round=1))
    state = follow(state, StopWorkers(signal.SIGTERM, 5.0))
    state = observe(state, exited(0, 1, round=1))
    state = observe(state, exited(1, 1, round=1, stopped=True))
    assert state.first == exited(2, 1, round=1)
    assert state.later == (exited(0, 1, round=1),)
    assert state.stopped == (exited(1, 1, round=1, stopped=True),)


def test_one_who_is_done_in_that_moment_has_succeeded() -> None:
    """It had not been told to end."""
    state = observe(RUNNING, exited(2, 1, round=1))
    state = follow(state, StopWorkers(signal.SIGTERM, 5.0))
    assert observe(state, exited(0, 0, round=1)).succeeded == {0}


def test_the_first_signal_counts_and_sigints_are_counted() -> None:
    """A forwarded one is none of them."""
    state = State(Limits(1, forwarded=frozenset({signal.SIGUSR1})))
    for event in (USR1, TERM, INT, USR1, INT):
        state = observe(state, event)
    assert (state.interrupted, state.sigints) == (signal.SIGTERM, 2)


def test_with_the_server_its_workers_are_gone() -> None:
    """And the round has failed."""
    state = observe(RUNNING, lost(-11))
    assert (state.alive, state.server_lost, state.failed) == (frozenset(), -11, True)


def test_a_server_that_was_killed_may_still_be_there() -> None:
    """The next deadline is that of its end."""
    assert follow(RUNNING, KillServer()) == replace(RUNNING, killing=True)


@pytest.mark.parametrize("event", [events.StoreLost("x"), events.Ping(print), started(0, 1)])
def test_other_events_end_nothing(event: events.Event) -> None:
    """They are told, not decided on."""
    assert observe(RUNNING, event).alive == RUNNING.alive


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        (Nothing(), Phase.RUNNING),
        (Forward(signal.SIGUSR1), Phase.RUNNING),
        (StopWorkers(signal.SIGTERM, 1.0), Phase.STOPPING),
        (EndTree(), Phase.SWEEPING),
        (Meet(), Phase.MEETING),
    ],
)
def test_each_action_leads_to_its_phase(action: Action, phase: Phase) -> None:
    """And changes nothing else."""
    assert follow(RUNNING, action) == replace(RUNNING, phase=phase)


def test_its_end_is_kept_with_its_reason() -> None:
    """The others read it: the one that hosts their store ends them, too."""
    end = replace(RUNNING, phase=Phase.ENDED, finish=Finish(3), why="rank 0 failed")
    assert follow(RUNNING, Finish(3), "rank 0 failed") == end


def test_a_new_round_forgets_the_last_one() -> None:
    """But for what is counted over rounds."""
    plan = Plan("job", 2, "running", restarts=2, without_progress=1)
    failed = observe(RUNNING, exited(0, 1, round=1))
    failed = observe(failed, events.PlanSeen(plan, "here"))
    state = follow(failed, StartRound(2, checkpoint(7)))
    assert state == State(
        RUNNING.limits,
        Phase.RUNNING,
        2,
        alive=frozenset({0, 1, 2}),
        restarts=2,
        without_progress=1,
        checkpoint=checkpoint(7),
        plan=plan,
        name="here",
        member="here",
    )


MAY = {Phase.RUNNING, Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING}


@pytest.mark.parametrize("phase", Phase)
def test_a_round_may_commit_until_the_next_checkpoint_is_chosen(phase: Phase) -> None:
    """From its start on, and no round but that."""
    state = State(Limits(1), phase=phase, round=2)
    assert (refusal(state, 2) == "") == (phase in MAY)
    assert refusal(state, 1) == refusal(state, 3) == "the job is in round 2"
