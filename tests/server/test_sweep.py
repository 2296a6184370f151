"""The sweep ends real processes: politely, then by force, then it gives up by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

import pytest

from elaunch import proc
from elaunch.server import processes
from elaunch.server.sweep import LOOK_AGAIN, Sweep
from elaunch.wire.local import Message
from tests.launching import wait_until
from tests.server.families import Life, Ready, fork, ignoring, root, sleeping

PATIENCE = 50.0
"""Seconds that a sweep may take on a busy machine."""


def order(signum: int = 0, grace: float = 0.0, deadline: float = 60.0) -> Message:
    """Return a ``sweep`` message."""
    return {"op": "sweep", "round": 3, "signum": signum, "grace": grace, "deadline": deadline}


def reaping(*lives: Life) -> Life:
    """Return the life of a subreaper that starts ``lives`` and reaps what comes."""

    def life() -> None:
        processes.become_subreaper()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for each in lives:
            fork(each)
        while True:
            try:
                os.wait()
            except ChildProcessError:
                time.sleep(0.01)

    return life


def sweep(
    message: Message, pid: int, spared: Callable[[], Iterable[int]] = tuple
) -> tuple[Sweep, float]:
    """Sweep as the server does; return the sweep at its end, and how many seconds it took."""
    began = time.monotonic()  # before the sweep's own clock
    swept = Sweep(message, pid, spared)
    step_to_the_end(swept)
    return swept, time.monotonic() - began


def step_to_the_end(swept: Sweep) -> None:
    """Step as the server does, for less than anything here lasts by itself."""
    give_up = time.monotonic() + PATIENCE
    while not swept.step():
        assert time.monotonic() < give_up
        time.sleep(min(0.01, max(0.0, swept.next_look() - time.monotonic())))


@pytest.fixture
def ready() -> Ready:
    """Return what processes say that they are there on."""
    return Ready()


def test_nothing_to_end(ready: Ready) -> None:
    """The first step is the last."""
    with root(reaping(ready.say)) as pid:
        (child,) = ready.wait()
        wait_until(lambda: proc.read_process(child) is None)
        swept = Sweep(order(), pid, tuple)
        assert swept.step()
        assert swept.outcome() == {"op": "swept", "round": 3, "killed": [], "survivors": []}


def test_at_once_by_force(ready: Ready) -> None:
    """No signal first: all are killed and named."""
    with root(reaping(sleeping(ready), ignoring(ready))) as pid:
        born = ready.wait(2)
        swept, _ = sweep(order(), pid)
        killed = swept.outcome()["killed"]
        assert sorted(each for each, _ in killed) == sorted(born)
        assert swept.outcome()["survivors"] == []
        assert all(name for _, name in killed)


@pytest.mark.slow
def test_politely_first(ready: Ready) -> None:
    """Who ends by the signal is not killed, who does not is, when the grace is over."""
    with root(reaping(sleeping(ready), ignoring(ready))) as pid:
        ready.wait(2)
        swept, took = sweep(order(signal.SIGTERM, 2.0), pid)
        assert took >= 2.0
        assert len(swept.outcome()["killed"]) == 1


def test_the_grace_ends_with_the_last_process(ready: Ready) -> None:
    """Nobody is waited for who is gone."""
    with root(reaping(sleeping(ready), sleeping(ready))) as pid:
        ready.wait(2)
        swept, _ = sweep(order(signal.SIGTERM, 2 * PATIENCE), pid)
        assert swept.outcome()["killed"] == []


def test_the_store_host_is_spared(ready: Ready) -> None:
    """It serves the next round; it may be another one by then."""
    with root(reaping(sleeping(ready), ignoring(ready))) as pid:
        host, other = ready.wait(2)
        hosts = [other]
        swept = Sweep(order(signal.SIGTERM), pid, lambda: hosts)
        hosts[0] = host
        step_to_the_end(swept)
        assert [each for each, _ in swept.outcome()["killed"]] == [other]
        assert [process.pid for process in proc.descendants(pid)] in ([host], [])


def test_who_starts_others_meanwhile_is_caught(ready: Ready) -> None:
    """Each looks for a way out: a child that forks its own heir and ends, and so on."""

    def hop() -> None:
        ready.say()
        until = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < until:
            if os.fork():
                os._exit(0)
            time.sleep(0.005)

    with root(reaping(hop, hop)) as pid:
        ready.wait(2)
        sweep(order(), pid)
        assert proc.descendants(pid) == []


def test_a_stopped_process_is_killed(ready: Ready) -> None:
    """It can take no other signal."""
    with root(reaping(ignoring(ready))) as pid:
        (child,) = ready.wait()
        os.kill(child, signal.SIGSTOP)
        swept, _ = sweep(order(signal.SIGTERM, 0.1), pid)
        assert [each for each, _ in swept.outcome()["killed"]] == [child]


def test_who_does_not_die_is_given_up_by_name(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in the kernel's own sleep takes no signal; here it is one that gets none."""
    with root(reaping(ignoring(ready))) as pid:
        (child,) = ready.wait()
        monkeypatch.setattr(processes, "send_signal", lambda process, signum: True)
        swept, took = sweep(order(0, 0.0, 0.3), pid)
        assert took >= 0.3
        assert [each for each, _ in swept.outcome()["survivors"]] == [child]


def test_when_to_look_again(ready: Ready) -> None:
    """At the end of the grace; then all the time, for what is forked in the same moment."""
    with root(reaping(ignoring(ready))) as pid:
        ready.wait()
        now = time.monotonic()
        polite = Sweep(order(signal.SIGTERM, 5.0), pid, tuple)
        assert now + 5.0 <= polite.next_look() <= time.monotonic() + 5.0
        forced = Sweep(order(), pid, tuple)
        assert forced.next_look() <= time.monotonic() + LOOK_AGAIN
        step_to_the_end(forced)
