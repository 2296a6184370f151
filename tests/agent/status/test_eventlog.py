"""Events in torch's form."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elaunch.agent.status.eventlog import EventLog, JobFacts, WorkerFacts
from elaunch.errors import UsageError

FACTS = JobFacts("run7", "default", "node0", "train.py", "c10d")
WORKER = WorkerFacts(rank=3, local_rank=1, role_rank=3, role_world_size=4, pid=4001, exit_code=-9)

# Reads events back with torch's own class and prints them as torch writes them.
TORCH = """
import sys
from torch.distributed.elastic.events import Event
for line in sys.stdin:
    print(Event.deserialize(line).serialize())
"""


def clock() -> float:
    """Return a fixed time."""
    return 1_700_000_000.5


def test_lines_are_torch_events() -> None:
    """torch reads them, and would write them letter by letter."""
    stream = io.StringIO()
    log = EventLog("console", FACTS, stream, clock)
    log.record("RENDEZVOUS", duration_ms=1.5)
    log.record("START", WORKER)
    log.record("FAILED", WORKER, restarts=2, raw_error='{"message": "boom"}')
    done = subprocess.run(
        [sys.executable, "-c", TORCH], input=stream.getvalue(), capture_output=True, text=True
    )
    assert done.stdout == stream.getvalue(), done.stderr
    assert done.stdout.count("\n") == 3


def test_fields() -> None:
    """With the true time."""
    stream = io.StringIO()
    times: Iterator[float] = iter([1_700_000_000.0, 1_700_000_042.25])
    log = EventLog("console", FACTS, stream, lambda: next(times))
    log.record("FAILED", WORKER, restarts=2, raw_error="boom")
    event = json.loads(stream.getvalue())
    metadata = event.pop("metadata")
    inner = json.loads(metadata.pop("metadata"))
    assert event == {
        "name": "torchelastic.worker.status.FAILED",
        "source": "WORKER",
        "timestamp": 1_700_000_042_250,
    }
    assert metadata == {
        "run_id": "run7",
        "global_rank": 3,
        "group_rank": 0,
        "worker_id": "1",
        "role": "default",
        "hostname": "node0",
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
        "role_rank": [3],
        "role_world_size": [4],
        "exit_code": [-9],
        "worker_pid": [4001],
    }


def test_events_of_the_agent() -> None:
    """They carry no rank."""
    stream = io.StringIO()
    EventLog("console", FACTS, stream, clock).record("SUCCEEDED")
    event = json.loads(stream.getvalue())
    assert event["source"] == "AGENT"
    assert event["metadata"]["global_rank"] is event["metadata"]["worker_id"] is None
    assert json.loads(event["metadata"]["metadata"]) == {
        "group_world_size": 1,
        "entry_point": "train.py",
    }


@pytest.mark.parametrize("handler", ["null", "dynamic_rendezvous"])
def test_silent_handlers(handler: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing anywhere."""
    stream = io.StringIO()
    EventLog(handler, FACTS, stream).record("START", WORKER)
    assert (stream.getvalue(), *capsys.readouterr()) == ("", "", "")


def test_console_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """As in torch."""
    EventLog("console", FACTS).record("START", WORKER)
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err)["metadata"]["state"] == "START"


def test_unknown_handler() -> None:
    """Names what there is."""
    with pytest.raises(UsageError, match=r"--event-log-handler scuba.*console, null"):
        EventLog("scuba", FACTS)


def test_a_closed_stderr_is_survived() -> None:
    """Events are not worth an agent."""
    stream = io.StringIO()
    log = EventLog("console", FACTS, stream)
    stream.close()
    log.record("START", WORKER)
    log.record("SUCCEEDED")
