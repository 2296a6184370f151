"""elaunch.runs.identity: recognising agents and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch import proc
from elaunch.errors import RunDirError
from elaunch.runs import identity
from elaunch.runs.directory import RunDir
from elaunch.runs.identity import AgentRecord, WorkerRecord
from tests.launching import wait_until
from tests.views.played_agent import new_record

SLEEP = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def valid(tmp_path: Path) -> dict[str, Any]:
    return new_record(RunDir(tmp_path), "train-3fa2c1", [11, 12])


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_create_time_is_psutils(process: subprocess.Popen[bytes]) -> None:
    stat = proc.read_process(process.pid)
    assert stat is not None
    assert abs(proc.create_time(stat) - psutil.Process(process.pid).create_time()) < 1.5


def test_names_with_parentheses_and_blanks_do_not_confuse(tmp_path: Path) -> None:
    odd = tmp_path / "a ) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as process:
        stat = proc.read_process(process.pid)
        process.kill()
    assert stat is not None
    assert stat.living


def test_this_process_is_alive() -> None:
    assert identity.condition(identity.this_agent()) == "alive"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"host": "another"}, "elsewhere"),
        ({"pid_ns": "pid:[1]"}, "elsewhere"),
        ({"boot_id": "another"}, "rebooted"),
        ({"start_ticks": 1}, "gone"),
        ({"pid": 0}, "gone"),
        ({"create_time": 0.0}, "alive"),  # the tick is exact, the time moves with the clock
    ],
)
def test_condition(changes: dict[str, Any], expected: str) -> None:
    agent: Any = {**identity.this_agent(), **changes}
    assert identity.condition(agent) == expected


def test_a_suspended_agent_is_not_gone_and_a_zombie_is(process: subprocess.Popen[bytes]) -> None:
    def agent() -> AgentRecord:
        stat = proc.read_process(process.pid)
        assert stat is not None
        return {**identity.this_agent(), "pid": process.pid, "start_ticks": stat.start}

    found = agent()
    assert identity.condition(found) == "alive"
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: identity.condition(found) == "stopped")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identity.condition(found) == "gone"
    process.wait()
    assert identity.condition(found) == "gone"


def test_a_worker_whose_pid_went_to_a_stranger_is_not_alive(
    valid: dict[str, Any], process: subprocess.Popen[bytes]
) -> None:
    worker: WorkerRecord = valid["workers"][0]
    worker["pid"] = process.pid
    assert not identity.worker_is_alive(worker)  # it had ended before its start was noted
    identity.note_start(worker, process.pid, time.time())
    assert identity.worker_is_alive(worker)
    worker["pid"] = None
    assert not identity.worker_is_alive(worker)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_worker_is_known_where_the_clock_was_set(
    valid: dict[str, Any], process: subprocess.Popen[bytes], hours: int
) -> None:
    worker: WorkerRecord = valid["workers"][0]
    identity.note_start(worker, process.pid, time.time() - 3600 * hours)
    assert identity.worker_is_alive(worker)
    worker["start_ticks"] -= 1
    assert not identity.worker_is_alive(worker)


def test_the_agent_of_another_process() -> None:
    assert identity.agent_of(os.getpid()) == identity.this_agent()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        agent = identity.agent_of(process.pid)
        assert identity.condition(agent) == "alive"
        process.kill()
        process.wait()
    assert identity.condition(agent) == "gone"
    with pytest.raises(RunDirError, match=f"the process {process.pid} is gone"):
        identity.agent_of(process.pid)
