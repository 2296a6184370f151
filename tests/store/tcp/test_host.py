"""What a store holds: its clock, and what the host's own agent may do."""

from __future__ import annotations

import time

import pytest

from elaunch.errors import LeaseLost, StoreClosed
from elaunch.store.tcp.host import HostedJob
from elaunch.store.tcp.messages import EnrolEntry, ReadMembers, RenewEntry, WithdrawEntry

OWNER = b"an owner"


def test_the_time_that_the_host_slept_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than half a ttl of it; so what has come meanwhile is read first."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    job = HostedJob()
    job.ask(EnrolEntry("a", OWNER, 3.0, b""))
    job.ask(EnrolEntry("b", OWNER, 60.0, b""))
    for slept in (100.0, 3600.0):
        with job.changed:
            clock[0] += slept
            job.tick()
            left = job.expire()
        assert 0 < left < 0.7
        assert sorted(job.ask(ReadMembers())) == ["a", "b"]
        assert job.ask(RenewEntry("a"))
    with job.changed:
        for _ in range(6):
            clock[0] += 0.6
            job.tick()
            job.expire()
    assert list(job.ask(ReadMembers())) == ["b"]
    assert not job.ask(RenewEntry("a"))


def test_a_leader_that_is_gone_publishes_nothing() -> None:
    """Nor reads changes; a name that is gone does not lead again."""
    job = HostedJob()
    with pytest.raises(LeaseLost):
        job.lead("a")
    job.ask(EnrolEntry("a", OWNER, 60.0, b""))
    assert not job.publish(1, b"", b"")
    job.lead("a")
    assert job.publish(1, b"", b"")
    job.ask(WithdrawEntry("a"))
    assert not job.publish(2, b"", b"")
    for call in (lambda: job.lead("a"), lambda: job.changes("a", 0.0)):
        with pytest.raises(LeaseLost):
            call()


def test_what_is_closed_says_so() -> None:
    """Whoever asks."""
    job = HostedJob()
    job.close()
    for call in (
        lambda: job.ask(ReadMembers()),
        lambda: job.follow(0, 0.0),
        lambda: job.lead("a"),
        lambda: job.changes("a", 0.0),
        lambda: job.publish(1, b"", b""),
    ):
        with pytest.raises(StoreClosed):
            call()
