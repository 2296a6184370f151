"""Events in torch's form."""

from __future__ import annotations

import io
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.policy import events
from elaunch.agent.policy.state import Limits
from elaunch.agent.status import eventlog
from elaunch.agent.status.eventlog import EventLog
from tests import warm
from tests.agent.histories import READY, Played, exited, gone, started
from tests.agent.policy.test_nodes import FIRST, seen

JOB = {"run_id": "run7", "role": "default", "entrypoint": "train.py", "rdzv_backend": "c10d"}
WORKER = exited(1, -9)

# Reads events back with torch's own class and prints them as torch writes them.
TORCH = """
import sys
from torch.distributed.elastic.events import Event
for line in sys.stdin:
    print(Event.deserialize(line).serialize())
"""


def job(handler: str = "console") -> Any:
    """Return the settings that events are made of."""
    return SimpleNamespace(event_log_handler=handler, **JOB)


def show(log: EventLog, limits: Limits, *history: events.Event) -> None:
    """Show a log the turns of a history."""
    played = Played(limits)
    for event in history:
        for taken in played.take(event):
            log.see(taken)


def written(text: str) -> list[dict[str, Any]]:
    """Return the metadata of what was written."""
    return [json.loads(line)["metadata"] for line in text.splitlines()]


def test_the_events_of_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    """Who failed, who was stopped, and the agent's own."""
    ends = (exited(1, 7), exited(0, -15, stopped=True), gone())
    show(EventLog(job()), Limits(2), READY, started(0), started(1), *ends)
    found = [(each["state"], each["global_rank"]) for each in written(capsys.readouterr().err)]
    assert found == [
        ("RENDEZVOUS", None),
        ("START", 0),
        ("START", 1),
        ("FAILED", 1),
        ("TERMINATED", 0),
        ("FAILED", None),
    ]


def test_ranks_on_the_second_node(capsys: pytest.CaptureFixture[str]) -> None:
    """They follow from the plan."""
    history = (READY, seen(FIRST), started(1))
    show(EventLog(job()), Limits(2, meets=True), *history)
    (_, start) = written(capsys.readouterr().err)
    inner = json.loads(start["metadata"])
    assert (start["global_rank"], start["worker_id"]) == (4, "1")
    assert (inner["role_rank"], inner["role_world_size"]) == ([4], [5])


@pytest.mark.slow
def test_lines_are_torch_events(capsys: pytest.CaptureFixture[str]) -> None:
    """torch reads them, and would write them letter by letter."""
    log = EventLog(job())
    log.record("RENDEZVOUS", duration_ms=1.5)
    log.record("START", WORKER)
    log.record("FAILED", WORKER, restarts=2, raw_error='{"message": "boom"}')
    lines = capsys.readouterr().err
    done = warm.run([sys.executable, "-c", TORCH], text=lines)
    assert done.stdout == lines, done.stderr
    assert done.stdout.count("\n") == 3


def test_fields(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the true time."""
    times = iter([1_700_000_000.0, 1_700_000_042.25])
    monkeypatch.setattr(eventlog, "time", SimpleNamespace(time=lambda: next(times)))
    log = EventLog(job())
    log.record("FAILED", WORKER, restarts=2, raw_error="boom")
    event = json.loads(capsys.readouterr().err)
    metadata = event.pop("metadata")
    inner = json.loads(metadata.pop("metadata"))
    assert event == {
        "name": "torchelastic.worker.status.FAILED",
        "source": "WORKER",
        "timestamp": 1_700_000_042_250,
    }
    assert metadata == {
        "run_id": "run7",
        "global_rank": 1,
        "group_rank": 0,
        "worker_id": "1",
        "role": "default",
        "hostname": os.uname().nodename,
        "state": "FAILED",
        "total_run_time": 42,
        "rdzv_backend": "c10d",
        "raw_error": "boom",
        "agent_restarts": 2,
        "duration_ms": None,
    }
    assert inner == {
        "group_world_size": 1,
        "entry_point": "train.py",
        "local_rank": [1],
        "role_rank": [1],
        "role_world_size": [1],
        "exit_code": [-9],
        "worker_pid": [1001],
    }


def test_events_of_the_agent(capsys: pytest.CaptureFixture[str]) -> None:
    """They carry no rank."""
    EventLog(job()).record("SUCCEEDED")
    event = json.loads(capsys.readouterr().err)
    assert event["source"] == "AGENT"
    assert event["metadata"]["global_rank"] is event["metadata"]["worker_id"] is None
    assert json.loads(event["metadata"]["metadata"]) == {
        "group_world_size": 1,
        "entry_point": "train.py",
    }


@pytest.mark.parametrize("handler", ["null", "dynamic_rendezvous"])
def test_silent_handlers(handler: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing anywhere."""
    EventLog(job(handler)).record("START", WORKER)
    assert capsys.readouterr() == ("", "")


def test_console_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """As in torch."""
    EventLog(job()).record("START", WORKER)
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err)["metadata"]["state"] == "START"


def test_a_closed_stderr_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are not worth an agent."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log = EventLog(job())
    stream.close()
    log.record("START", WORKER)
    log.record("SUCCEEDED")
