"""The run's record on a file system that hangs, and calls to one that the loop makes."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from elaunch.agent import patience
from elaunch.agent.policy import events, turn
from elaunch.agent.policy.actions import Finish, StartRound
from elaunch.agent.policy.state import Limits, Phase, State
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.status import record as recordwriter
from elaunch.agent.status.record import RecordWriter, StatusRecord
from elaunch.config import resolve
from elaunch.errors import RunDirError
from elaunch.rendezvous.plan import Node, Plan
from elaunch.runs.directory import RunDir
from elaunch.runs.record import Record, lasted
from tests.launching import wait_until

LONG = 60.0


class Disk:
    """A place for records that takes none before ``answers`` is set.

    A writer's last record is its thread's end; a test that puts none itself calls :meth:`end`.
    """

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.written: list[str] = []
        self.problem = ""
        self.said: list[str] = []

    def write(self, text: str, is_last: bool) -> None:
        """Replace the record."""
        self.answers.wait(LONG)
        if self.problem:
            raise RunDirError(self.problem)
        self.written.append(text + "!" * is_last)

    def end(self, writer: RecordWriter) -> None:
        """Have the writer put its last record."""
        self.problem = ""
        writer.put("end", is_last=True)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk, and little patience."""
    monkeypatch.setattr(recordwriter, "PATIENCE", 0.2)
    monkeypatch.setattr(recordwriter, "LAST_PATIENCE", 0.3)
    return Disk()


def test_a_record_is_written_when_put_returns(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no thread."""
    monkeypatch.setattr(recordwriter, "PATIENCE", LONG)
    writer = RecordWriter(disk.write, disk.said.append, str)
    for number in range(100):
        assert writer.put(str(number))
        assert disk.written[-1] == str(number)
    assert disk.said == []
    disk.end(writer)


def test_a_record_is_written_again_until_the_last(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what an agent leaves that is killed is not of its round's beginning."""
    monkeypatch.setattr(recordwriter, "AGAIN_S", (0.01, 0.01))
    monkeypatch.setattr(recordwriter, "LAST_PATIENCE", LONG)
    numbers = itertools.count()
    writer = RecordWriter(disk.write, disk.said.append, lambda: f"now {next(numbers)}")
    wait_until(lambda: writer.put("first"), what="it is written")
    wait_until(lambda: "now 3" in disk.written, what="it goes on")
    assert writer.put("end", is_last=True)
    assert disk.written[-1] == "end!"


def test_what_makes_a_record_may_fail(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not written again, and those of the loop are, as before."""
    monkeypatch.setattr(recordwriter, "AGAIN_S", (0.01, 0.01))
    monkeypatch.setattr(recordwriter, "PATIENCE", LONG)
    writer = RecordWriter(disk.write, disk.said.append, lambda: str(1 // 0))
    assert writer.put("first")
    wait_until(lambda: "ZeroDivisionError" in caplog.text, what="it is logged")
    assert writer.put("second") and disk.written == ["first", "second"]
    assert caplog.text.count("Traceback") == 1
    disk.end(writer)


@pytest.mark.slow
def test_a_disk_that_hangs_is_waited_for_once(disk: Disk) -> None:
    """It is named once, and has the newest record when it answers; the last one is waited for."""
    writer = RecordWriter(disk.write, disk.said.append, str)
    disk.answers.clear()
    assert not writer.put("first")
    began = time.monotonic()
    for number in range(100):
        assert not writer.put(str(number))
    assert time.monotonic() - began < 100 * 0.2
    assert not writer.put("end", is_last=True)
    assert len(disk.said) == 1 and "has not taken the record" in disk.said[0]
    disk.answers.set()
    wait_until(lambda: disk.written == ["first", "end!"], what="the newest is written")
    wait_until(lambda: writer.put("more"), what="it is waited for again")
    disk.end(writer)


def test_a_step_between_failure_and_next_round_is_written_and_not_waited_for(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after it is, with the newest in place."""
    monkeypatch.setattr(recordwriter, "PATIENCE", LONG)
    writer = RecordWriter(disk.write, disk.said.append, str)
    disk.answers.clear()
    assert not writer.put("swept", waits=False) and not writer.put("flushed", waits=False)
    assert disk.said == [] and disk.written == []
    disk.answers.set()
    wait_until(lambda: disk.written[-1:] == ["flushed"], what="the newest is written")
    assert writer.put("running") and disk.written[-1] == "running"
    disk.end(writer)


def test_what_a_disk_refuses_is_said_once(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when it is something else."""
    monkeypatch.setattr(recordwriter, "PATIENCE", LONG)
    writer = RecordWriter(disk.write, disk.said.append, str)
    for problem in ("it is full", "it is full", "it is gone"):
        disk.problem = problem
        assert writer.put("x")
    wait_until(lambda: len(disk.said) == 2, what="both are said")
    assert disk.said[0] == "it is full; `elaunch status` will be out of date"
    disk.end(writer)


def test_the_loop_waits_for_no_file_system_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with what it has, and says so; an error is no end either."""
    monkeypatch.setattr(patience, "FILES_S", 0.1)
    hangs = threading.Event()
    with caplog.at_level(logging.WARNING, "elaunch"):
        one, other = tmp_path / "one", tmp_path / "other"
        assert patience.bounded(lambda: hangs.wait(LONG), False, "cannot look", one) is False
        began = time.monotonic()
        for below in range(1000):  # nothing is asked of what hangs already
            assert patience.bounded(tmp_path.exists, False, "cannot see", one / str(below)) is False
        assert time.monotonic() - began < 100 * 0.1
        assert patience.bounded((tmp_path / "nowhere").read_bytes, b"", "cannot read", other) == b""
        assert patience.bounded(tmp_path.exists, False, "cannot look", other) is True
    hangs.set()
    wait_until(lambda: patience.bounded(tmp_path.exists, False, "cannot look", one))
    assert "cannot look: the file system does not answer for 0.1 s; going on" in caplog.text
    assert "cannot read: No such file or directory; going on" in caplog.text


def finish(record: StatusRecord) -> None:
    """Have a job end, and its last record written."""
    state = State(Limits(1), phase=Phase.ENDED)
    record.see(Turn(state, events.TreeGone(0), Finish(0), "", state, None))


@pytest.mark.parametrize("hours", [-1, 1])
def test_how_long_a_run_lasts_where_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """As it was, and so do its rounds; when they begin and end is what the clock shows."""
    script = tmp_path / "train.py"
    script.write_text("")
    settings = resolve({}, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)
    record, clock = StatusRecord(settings, RunDir(tmp_path), None, print), time.time
    state = State(Limits(1), phase=Phase.RUNNING)
    record.see(Turn(state, events.DeadlinePassed(), StartRound(0, None), "", state, Round(0, 1)))
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
    found = cast("Record", record.snapshot())
    assert 0 <= found["history"][0]["lasted_s"] <= lasted(found, time.time()) < 600
    finish(record)
    found = RunDir(tmp_path).read_state()
    assert found["ended_at"] is not None
    assert abs(found["ended_at"] - found["started_at"] - 3600 * hours) < 600
    assert 0 <= found["history"][0]["lasted_s"] <= lasted(found, 0.0) < 600


def test_the_reason_names_the_node_that_is_waited_for(tmp_path: Path) -> None:
    """As long as no round begins; not only that this node waits."""
    script = tmp_path / "train.py"
    script.write_text("")
    settings = resolve({}, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)
    record = StatusRecord(settings, RunDir(tmp_path), None, print)
    waiting = State(Limits(1, meets=True), phase=Phase.MEETING)
    for plan in (
        Plan("job", 0, "forming", reason="node b was lost"),
        Plan("job", 0, "forming", reason="node b was lost", waits="node b was lost, for 30 s"),
    ):
        record.see(turn.make_turn(waiting, events.PlanSeen(plan, "a")))
        assert record.snapshot()["reason"] == (plan.waits or plan.reason)
    finish(record)


def test_of_many_nodes_only_the_first_ones_record_has_all(tmp_path: Path) -> None:
    """Each agent writes its record at each change: N times N nodes would be most of a round. A
    command that asks any agent sees all of them."""
    script = tmp_path / "train.py"
    script.write_text("")
    settings = resolve({}, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)
    record = StatusRecord(settings, RunDir(tmp_path), None, print)
    nodes = tuple(Node(f"n{k}", f"host{k}", "10.0.0.1", 1, "default") for k in range(100))
    for name, rank, kept in (("n0", 0, 100), ("n70", 70, 64), ("spare", None, 64)):
        event = events.PlanSeen(Plan("job", 0, "running", nodes=nodes), name)
        record.see(turn.make_turn(State(Limits(1, meets=True)), event))
        found = record.snapshot()
        assert (found["node_rank"], len(found["nodes"]), found["node_count"]) == (rank, kept, 100)
        assert found["nodes"][1]["host"] == "host1"
        assert RunDir(tmp_path).read_state()["nodes"] == found["nodes"]
        assert [node["host"] for node in record.snapshot(True)["nodes"]][99:] == ["host99"]
    finish(record)
