"""The order of the next round: which node comes before which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elaunch.rendezvous.decide.members import Applicant, natural, order, static_order


def test_survivors_then_spares_then_newcomers() -> None:
    """Each in its own order."""
    candidates = [
        Applicant("n10", "node10", arrival=1),
        Applicant("n2", "node2", arrival=9),
        Applicant("hinted", "zzz", hint=0, arrival=8),
        Applicant("late spare", "a", arrival=6, spare=True),
        Applicant("early spare", "b", arrival=5, spare=True),
        Applicant("two", "x", arrival=2),
        Applicant("one", "y", arrival=3),
    ]
    assert order(("one", "gone", "two"), candidates) == (
        *("one", "two"),
        *("early spare", "late spare"),
        *("hinted", "n2", "n10"),
    )


def test_static_claims() -> None:
    """A node of the round before is first among those that claim one rank."""
    claims = static_order(
        ("old",), [Applicant("new", "a", 1, 1), Applicant("old", "b", 1, 2), Applicant("x", "c", 0)]
    )
    assert claims == {0: ["x"], 1: ["old", "new"]}


@given(st.lists(st.text(max_size=8), max_size=8))
def test_any_host_can_be_sorted(hosts: list[str]) -> None:
    """Whatever counts as a digit elsewhere."""
    assert len(sorted(hosts, key=natural)) == len(hosts)
