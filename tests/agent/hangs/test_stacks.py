"""Stacks of real processes: those that write them, and those that cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaunch import env, proc
from elaunch.agent.hangs import stacks
from elaunch.agent.hangs.stacks import Worker, take
from tests.agent.logrig import eventually

REGISTER = """
import faulthandler, signal, sys, time, ctypes, os
file = open(sys.argv[1], "w")
faulthandler.register(signal.SIGRTMIN + 12, file=file, all_threads=True, chain=False)
"""
SLEEPS = """
def sleeps():
    print("ready", flush=True)
    time.sleep(120)
sleeps()
"""
HOLDS = """
def holds():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(120)
holds()
"""
SILENT = "import time\nprint('ready', flush=True)\ntime.sleep(120)\n"


@contextmanager
def running(tmp_path: Path, rank: int, code: str, *shell: str) -> Iterator[Worker]:
    """Run Python code as a worker; it has said that it is ready."""
    script, file = tmp_path / f"{rank}.py", tmp_path / f"{rank}.txt"
    script.write_text(textwrap.dedent(code))
    argv = [*shell, sys.executable, str(script), str(file)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield Worker(rank, process.pid, file)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_signal_is_the_one_that_the_workers_know() -> None:
    """The tests' own scripts register it by number."""
    assert signal.SIGRTMIN + 12 == env.STACKS_SIGNAL


def test_equal_stacks_are_one_group(tmp_path: Path) -> None:
    """The rank that holds Python's lock in C code is the odd one."""
    with (
        running(tmp_path, 0, REGISTER + HOLDS) as first,
        running(tmp_path, 1, REGISTER + SLEEPS) as second,
    ):
        found = take(7, (first, second))
    assert (found.round, found.problems) == (7, ())
    tops = {one.ranks: one.main[0].rpartition(" in ")[2] for one in found.groups}
    assert tops == {(0,): "holds", (1,): "sleeps"}


def test_a_process_without_a_handler_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal would end it. It is said why there is nothing."""
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    with running(tmp_path, 0, SILENT) as worker:
        assert not proc.catches(worker.pid, env.STACKS_SIGNAL)
        found = take(0, (worker,))
        assert Path(f"/proc/{worker.pid}/stat").read_text().split()[2] in "SRD"
    assert found.groups == ()
    (((ranks, why)),) = found.problems
    assert ranks == (0,)
    assert "nothing in the process writes them (with --hang-timeout" in why
    assert "py-spy is not installed" in why


def test_a_script_below_a_shell_is_found(tmp_path: Path) -> None:
    """--no-python with a shell script around the training."""
    shell = ("/bin/sh", "-c", '"$0" "$@"; exit 3')
    with running(tmp_path, 0, REGISTER + SLEEPS, *shell) as worker:
        assert not proc.catches(worker.pid, env.STACKS_SIGNAL)
        found = take(0, (worker,))
    assert [one.ranks for one in found.groups] == [(0,)]


def test_a_process_that_is_stopped_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the very cause; and py-spy does not trace the process, which changes its state."""
    tracer, traced = tmp_path / "py-spy", tmp_path / "traced"
    tracer.write_text(f"#!/bin/sh\ntouch {traced}\nexit 1\n")
    tracer.chmod(0o755)
    monkeypatch.setattr(stacks, "py_spy", lambda: str(tracer))
    with running(tmp_path, 3, REGISTER + SLEEPS) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{worker.pid}/stat").read_text().split()[2] == "T")
        found = take(0, (worker,))
    assert found.problems == (
        ((3,), "the process is stopped by a signal (SIGSTOP) or by a debugger"),
    )
    assert not traced.exists()


def test_a_process_that_has_ended(tmp_path: Path) -> None:
    """Between the verdict and the question."""
    with running(tmp_path, 0, SILENT) as worker:
        pass
    found = take(0, (worker,))
    assert found.problems == (((0,), "the process has ended meanwhile"),)


@pytest.mark.slow
def test_a_process_that_blocks_the_signal_is_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within bounds; the others' stacks are there all the same."""
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    monkeypatch.setattr(stacks, "WRITE_S", 2.0)
    blocks = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 12])\n"
    with (
        running(tmp_path, 0, REGISTER + blocks + SLEEPS) as first,
        running(tmp_path, 1, REGISTER + SLEEPS) as second,
    ):
        began = time.monotonic()
        found = take(0, (first, second))
        assert time.monotonic() - began < 30
    assert [one.ranks for one in found.groups] == [(1,)]
    assert found.problems == (((0,), "not written within 2 s"),)


def test_py_spy_sees_who_writes_nothing(tmp_path: Path) -> None:
    """Where it may look into other processes."""
    with running(tmp_path, 0, SILENT) as worker:
        found = take(0, (worker,))
    if found.problems:
        assert found.problems[0][1].startswith("py-spy: ")
    else:
        assert found.groups[0].main[-1].endswith('0.py", line 3 in <module>')
