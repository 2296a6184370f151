"""Compiled code that a killed compiler has left cut short, at the start and between two rounds."""

from __future__ import annotations

from pathlib import Path

from tests.launching import Launcher

SCRIPT = """
import os, sys
from pathlib import Path
left = sorted(path.name for path in Path(sys.argv[1]).rglob("*.so"))
print("round", os.environ["ELAUNCH_ROUND"], left, flush=True)
Path(sys.argv[1], "ab", "second.main.so").touch()
sys.exit(7 if os.environ["ELAUNCH_ROUND"] == "0" else 0)
"""


def test_it_is_removed_before_workers_load_it(elaunch: Launcher, tmp_path: Path) -> None:
    """Workers would fail on it in each round, and in each later job of this user."""
    cache = tmp_path / "cache"
    (cache / "ab").mkdir(parents=True)
    (cache / "ab" / "first.main.so").write_bytes(b"\x7fELF\2\1")
    script = tmp_path / "compiles.py"
    script.write_text(SCRIPT)
    flags = ["--start-method=spawn", "--preload=none", "--max-restarts=1"]
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = elaunch.start(["run", *flags, script, cache], env=environ).wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["round 0 []", "round 1 []"]
    for name in ("first", "second"):
        assert f"removed {cache}/ab/{name}.main.so: its compiler was killed" in done.stderr
