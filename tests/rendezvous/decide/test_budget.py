"""The verdict on a failed round: one row per rule."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.coordinator import rules_of_one
from elaunch.rendezvous.decide.budget import (
    Again,
    NoMore,
    Spent,
    hopeless,
    repeated,
    verdict,
)
from elaunch.rendezvous.decide.view import Rules
from elaunch.rendezvous.plan import SameFailure

FAILED = "rank 1 exited with code 7"
AGAIN = "it failed within 10 s again"
ROWS = {
    "none is allowed": (
        (rules_of_one(0), Spent(), None, False),
        NoMore(f"{FAILED}; --max-restarts is 0"),
    ),
    "the first is at once": (
        (rules_of_one(3), Spent(), None, False),
        Again(f"{FAILED}; restart 1 of 3"),
    ),
    "the second backs off": (
        (rules_of_one(3), Spent(1, 1, 1), None, False),
        Again(f"{FAILED}; restart 2 of 3, after a backoff of up to 0.5 s: {AGAIN}", 0.5),
    ),
    "the backoff has an end": (
        (rules_of_one(99), Spent(50, 50, 50), None, False),
        Again(f"{FAILED}; restart 51 of 99, after a backoff of up to 30 s: {AGAIN}", 30.0),
    ),
    "no backoff after a long life": (
        (rules_of_one(3), Spent(1, 1, 1), None, True),
        Again(f"{FAILED}; restart 2 of 3"),
    ),
    "the first one after rounds that lived long": (
        (rules_of_one(30), Spent(20, 20, 0), None, False),
        Again(f"{FAILED}; restart 21 of 30"),
    ),
    "used up": (
        (rules_of_one(1), Spent(1, 1), None, True),
        NoMore(f"{FAILED}; 1 restart brought no progress (--max-restarts)"),
    ),
    "progress refills": (
        (rules_of_one(2, False, True), Spent(5, 0), 40, False),
        Again(f"{FAILED}; restart 1 of 2 since the last progress, from step 40"),
    ),
    "for life it does not": (
        (rules_of_one(2, True, True), Spent(2, 0), 40, False),
        NoMore(f"{FAILED}; 2 of 2 restarts are used up"),
    ),
}


def test_workers_that_stay_lose_no_step() -> None:
    """Those that wait for the next round are not kept waiting; others work meanwhile."""
    allowed, spent = rules_of_one(3, False, True), Spent(1, 1, 1)
    reason = f"{FAILED}; restart 2 of 3 since the last progress, the other workers go on"
    assert verdict(allowed, spent, FAILED, 40, False, "wait") == Again(reason)
    expected = Again(f"{reason}, after a backoff of up to 0.5 s: {AGAIN}", 0.5)
    assert verdict(allowed, spent, FAILED, 40, False, "work") == expected


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_verdict(row: tuple[tuple[Rules, Spent, int | None, bool], Again | NoMore]) -> None:
    """What is allowed, what is spent, the step, a long life → the verdict."""
    (allowed, spent, step, lived_long), expected = row
    assert verdict(allowed, spent, FAILED, step, lived_long) == expected


def test_what_a_search_can_change() -> None:
    """A newer checkpoint gives the restarts back, but not those for life."""
    assert Spent(4, 2, 2).refilled(None, 0) == Spent(4, 0)
    assert Spent(4, 2).refilled(10, 10) == Spent(4, 2)
    assert Spent(4, 2).refilled(10, 9) == Spent(4, 2)
    assert Spent(4, 2).refilled(None, None) == Spent(4, 2)
    assert Spent(4, 2, 1).refilled(10, 11) == Spent(4, 0)
    assert hopeless(rules_of_one(0), Spent())
    assert hopeless(rules_of_one(2, lifetime_budget=True), Spent(2, 0))
    assert not hopeless(rules_of_one(2), Spent(2, 2))


def test_what_counts_as_a_crash_loop() -> None:
    """Rounds in a row that failed at their start; one that lived long ends the row."""
    assert Spent(4, 2, 1).counted(lived_long=False) == Spent(5, 3, 2)
    assert Spent(4, 2, 1).counted(lived_long=True) == Spent(5, 3, 0)


def test_the_same_failure_is_counted_in_a_row() -> None:
    """Another failure begins anew, as does one after progress; without a signature none counts."""
    first = repeated(None, "a", 3, False)
    assert first == SameFailure("a", (3,))
    assert repeated(first, "a", 4, False) == SameFailure("a", (3, 4))
    assert repeated(first, "b", 4, False) == SameFailure("b", (4,))
    assert repeated(first, "a", 4, True) == SameFailure("a", (4,))
    assert repeated(first, "", 4, False) is None
    many = SameFailure("a", tuple(range(100)))
    assert repeated(many, "a", 100, False) == SameFailure("a", tuple(range(1, 101)))
