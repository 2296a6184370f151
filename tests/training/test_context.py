"""What a context leaves behind in the process when it is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = """
import sys
import elaunch

first = sys.excepthook
for _ in range(3):
    with elaunch.init(announce=False):
        assert sys.excepthook is not first
    assert sys.excepthook is first
ctx = elaunch.init(announce=False)
below = sys.excepthook

def theirs(*error):
    print("theirs", file=sys.stderr)
    below(*error)

sys.excepthook = theirs
ctx.close()
assert sys.excepthook is theirs
raise ValueError("the script's own")
"""


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a script alone, with its state below a directory."""
    foreign = ("ELAUNCH_", "TORCH", "XDG_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=kept | {"XDG_STATE_HOME": str(directory)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_the_hook_for_exceptions_is_given_back(tmp_path: Path) -> None:
    """Unless the script has put its own on top of it, which goes on to work."""
    done = run(HOOKS, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("theirs\nTraceback"), done.stderr
    assert done.stderr.endswith("ValueError: the script's own\n")


NO_METRICS = """
import elaunch

with elaunch.init(announce=False) as ctx:
    (ctx.directory / "metrics.jsonl").mkdir()
    for step in range(3):
        ctx.train.report_training_metrics(step, {"loss": 0.5})
    if BUG:
        raise ValueError("my own bug")
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("bug", [True, pytest.param(False, marks=pytest.mark.trial)])
def test_metrics_that_cannot_be_written_end_no_script(tmp_path: Path, bug: bool) -> None:
    """It ends as it would without them; one line has how many were lost."""
    done = run(NO_METRICS.replace("BUG", str(bug)), tmp_path)
    assert (done.returncode, done.stdout) == ((1, "") if bug else (0, "done\n")), done.stderr
    assert "3 rows of metrics are lost: cannot write" in done.stderr
    assert done.stderr.endswith("ValueError: my own bug\n") or not bug, done.stderr
    assert "RunDirError" not in done.stderr
