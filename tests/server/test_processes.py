"""The kernel's side of a process tree, with real processes."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

import pytest

from elaunch import proc
from elaunch.server import processes
from elaunch.server.processes import LOOK_AGAIN, Sweep
from elaunch.wire.local import Message
from tests.launching import wait_until
from tests.server.families import Life, Ready, fork, ignoring, root, sleep, sleeping


def pids(found: list[proc.Process]) -> list[int]:
    """Return the pids, in the order found."""
    return [process.pid for process in found]


def state(pid: int) -> str | None:
    """Return the state letter, None for a process that is gone."""
    process = proc.read_process(pid)
    return None if process is None else process.state


def test_a_process_is_read_with_any_name() -> None:
    """Also with spaces, brackets and bytes that are no text in it."""
    ready = Ready()

    def life() -> None:
        with open("/proc/self/comm", "wb") as file:
            file.write(b"a) R (\xff b")
        ready.say()
        sleep()

    with root(life) as pid:
        ready.wait()
        process = proc.read_process(pid)
        assert process is not None
        assert (process.ppid, process.name, process.threads) == (os.getpid(), "a) R (\ufffd b", 1)
        assert process.living and process.start > 0
    assert proc.read_process(pid) is None


def test_all_descendants_are_found_parents_first() -> None:
    """Of any depth and session; without those that are left out, and what is below them."""
    ready = Ready()

    def elder() -> None:
        os.setsid()
        fork(sleeping(ready))
        sleeping(ready)()

    def life() -> None:
        fork(elder)
        ready.say()
        sleep()

    with root(life) as pid:
        born = set(ready.wait(3)) - {pid}
        found = proc.descendants(pid)
        assert {process.pid for process in found} == born
        assert found[0].ppid == pid and found[1].ppid == found[0].pid
        (left,) = proc.descendants(pid, exclude={found[1].pid})
        assert left.pid == found[0].pid  # it may sleep by now
        assert proc.descendants(pid, exclude={found[0].pid}) == []
        for process in found:
            assert processes.send_signal(process, signal.SIGKILL)


def test_children_are_found_by_a_scan_where_the_kernel_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel without CONFIG_PROC_CHILDREN."""
    ready = Ready()

    def life() -> None:
        fork(sleeping(ready))
        sleep()

    with root(life) as pid:
        (child,) = ready.wait()
        told = proc.children(pid)
        assert told == proc._children_by_scan(pid) == [child]


def test_children_of_other_threads_are_found() -> None:
    """A child belongs to the thread that forked it."""
    ready = Ready()

    def life() -> None:
        def other() -> None:
            fork(sleeping(ready))
            sleep()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with root(life) as pid:
        (child,) = ready.wait()
        assert pids(proc.descendants(pid)) == [child]


def test_the_dead_are_not_living() -> None:
    """A zombie is left out, and what is below a process that is gone is nothing."""
    ready = Ready()

    def life() -> None:
        fork(ready.say)
        sleep()

    with root(life) as pid:
        (child,) = ready.wait()
        wait_until(lambda: state(child) == "Z")
        assert proc.descendants(pid) == []
    assert proc.descendants(pid) == []
    assert proc.children(pid) == []


def test_a_process_whose_first_thread_has_ended_is_living() -> None:
    """It looks like a zombie, but for its threads."""
    ready = Ready()

    def life() -> None:
        def other() -> None:
            wait_until(lambda: state(os.getpid()) == "Z")
            ready.say()
            sleep()

        threading.Thread(target=other).start()
        ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone

    def parent() -> None:
        fork(life)
        sleep()

    if os.uname().machine != "x86_64":
        pytest.skip("the number of the system call is x86_64's")
    with root(parent) as pid:
        (child,) = ready.wait()
        (found,) = proc.descendants(pid)
        assert (found.pid, found.state, found.threads) == (child, "Z", 1 + 1)
        assert processes.send_signal(found, signal.SIGKILL)
        wait_until(lambda: proc.descendants(pid) == [])


def test_a_signal_does_not_hit_another_process_of_that_pid() -> None:
    """The process of that pid was started at another time."""
    ready = Ready()
    with root(sleeping(ready)) as pid:
        ready.wait()
        process = proc.read_process(pid)
        assert process is not None
        stranger = proc.Process(pid, process.ppid, process.name, "S", process.start - 1, 1)
        assert not processes.send_signal(stranger, signal.SIGKILL)
        assert state(pid) in ("S", "R")
        assert processes.send_signal(process, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert not processes.send_signal(process, signal.SIGTERM)


def test_orphans_come_to_a_subreaper() -> None:
    """A daemon with a session of its own, too."""
    ready = Ready()

    def daemon() -> None:
        os.setsid()
        fork(ignoring(ready))

    def life() -> None:
        processes.become_subreaper()
        os.waitpid(fork(daemon), 0)
        sleep()

    with root(life) as pid:
        (orphan,) = ready.wait()
        wait_until(lambda: pids(proc.descendants(pid)) == [orphan])
        (found,) = proc.descendants(pid)
        assert found.ppid == pid
        assert processes.send_signal(found, signal.SIGKILL)


@pytest.mark.parametrize("taken_back", [False, True])
def test_who_dies_with_its_parent(taken_back: bool) -> None:
    """Unless that was taken back."""
    ready = Ready()
    leader = os.getpid()

    def child() -> None:
        processes.die_with_parent(os.getppid())
        if taken_back:
            processes.outlive_parent()
        sleeping(ready)()

    def life() -> None:
        fork(child)
        sleep()

    processes.become_subreaper()
    with root(life) as pid:
        (orphan,) = ready.wait()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        process = proc.read_process(orphan)
        if taken_back:
            assert process is not None and process.ppid == leader
            os.kill(orphan, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1]) == -signal.SIGKILL


def test_who_is_born_too_late_does_not_stay() -> None:
    """Its parent had ended before the kernel was asked to kill it then."""
    pid = fork(lambda: processes.die_with_parent(os.getppid() + 1))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


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
        nothing = {"round": 3, "kept": [], "killed": [], "survivors": []}
    assert swept.outcome() == {"op": "swept", **nothing}


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
    """Who does not end by the signal is killed when the grace is over; both are named."""
    with root(reaping(sleeping(ready), ignoring(ready))) as pid:
        ready.wait(2)
        swept, took = sweep(order(signal.SIGTERM, 2.0), pid)
        assert took >= 2.0
        assert len(swept.outcome()["killed"]) == 2


def test_the_grace_ends_with_the_last_process(ready: Ready) -> None:
    """Nobody is waited for who is gone; all are named."""
    with root(reaping(sleeping(ready), sleeping(ready))) as pid:
        born = ready.wait(2)
        swept, _ = sweep(order(signal.SIGTERM, 2 * PATIENCE), pid)
        assert {each for each, _ in swept.outcome()["killed"]} == {*born}


def test_the_store_host_is_spared(ready: Ready) -> None:
    """It serves the next round; it may be another one by then."""
    with root(reaping(sleeping(ready), ignoring(ready))) as pid:
        host, other = ready.wait(2)
        hosts = [other]
        swept = Sweep(order(signal.SIGTERM), pid, lambda: hosts)
        hosts[0] = host
        step_to_the_end(swept)
        assert other in [each for each, _ in swept.outcome()["killed"]]
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
        assert [each for each, *_ in swept.outcome()["survivors"]] == [child]


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


def test_a_fork_that_cannot_be_made_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit on processes the server imports nothing ahead, and lives on."""

    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refused)
    assert processes.call_in_fork(lambda: "an answer") is None


def test_a_fork_leaves_its_parents_garbage_alone() -> None:
    """What a TCPStore does at its end, for one, is to wait for a thread that no fork has."""
    ended: list[int] = []

    class Store:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            ended.append(os.getpid())

    def collect() -> list[int]:
        gc.collect()
        return ended

    gc.disable()
    try:
        Store()
        assert processes.call_in_fork(collect) == []
    finally:
        gc.enable()
    gc.collect()
    assert ended == [os.getpid()]
