"""Who comes before whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elaunch.rendezvous.decide.order import Candidate, natural, order, static_order


def test_survivors_then_spares_then_newcomers() -> None:
    """Each in its own order."""
    candidates = [
        Candidate("n10", "node10", arrival=1),
        Candidate("n2", "node2", arrival=9),
        Candidate("hinted", "zzz", hint=0, arrival=8),
        Candidate("late spare", "a", arrival=6, spare=True),
        Candidate("early spare", "b", arrival=5, spare=True),
        Candidate("two", "x", arrival=2),
        Candidate("one", "y", arrival=3),
    ]
    assert order(("one", "gone", "two"), candidates) == (
        *("one", "two"),
        *("early spare", "late spare"),
        *("hinted", "n2", "n10"),
    )


def test_static_claims() -> None:
    """A node of the round before is first among those that claim one rank."""
    claims = static_order(
        ("old",), [Candidate("new", "a", 1, 1), Candidate("old", "b", 1, 2), Candidate("x", "c", 0)]
    )
    assert claims == {0: ["x"], 1: ["old", "new"]}


@given(st.lists(st.text(max_size=8), max_size=8))
def test_any_host_can_be_sorted(hosts: list[str]) -> None:
    """Whatever counts as a digit elsewhere."""
    assert len(sorted(hosts, key=natural)) == len(hosts)
