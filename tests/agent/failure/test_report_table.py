"""torchrun's table, compared with the one that the installed torch writes."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.failure.report import HEADING, NO_TRACEBACK, NOT_AVAILABLE, render
from elaunch.agent.failure.verdict import build
from tests import warm
from tests.agent.histories import left

TORCH = """
import json, sys, traceback
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
job = json.load(sys.stdin)
failures = {}
for worker in job["workers"]:
    rank, at = worker.pop("rank"), worker.pop("at")
    failures[rank] = ProcessFailure(**worker)
    failures[rank].timestamp = at
error = ChildFailedError(job["name"], failures)
print("".join(traceback.format_exception_only(ChildFailedError, error)), end="")
"""

CALLSTACK = 'Traceback (most recent call last):\n  File "/a/train.py", line 3, in f\nValueError: b'


def worker(rank: int, exitcode: int, at: int, error_file: str = NOT_AVAILABLE) -> dict[str, Any]:
    """Make the facts of one failed worker."""
    facts = {"rank": rank, "local_rank": rank, "pid": 4000 + rank, "exitcode": exitcode}
    return {**facts, "at": at, "error_file": error_file}


def record(path: Path, message: object) -> str:
    """Write an error file."""
    path.write_text(json.dumps(message))
    return str(path)


def torch_table(name: str, workers: list[dict[str, Any]]) -> str:
    """Return what torch prints for a ChildFailedError."""
    facts = json.dumps({"name": name, "workers": workers})
    return warm.run([sys.executable, "-c", TORCH], text=facts).stdout


def our_table(name: str, workers: list[dict[str, Any]], first: int) -> str:
    """Return the end of the report, from the line with which torch's begins."""
    exits = [
        left(facts["rank"], facts["exitcode"], facts["at"], error_file=facts["error_file"])
        for facts in workers
    ]
    text = render(build(name, socket.getfqdn(), 0, exits, first), table=True)
    return text[text.index(HEADING) :]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alone", "signals", "error files", "long name", "short"])
def test_same_as_torch(tmp_path: Path, case: str) -> None:
    """Letter by letter: borders, titles, widths, spaces at the ends of lines."""
    nested = {"message": "ValueError: b", "extraInfo": {"py_callstack": CALLSTACK, "timestamp": 7}}
    first = worker(1, 3, 1_700_000_000)
    name, workers = {
        "alone": ("train.py", [first]),
        "signals": (
            "train.py",
            [worker(0, -11, 1_700_000_009), first, worker(2, -64, 1_700_000_010)],
        ),
        "error files": (
            "pkg.train",
            [
                worker(0, 1, 1_700_000_005, record(tmp_path / "0", {"message": nested})),
                worker(1, 1, 1_700_000_000, record(tmp_path / "1", {"message": nested})),
                worker(
                    2, 1, 1_700_000_007, record(tmp_path / "2", {"message": "b", "timestamp": 1})
                ),
            ],
        ),
        "long name": ("n" * 80, [first]),
        "short": ("t", [worker(1, 1, 1_700_000_000)]),
    }[case]
    expected = torch_table(name, workers)
    assert NO_TRACEBACK in expected or case == "error files"
    assert our_table(name, workers, 1) == expected


def test_stopped_siblings_are_marked() -> None:
    """torchrun lists them as if they had failed; so do we, but say so."""
    first = left(1, 3, 17e8)
    sibling = left(0, -15, 17e8 + 1, stopped=True)
    text = render(build("train.py", "node0", 0, [first, sibling], 1), table=True)
    assert "  exitcode  : -15 (pid: 4000)  (SIGTERM)\n" in text
    assert "Signal 15 (SIGTERM) received by PID 4000 (stopped by elaunch)\n" in text


def test_exception_in_stderr_stands_where_torch_has_nothing() -> None:
    """Instead of the advice to enable tracebacks."""
    tail = tuple(CALLSTACK.split("\n"))
    end = left(0, 1, 17e8, tail=tail, stderr_path="/logs/stderr.log")
    text = render(build("train.py", "node0", 0, [end], 0), table=True)
    assert "  traceback : ValueError: b (see /logs/stderr.log)\n" in text
    assert NO_TRACEBACK not in text
