"""Plans that a stranger writes into the store in which a job's agents meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.attacks.stranger import stranger
from tests.launching import Launcher

pytestmark = pytest.mark.slow

WAITS = """
import os, sys, time
print("resumes from", os.environ["ELAUNCH_RESUME_FROM"] or "nothing", flush=True)
until = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.05)
"""


def job(port: int, *flags: str) -> list[str]:
    """Return the command of a job of one node so far, which a second one may join."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    conf = ["--rdzv-conf=settle=0.2,join_timeout=30"]
    return ["run", "--nnodes=1:2", *meeting, *conf, "--start-method=spawn", *flags]


def test_a_plan_cannot_name_anybodys_directory(
    elaunch: Launcher, port: int, tmp_path: Path
) -> None:
    """A plan of a next round that resumes from a directory of the stranger's is refused.

    torchrun: whoever reaches its store replaces the pickled state of its rendezvous, which every
    agent unpickles.
    """
    script, evil, own = tmp_path / "waits.py", tmp_path / "evil", tmp_path / "own"
    script.write_text(WAITS)
    (evil / "step-9").mkdir(parents=True)
    running = elaunch.start(job(port, f"--checkpoint-dir={own}", str(script), str(tmp_path / "go")))
    running.wait_for_line("resumes from nothing", 60.0)
    with stranger(port, "job") as other:
        version, plan = other.await_plan(phase="running", round=0)
        plan["checkpoint"] = {"path": str(evil / "step-9"), "step": 9, "format": "dcp"}
        other.post(version + 1, json.dumps(plan | {"round": 1}).encode())
    done = running.wait(60.0)
    assert done.returncode == 2
    assert f"would have the workers resume from '{evil}/step-9', and this node has" in done.stderr
    assert "--rdzv-secret-file" in done.stderr and "evil" not in done.stdout
