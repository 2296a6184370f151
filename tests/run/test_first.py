"""elaunch.run.first: the first record is one that readers take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.errors import RunDirError
from elaunch.run.first import add_round, agent_of, first_record, new_round, new_worker
from elaunch.run.record import check, condition, this_agent


def test_a_first_record_is_a_record(tmp_path: Path) -> None:
    made = first_record("job-1", "job", tmp_path)
    made["workers"].append(new_worker(3, 1))
    made["history"].append(new_round(2, "because", 120))
    assert check(made, "here") == made
    assert (made["state"], made["agent"]["pid"]) == ("STARTING", os.getpid())


def test_the_agent_of_another_process() -> None:
    assert agent_of(os.getpid()) == this_agent()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        agent = agent_of(process.pid)
        assert condition(agent) == "alive"
        process.kill()
        process.wait()
    assert condition(agent) == "gone"
    with pytest.raises(RunDirError, match=f"the process {process.pid} is gone"):
        agent_of(process.pid)


def test_a_run_of_many_rounds_has_a_small_record(tmp_path: Path) -> None:
    """The newest rounds stay, and it is known how many there were."""
    made = first_record("job-1", "job", tmp_path)
    for number in range(2_700):
        add_round(made, new_round(number, "rank 1 was killed by SIGKILL", 10 * number))
    assert [entry["round"] for entry in made["history"]] == list(range(2_600, 2_700))
    assert made["rounds_left_out"] == 2_600
    assert check(made, "here") == made
    assert len(json.dumps(made)) < 30_000
