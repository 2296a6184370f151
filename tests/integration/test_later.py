"""What the first workers begin to import, the server has for those of the next round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import Launcher

# Ten seconds pass until the server imports it; when it is due is tried in tests/server.
pytestmark = [pytest.mark.slow, pytest.mark.trial]

SCRIPT = """
import os, sys, time
ahead = "torch.distributed.checkpoint" in sys.modules
import torch.distributed.checkpoint
print(os.environ["ELAUNCH_ROUND"], f"{ahead=}", flush=True)
while os.environ["ELAUNCH_ROUND"] == "0" and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.exit(7 if os.environ["ELAUNCH_ROUND"] == "0" else 0)
"""


def test_a_restarted_worker_that_saves_imports_nothing_again(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """A call of ``ctx.checkpoint`` that needs torch.distributed.checkpoint finds it there."""
    script, go = tmp_path / "saves.py", tmp_path / "go"
    script.write_text(SCRIPT)
    flags = ["--max-restarts=1", "--nproc-per-node=2"]
    running = elaunch.start(["run", *flags, script, go], env={"LOGLEVEL": "INFO"})
    running.wait_for_line(r"the server has imported the later modules", 100, "stderr")
    go.touch()
    done = running.wait(100)
    assert done.returncode == 0, done.stderr
    shown = sorted(re.findall(r"^\d ahead.*$", done.stdout, re.M))
    assert shown == ["0 ahead=False"] * 2 + ["1 ahead=True"] * 2
