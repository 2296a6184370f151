"""One agent's place in its job, step by step: what is written, in which order."""

from __future__ import annotations

import itertools

from elaunch.rendezvous import records
from elaunch.rendezvous.member import MemberState
from elaunch.rendezvous.plan import AgentRecord
from elaunch.rendezvous.tasks import Enrol, Idle, Open, Update
from elaunch.rendezvous.view import Rules

RECORD = AgentRecord("node1", "10.0.0.1", 4000, 1)


def joined() -> MemberState:
    """Return a member that is on the roster as ``a0``."""
    names = (f"a{number}" for number in itertools.count())
    member = MemberState(Rules(1, 2), None, lambda: next(names), 0.0)
    member.tell(RECORD)
    task = member.next(0.0)
    assert isinstance(task, Open)
    member.opened("a store", None)
    member.done(task, 0.0, 0.0, None)
    task = member.next(0.0)
    assert isinstance(task, Enrol)
    member.done(task, 0.0, 0.0, None)
    return member


def said(task: object) -> str:
    """Return the state in the record that a task writes."""
    assert isinstance(task, Update)
    return records.decode_agent(task.value, None, "a0").state


def test_what_is_told_while_a_record_is_written_is_written_next() -> None:
    """A worker fails and its tree is gone a millisecond later: both have to be heard."""
    member = joined()
    member.tell(AgentRecord("node1", "10.0.0.1", 4000, 1, state="failed", round=0))
    first = member.next(0.01)
    assert said(first) == "failed"
    member.tell(AgentRecord("node1", "10.0.0.1", 4000, 1, state="ended", round=0))
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
    member.tell(RECORD)
    task = member.next(0.0)
    member.opened("a store", None)
    member.done(task, 0.0, 0.0, None)
    enrol = member.next(0.0)
    member.tell(AgentRecord("node1", "10.0.0.1", 4000, 1, state="ready"))
    member.done(enrol, 0.0, 0.0, None)
    assert said(member.next(0.01)) == "ready"
