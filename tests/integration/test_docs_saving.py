"""The code in docs/saving*.md runs as it stands there, on two ranks."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.integration.jobs import FORK
from tests.launching import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("saving.md", "saving-background.md", "saving-state.md")
TEXT = "".join((DOCS / page).read_text() for page in PAGES)
WHOLE, *PARTS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)

AROUND = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import elaunch

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
state = {"model": model, "optimizer": optimizer}
step = 0
with elaunch.init() as ctx:
"""
"""What stands around the parts: they are fragments of one script, a step apart."""


def run(elaunch: Launcher, script: str, *words: str) -> str:
    """Run a script on two ranks, and return what ``elaunch checkpoints ls`` says afterwards."""
    path, place = elaunch.directory / "train.py", elaunch.directory / "ckpts"
    path.write_text(script)
    flags = ["--nproc-per-node=2", "--rdzv-id=docs", f"--checkpoint-dir={place}", *FORK]
    done = elaunch.run(["run", *flags, path, *words], env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return elaunch.run(["checkpoints", "ls", place]).stdout


def test_the_script_at_the_beginning_goes_on(elaunch: Launcher) -> None:
    """A second start resumes where the first has ended."""
    assert "step-00000029.r0" in run(elaunch, WHOLE)
    listed = run(elaunch, WHOLE, "40")
    assert re.findall(r"^step-0*([0-9]+)\.r0", listed, re.MULTILINE) == ["9", "19", "29", "39"]


def test_the_parts_run(elaunch: Launcher) -> None:
    """Each at a step of its own."""
    assert len(PARTS) >= 5
    lines = [
        "".join(["step += 1\n", part, f"print('part', {n})\n"]) for n, part in enumerate(PARTS)
    ]
    listed = run(elaunch, AROUND + textwrap.indent("".join(lines), "    "))
    assert f"step-{len(PARTS):08d}.r0" in listed
