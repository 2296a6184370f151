"""The examples of sharded checkpoints run, and go on on another number of ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launching import Launcher

ROOT = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.slow


def losses(output: str) -> dict[int, str]:
    """Return step → loss; of a step that was done twice the last."""
    found = re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)
    return {int(step): loss for step, loss in found}


@pytest.mark.trial
def test_dcp_corrected(elaunch: Launcher) -> None:
    """It survives a kill with the losses of an undisturbed run, and runs under torchrun."""
    script = str(ROOT / "examples" / "dcp_corrected.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    plain = elaunch.start_command([*torchrun, script, "plain"], env=ONE_THREAD)
    options = ["--nproc-per-node=2", "--max-restarts=1", "--checkpoint-dir=ck", "--rdzv-id=job"]
    job = elaunch.start(["run", *options, script], env=ONE_THREAD)
    job.wait_for_line("^step 1 ")
    workers = json.loads(elaunch.run(["status", "--json", "job"]).stdout)["workers"]
    job.wait_for_line("^step 21 ")
    os.kill(next(worker["pid"] for worker in workers if worker["rank"] == 1), signal.SIGKILL)
    done, undisturbed = job.wait(120.0), plain.wait(120.0)
    assert done.returncode == 0, done.stderr
    resumed = re.search(r"^resumed from step (\d+)$", done.stdout, re.MULTILINE)
    assert resumed and int(resumed[1]) in range(20, 200, 20), done.stdout
    assert losses(done.stdout) == losses(undisturbed.stdout), undisturbed.stderr
    assert len(losses(done.stdout)) == 200


@pytest.mark.trial
def test_sharded_save(elaunch: Launcher) -> None:
    """2 x 2 ranks, then two, then one: each goes on where the one before has ended."""
    script = str(ROOT / "examples" / "sharded_save.py")
    seen: dict[int, str] = {}
    for ranks, words in ((4, ["2d"]), (2, ["2d"]), (1, [])):
        options = [f"--nproc-per-node={ranks}", "--rdzv-id=run", "--checkpoint-dir=ck"]
        done = elaunch.start(["run", *options, script, *words], env=ONE_THREAD).wait(120.0)
        assert done.returncode == 0, done.stderr
        assert (f"resumed from step {len(seen)}\n" in done.stdout) == bool(seen), done.stdout
        more = losses(done.stdout)
        assert sorted(more) == list(range(len(seen) + 1, len(seen) + 21))
        seen |= more
    values = [float(loss) for loss in seen.values()]
    assert values[-1] < values[20] < values[0], "it has gone on learning"
