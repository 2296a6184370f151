"""elaunch.views.read: live, ended, silent, suspended and killed agents, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from elaunch.runs.directory import create
from elaunch.runs.identity import condition, note_start, worker_is_alive
from elaunch.runs.record import new_worker
from elaunch.views import read as module
from elaunch.views.read import read, read_all
from tests.launching import wait_until
from tests.views.conftest import Play
from tests.views.playing import final


@pytest.mark.slow
def test_a_live_agent_answers(play: Play) -> None:
    agent = play(2, reason="first start")
    job = read(agent.run, timeout=60)
    assert (job.state, job.agent, job.live) == ("RUNNING", "answers", True)
    assert job.record == agent.record()
    assert job.reason == "first start"
    assert job.duration_s is not None and 0 <= job.duration_s < 60


@pytest.mark.slow
def test_an_ended_run(play: Play) -> None:
    agent = play()
    agent.end(**final("COMPLETED", agent.record(), reason="every worker ended with exit code 0"))
    job = read(agent.run)
    assert (job.state, job.agent, job.live) == ("COMPLETED", "ended", False)
    assert job.duration_s == pytest.approx(65)


def test_a_killed_agent_is_lost(play: Play) -> None:
    agent = play()
    agent.kill()
    workers = agent.record()["workers"]
    wait_until(lambda: not any(worker_is_alive(worker) for worker in workers))
    job = read(agent.run)
    assert (job.state, job.agent, job.live) == ("LOST", "gone", False)
    assert job.reason == (
        f"the agent (pid {agent.process.pid}) was killed; its workers were ended with it"
    )
    assert job.duration_s is None


def test_workers_that_outlive_their_agent_are_named(play: Play) -> None:
    agent = play(0)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as survivor:
        worker = new_worker(3, 1)
        note_start(worker, survivor.pid, time.time())
        agent.write(workers=[worker])
        agent.kill()
        job = read(agent.run)
        survivor.kill()
    assert job.reason is not None
    assert job.reason.endswith(f"was killed; still running: rank 3 (pid {survivor.pid})")


@pytest.mark.slow
def test_an_agent_that_does_not_answer(play: Play) -> None:
    agent = play()
    agent.write(silent=True)
    began = time.monotonic()
    job = read(agent.run, timeout=0.4)
    assert time.monotonic() - began < 30  # it would be silent for a minute
    assert (job.state, job.agent, job.live) == ("RUNNING", "silent", True)


@pytest.mark.slow
def test_a_suspended_agent(play: Play) -> None:
    agent = play()
    identity = agent.run.read_state()["agent"]
    agent.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: condition(identity) == "stopped")
    job = read(agent.run, timeout=0.4)
    assert (job.state, job.agent, job.live) == ("RUNNING", "stopped", True)


@pytest.mark.slow
def test_an_agent_without_a_socket_is_read_from_its_file(play: Play) -> None:
    agent = play()
    agent.run.socket.unlink()
    job = read(agent.run, timeout=0.2)
    assert (job.state, job.agent) == ("RUNNING", "silent")


@pytest.mark.slow
def test_an_agent_that_ends_while_it_is_asked(play: Play) -> None:
    """Its socket is gone before its process: that alone is neither silence nor loss."""
    agent = play()
    agent.run.socket.unlink()
    pending = [agent]

    def end() -> None:
        last = pending.pop()
        last.end(**final("COMPLETED", last.record()))

    thread = threading.Timer(0.3, end)
    thread.start()
    job = read(agent.run, timeout=60)
    thread.join(60)
    assert job.state == "COMPLETED"


@pytest.mark.slow
def test_the_answer_is_newer_than_the_file(play: Play) -> None:
    agent = play()
    stale = agent.run.state_file.read_bytes()
    agent.write(round=4)
    agent.run.state_file.write_bytes(stale)
    job = read(agent.run, timeout=60)
    assert job.record is not None
    assert job.record["round"] == 4


def test_a_live_agent_is_read_although_its_file_is_torn(play: Play) -> None:
    agent = play()
    agent.run.state_file.write_text('{"sch')
    assert read(agent.run, timeout=60).agent == "answers"
    agent.kill()
    job = read(agent.run)
    assert job.state == "UNREADABLE"
    assert job.reason is not None and "is not JSON" in job.reason


def test_a_pid_that_went_to_a_stranger_is_not_the_agent(play: Play) -> None:
    agent = play()
    record = agent.record()
    agent.kill()
    record["agent"] = {**record["agent"], "pid": os.getpid()}
    agent.run.write_state(record)
    assert read(agent.run).state == "LOST"


@pytest.mark.parametrize(
    ("changes", "agent_state", "state", "reason"),
    [
        ({"host": "node7"}, "elsewhere", "RUNNING", None),
        ({"boot_id": "before"}, "gone", "LOST", "ended when the machine was restarted"),
        # Another container of this host: nobody listens any more, so its agent is gone.
        ({"pid_ns": "pid:[1]"}, "gone", "LOST", "was killed"),
    ],
)
def test_agents_that_cannot_be_seen(
    play: Play, changes: dict[str, str], agent_state: str, state: str, reason: str | None
) -> None:
    agent = play(0)
    record = agent.record()
    agent.kill()
    record["agent"] = {**record["agent"], **changes}
    agent.run.write_state(record)
    job = read(agent.run, timeout=0.2)
    assert (job.agent, job.state) == (agent_state, state)
    assert (reason or "") in (job.reason or "")


def test_the_overview_leaves_out_other_machines_and_old_ends(
    play: Play, environ: dict[str, str]
) -> None:
    live = play(0, run_id="live")
    record = live.record()
    for number in range(12):
        run = create(f"ended-{number}", environ)
        age = number + 1
        changes = {"run_id": f"ended-{number}", "started_at": record["started_at"] - age}
        run.write_state(record | final("COMPLETED", record) | changes)
    other = create("other", environ)
    agent = {**record["agent"], "host": "node7"}
    other.write_state(record | {"run_id": "other", "agent": agent})
    create("torn", environ).state_file.write_text("{")

    def names(everything: bool) -> list[str]:
        return [job.run.path.name for job in read_all(environ, everything)]

    recent = names(everything=False)
    assert recent[:2] == ["torn", "live"] or recent[:2] == ["live", "torn"]
    assert recent[2:] == [f"ended-{number}" for number in range(9)]
    assert set(names(everything=True)) - set(recent) == {
        "other",
        "ended-9",
        "ended-10",
        "ended-11",
    }


@pytest.mark.slow
def test_a_silent_agent_holds_up_the_overview_only_briefly(
    play: Play, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a time of its own: here a longer one, for an agent that answers on a busy machine."""
    assert module.LIST_TIMEOUT_S < module.ANSWER_TIMEOUT_S
    monkeypatch.setattr(module, "LIST_TIMEOUT_S", 4.0)
    play(0, run_id="one").write(silent=True)
    play(0, run_id="two")
    began = time.monotonic()
    states = {job.run.path.name: job.agent for job in read_all(environ)}
    assert states == {"one": "silent", "two": "answers"}
    assert 4.0 - module.RETRY_S <= time.monotonic() - began < 30
