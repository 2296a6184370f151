"""The kernel's side of a process tree, with real processes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest

from elaunch import proc
from elaunch.server import processes
from tests.launching import wait_until
from tests.server.families import Ready, fork, ignoring, root, sleep, sleeping


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
        assert proc.descendants(pid, exclude={found[1].pid}) == found[:1]
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
