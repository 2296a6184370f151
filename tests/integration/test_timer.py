"""torch.distributed.elastic.timer works as under torchrun, and its end is one worker's failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.launching import Launcher, without_waits

pytestmark = pytest.mark.slow

ENABLED = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
SCRIPT = """
import os, time
from torch.distributed.elastic import timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60, scope="in time"):
    pass
first = os.environ["ELAUNCH_ROUND"] == "0"
if first and os.environ["RANK"] == "1":
    with timer.expires(after=0.5, scope="step 7"):
        time.sleep(600)
if first:
    time.sleep(600)
print("done", flush=True)
"""


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.trial), "forkserver"])
def test_a_timer_that_expires_is_the_failure_of_its_worker(elaunch: Launcher, method: str) -> None:
    """It is killed and named; the job goes on with the next round, and the agent lives."""
    script = elaunch.directory / "s.py"
    script.write_text(SCRIPT)
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--start-method", method]
    running = elaunch.start(["run", *flags, "--rdzv-id", "r", script], env=ENABLED)
    done = running.wait(100)
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "Its timer step 7 had expired (torch.distributed.elastic.timer)" in " ".join(
        done.stderr.split()
    )
    directory = elaunch.state / "elaunch" / "runs" / "r"
    report = json.loads((directory / "failure-0.json").read_text())
    assert (report["first"]["rank"], report["first"]["timer"]) == (1, "step 7")
    assert not (directory / "timers").exists()


def test_a_pipe_of_ones_own(elaunch: Launcher, tmp_path: Path) -> None:
    """Its path is the variable's; one that a killed agent has left is made anew."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = elaunch.directory / "s.py"
    script.write_text(SCRIPT.replace('"0"', '"never"'))
    env = {**ENABLED, "TORCHELASTIC_TIMER_FILE": str(pipe)}
    done = elaunch.run(["run", script], env=env)
    assert (done.returncode, done.stdout, without_waits(done.stderr)) == (0, "done\n", "")
    assert not pipe.exists()
