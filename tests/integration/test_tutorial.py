"""What docs/tutorial.md says: its script, run by its line, loses a worker and goes on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.launching import Launcher, wait_until

PAGE = (Path(__file__).parent.parent.parent / "docs" / "tutorial.md").read_text()


@pytest.mark.slow
def test_the_script_of_the_tutorial_survives_a_crash(elaunch: Launcher, tmp_path: Path) -> None:
    """The line is that of the page, with a quarter of the steps."""
    script = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    line = re.search(r"^elaunch (run --run-id mine .*\n.*)$", PAGE, re.MULTILINE)
    assert script is not None and line is not None
    (tmp_path / "train.py").write_text(script[1])
    words = shlex.split(line[1].replace("\\\n", " "))

    def ranks() -> list[dict[str, int]]:
        shown = elaunch.run(["status", "mine", "--json"]).stdout
        return json.loads(shown)["workers"] if shown else []

    running = elaunch.start([*words, "--steps", "50"], cwd=tmp_path)
    wait_until(lambda: len(ranks()) == 4, 60)
    pid = ranks()[3]["pid"]
    wait_until(lambda: (tmp_path / "ckpt" / "step_20.pt").exists(), 60)
    os.kill(pid, signal.SIGKILL)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert "rank 3 was killed by SIGKILL; restart 1 of 3" in done.stderr
    assert (tmp_path / "ckpt" / "step_40.pt").exists()
