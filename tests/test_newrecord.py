"""elaunch.newrecord: the first record is one that readers take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.errors import RunDirError
from elaunch.newrecord import agent_of, first_record, new_round, new_worker
from elaunch.runrecord import check, condition, this_agent


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
