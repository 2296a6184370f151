"""One agent's place in its job, step by step: what is written, in which order."""

from __future__ import annotations

import itertools

import pytest

from elaunch.errors import (
    LeaseLost,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreReplaced,
    StoreUnreachable,
)
from elaunch.rendezvous import records
from elaunch.rendezvous.decide.view import FENCE, Rules
from elaunch.rendezvous.events import (
    CutOff,
    Effect,
    Enrol,
    Fence,
    Idle,
    Open,
    StoreBack,
    StoreSilent,
    Update,
)
from elaunch.rendezvous.events import MeetingFailed as Failed
from elaunch.rendezvous.member import NO_LEADER, MemberState, renewal_period
from elaunch.rendezvous.plan import AgentState, JobSeen, NodeStatus, Phase, Plan
from elaunch.store.protocol import Post

RECORD = NodeStatus("node1", "10.0.0.1", 4000, 1)


def joined() -> MemberState:
    """Return a member that is a member as ``a0``."""
    names = (f"a{number}" for number in itertools.count())
    member = MemberState(Rules(1, 2), None, lambda: next(names), 0.0)
    member.publish(RECORD)
    task = member.next(0.0)
    assert isinstance(task, Open)
    member.opened("a store", None)
    member.done(task, 0.0, 0.0, None)
    task = member.next(0.0)
    assert isinstance(task, Enrol)
    member.done(task, 0.0, 0.0, None)
    return member


def post(version: int, plan: Plan) -> Post:
    """Return a plan without nodes as a store has it."""
    return Post(version, records.encode_plan(plan, None, version, b""))


def said(task: object) -> str:
    """Return the state in the record that a task writes."""
    assert isinstance(task, Update)
    return records.decode_agent(task.value, None, "a0").state


def test_what_is_told_while_a_record_is_written_is_written_next() -> None:
    """A worker fails and its tree is gone a millisecond later: both have to be heard."""
    member = joined()
    member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state="failed", round=0))
    first = member.next(0.01)
    assert said(first) == "failed"
    member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state="ended", round=0))
    member.done(first, 0.01, 0.02, None)
    assert not member.written
    second = member.next(0.02)
    assert said(second) == "ended"
    member.done(second, 0.02, 0.03, None)
    assert member.written
    assert isinstance(member.next(0.03), Idle)


def test_what_is_told_while_it_joins_is_written_too() -> None:
    """The server may be ready before the store has taken the first record."""
    member = MemberState(Rules(1, 2), None, lambda: "aa", 0.0)
    member.publish(RECORD)
    task = member.next(0.0)
    member.opened("a store", None)
    member.done(task, 0.0, 0.0, None)
    enrol = member.next(0.0)
    member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state="ready"))
    member.done(enrol, 0.0, 0.0, None)
    assert said(member.next(0.01)) == "ready"


def rejoined(member: MemberState) -> NodeStatus:
    """Have the store be another one; return what the agent enrols there with."""
    renewal = member.next(0.6)
    effects = member.done(renewal, 0.6, 0.6, StoreReplaced("it was started anew"))
    assert effects == [CutOff("it was started anew")]
    task = member.next(0.6)
    assert isinstance(task, Open)
    member.opened("TCPStore at node1", None)
    member.done(task, 0.6, 0.6, None)
    task = member.next(0.6)
    assert isinstance(task, Enrol)
    member.done(task, 0.6, 0.6, None)
    return records.decode_agent(task.value, None, task.name)


def test_another_store_in_its_place_is_joined_at_once() -> None:
    """The workers end before their fence; the new host hears how far the job was."""
    member = joined()
    plan = Plan("old", 4, "running", restarts=2)
    member.receive(post(7, plan))
    assert rejoined(member).seen == JobSeen(job="old", phase="running", round=4, restarts=2)


def test_a_plan_without_a_round_makes_nobody_forget() -> None:
    """The new host says that it waits for nodes before the first of its rounds."""
    member = joined()
    member.receive(post(7, Plan("old", 4, "running")))
    rejoined(member)
    member.receive(post(1, Plan("new", reason="1 of 2 nodes")))
    member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state="ready"))
    task = member.next(0.7)
    assert isinstance(task, Update)
    seen = records.decode_agent(task.value, None, "a1").seen
    assert seen is not None
    assert (seen.job, seen.round) == ("old", 4)
    member.receive(post(2, Plan("new", 5, "running")))
    member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state="running", round=5))
    task = member.next(0.7)
    assert isinstance(task, Update)
    seen = records.decode_agent(task.value, None, "a1").seen
    assert seen is not None
    assert (seen.job, seen.round) == ("new", 5)


def test_a_job_is_gone_on_with_where_etcd_has_lost_its_memory() -> None:
    """The plan may be older, or that of a job before; what was seen says that it is known."""
    member = joined()
    member.receive(post(7, Plan("job", 4, "running")))
    member.done(member.next(0.6), 0.6, 0.6, StoreReplaced("its revision is 3 and was 9"))
    assert isinstance(member.next(0.6), Open)
    member.opened("etcd at h1:2379", post(3, Plan("job", 2, "running")))
    member.done(Open(6.0), 0.6, 0.6, None)
    task = member.next(0.6)
    assert isinstance(task, Enrol)
    seen = records.decode_agent(task.value, None, task.name).seen
    assert seen is not None
    assert (seen.job, seen.round, seen.lost) == ("job", 4, True)
    member.done(task, 0.6, 0.6, None)
    member.receive(post(3, Plan("job", 2, "running")))
    assert not isinstance(member.receive(post(4, Plan("new", -1)))[0], Failed)
    member.receive(post(5, Plan("new", 5, "running")))
    assert isinstance(member.receive(post(9, Plan("third", 0)))[0], Failed)


@pytest.mark.parametrize(
    ("ttl", "period"), [(2.0, 1 / 3), (3.0, 0.5), (4.0, 1.0), (6.0, 1.5), (90.0, 22.5)]
)
def test_an_entry_is_renewed_in_time(ttl: float, period: float) -> None:
    """From 3 s on, one that waits for the election of a leader is answered before the fence."""
    assert renewal_period(ttl, hosted=False) == pytest.approx(period)
    assert renewal_period(ttl, hosted=True) == ttl / 6
    assert ttl < 3.0 or period + NO_LEADER <= FENCE * ttl + 1e-9


def test_a_store_that_takes_no_writes_is_named_once_and_left_in_time() -> None:
    """Renewals are answered all the time; nothing else would end the wait."""
    member = joined()
    member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state="failed", round=0))
    full, told, now = StoreFull("etcd takes no more writes"), [], 0.0
    while not (told and isinstance(told[-1], Failed)):
        task = member.next(now)
        if not isinstance(task, Idle):
            refused = full if isinstance(task, Update) else None
            told += [one for one in member.done(task, now, now, refused) if type(one) is not Fence]
        now += 0.1
        assert now < 40.0
    assert 30.0 <= now < 31.0
    assert [type(one) for one in told] == [StoreSilent, Failed]
    assert "has taken no write of this agent for 30 s" in told[-1].problem


@pytest.mark.parametrize("answers", [True, False])
def test_records_that_cannot_be_read_are_not_waited_for_for_ever(answers: bool) -> None:
    """Where nothing is answered at all, it is the store that is lost."""
    member = joined()
    denied, gone = StoreDenied("permission denied"), StoreUnreachable("nobody answers")
    told, now = list[Effect](), 0.0
    while not (told and isinstance(told[-1], Failed)):
        task = member.next(now)
        if not isinstance(task, Idle):
            told += member.done(task, now, now, None if answers else gone)
        told += member.unread("reading", denied if answers else gone, now)
        now += 0.1
        assert now < 40.0
    assert 30.0 <= now < 32.0
    expected = "has let this agent read no records for 3" if answers else "lost the store"
    assert expected in told[-1].problem


@pytest.mark.parametrize("refusal", [StoreDenied("no such password"), StoreFull("no space")])
def test_workers_need_no_store_that_takes_records(refusal: StoreError) -> None:
    """The entry is renewed, and they run; the deadline begins when one of them has failed."""
    member = joined()
    told, now, failed_at = list[Effect](), 0.0, 100.0
    while not (told and isinstance(told[-1], Failed)):
        now += 0.1
        state: AgentState = "running" if now < failed_at else "failed"
        member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state=state, round=0))
        task = member.next(now)
        if not isinstance(task, Idle):
            refused = refusal if isinstance(task, Update) else None
            told += [one for one in member.done(task, now, now, refused) if type(one) is not Fence]
        if isinstance(refusal, StoreDenied):
            told += member.unread("reading", refusal, now)
        assert now < failed_at + 40.0
    assert failed_at + 30.0 <= now
    assert [type(one) for one in told] == [StoreSilent, Failed]
    assert str(told[0]).count("the job goes on until something has to be decided") == 1
    again = "let this agent in again before then"
    assert (again in str(told[0])) == isinstance(refusal, StoreDenied)


def test_an_agent_that_is_back_says_that_it_is_let_in() -> None:
    """It was cut off while etcd refused to let it read; it joins again when it may."""
    member = joined()
    (silent,) = member.unread("reading", StoreDenied("no such password"), 0.1)
    assert isinstance(silent, StoreSilent)
    member.done(member.next(0.6), 0.6, 0.6, LeaseLost("it is gone"))
    task = member.next(0.7)
    assert isinstance(task, Enrol)
    assert StoreBack("the store lets this agent in again") in member.done(task, 0.7, 0.7, None)


@pytest.mark.parametrize(
    ("phase", "state", "limit"),
    [
        ("running", "ended", 6.0),
        ("running", "running", None),
        ("running", "finished", None),
        ("ending", "ended", 60.0),
        ("forming", "ready", 60.0),
        ("over", "ended", None),
    ],
)
def test_a_coordinator_that_owes_a_plan(
    phase: Phase, state: AgentState, limit: float | None
) -> None:
    """It decides in milliseconds on an end in the round that runs, and publishes what it awaits."""
    member = joined()
    member.receive(post(1, Plan("job", 0, phase, coordinator="b0")))
    member.publish(NodeStatus("node1", "10.0.0.1", 4000, 1, state=state, round=0))
    assert not member.plan_overdue(100.0)  # the end is not written yet
    member.done(member.next(0.01), 0.01, 0.02, None)
    assert not member.plan_overdue(100.0)
    if limit is None:
        assert not member.plan_overdue(9999.0)
        return
    assert not member.plan_overdue(99.9 + limit)
    assert member.plan_overdue(100.0 + limit, "b0")
    assert not member.plan_overdue(100.0 + limit, "c0")  # which leads since b0 was evicted
    assert not member.plan_overdue(99.9 + 2 * limit, "c0")
    assert member.plan_overdue(100.0 + 2 * limit, "c0")
    member.receive(post(2, Plan("job", 0, "ending", coordinator="c0")))
    assert not member.plan_overdue(100.1 + 2 * limit)


def test_a_plan_that_is_not_taken_has_the_same_deadline() -> None:
    """Whoever coordinates may have nothing to say of itself; space that is freed ends it."""
    member = joined()
    full = StoreFull("etcd takes no more writes")
    assert [type(one) for one in member.plan_published(full, 1.0)] == [StoreSilent]
    assert member.plan_published(full, 30.9) == []
    assert member.plan_published(None, 30.95) == [StoreBack("the store takes writes again")]
    assert [type(one) for one in member.plan_published(full, 40.0)] == [StoreSilent]
    assert [type(one) for one in member.plan_published(full, 70.0)] == [Failed]
