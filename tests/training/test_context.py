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


@pytest.mark.slow
def test_the_hook_for_exceptions_is_given_back(tmp_path: Path) -> None:
    """Unless the script has put its own on top of it, which goes on to work."""
    foreign = ("ELAUNCH_", "TORCH", "XDG_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    done = subprocess.run(
        [sys.executable, "-c", HOOKS],
        env=kept | {"XDG_STATE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("theirs\nTraceback"), done.stderr
    assert done.stderr.endswith("ValueError: the script's own\n")
