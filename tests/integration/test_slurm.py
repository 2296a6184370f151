"""A batch script of ``elaunch manifest slurm`` on a real Slurm with two nodes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.launching import Launcher, wait_until
from tests.slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.trial]

ASKS = Path(__file__).with_name("jobs") / "asks.py"


@pytest.fixture
def two_nodes(elaunch: Launcher, tmp_path: Path) -> Iterator[Slurm]:
    """Return a running Slurm; what runs there finds ``elaunch`` on its PATH."""
    slurm.needed()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "elaunch"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m elaunch "$@"\n')
    program.chmod(0o755)
    elaunch.env["PATH"] = f"{tmp_path / 'bin'}:{elaunch.env['PATH']}"
    made = Slurm(elaunch, tmp_path / "slurm")
    made.start()
    yield made
    made.close()


def test_it_saves_before_the_time_limit_is_requeued_and_goes_on(
    elaunch: Launcher, two_nodes: Slurm, tmp_path: Path
) -> None:
    """By the signal that Slurm sends before the limit; the second life is from that step."""
    share, script, out = tmp_path / "share", tmp_path / "job.sbatch", tmp_path / "out"
    share.mkdir()
    options = ["--time=10m", "--lead=60"]
    save = [f"--checkpoint-dir={share}", "--checkpoint-glob=step_*.json", "--preload=none"]
    flags = ["--nnodes=2", "--nproc-per-node=2", *save]
    done = elaunch.run(["manifest", *options, "slurm", *flags, ASKS, share, "left", "time=0.1"])
    script.write_text(done.stdout)
    job = two_nodes.ask("sbatch", "--parsable", f"--output={out}", str(script))
    assert job.isdecimal()

    def text() -> str:
        return out.read_text() if out.exists() else ""

    def shown(field: str) -> str:
        found = re.search(rf"\b{field}=(\S+)", two_nodes.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    wait_until(lambda: len(re.findall("^steps rank=", text(), re.M)) == 4, 100, "steps")
    two_nodes.ask("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: shown("Restarts") == "1", 100, "a requeue")
    (step,) = {path.read_text() for path in share.glob("end.0.*")}
    assert len(list(share.glob("end.0.*"))) == 4
    assert "the time limit of the Slurm job: the workers are asked to save" in text()
    seconds = [float(one) for one in re.findall(r"^left rank=\d (.*)$", text(), re.M)]
    assert len(seconds) == 4 and all(20.0 < one <= 40.0 for one in seconds)

    wait_until(lambda: f" from={step}\n" in text(), 100, "the second life")
    two_nodes.ask("scancel", job)
    wait_until(lambda: shown("JobState") in ("CANCELLED", ""), 100, "its end")
    wait_until(lambda: two_nodes.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", 100, "idle nodes")
