"""A worker starts ``elaunch run`` itself: the two jobs have nothing in common but the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import Launcher

pytestmark = pytest.mark.slow

OUTER = """
import json, os, subprocess, sys
before = {"temp": os.environ["TMPDIR"], "pipe": os.environ["TORCHELASTIC_TIMER_FILE"]}
command = [sys.executable, "-m", "elaunch", "run", "--nproc-per-node", "2", "--preload", "none"]
command.append(sys.argv[1])
done = subprocess.run([*command, sys.argv[2]])
after = {"temp there": os.path.isdir(before["temp"]), "pipe there": os.path.exists(before["pipe"])}
with open(os.path.join(sys.argv[2], "outer.json"), "w") as file:
    json.dump({**before, **after, "code": done.returncode, "environ": dict(os.environ)}, file)
"""
INNER = """
import json, os, sys, tempfile
with open(os.path.join(sys.argv[1], f"inner{os.environ['RANK']}.json"), "w") as file:
    json.dump({"environ": dict(os.environ), "temp": tempfile.gettempdir()}, file)
"""


def test_an_inner_job_takes_and_destroys_nothing_of_the_outer_one(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """Its workers have no variable of the outer job, and what is the outer's stays there."""
    for name, text in (("outer.py", OUTER), ("inner.py", INNER)):
        (tmp_path / name).write_text(text)
    flags = ["--checkpoint-dir", tmp_path / "ck", "--checkpoint-keep-last", "2", "--preload"]
    flags += ["none", "--checkpoint-local", "--rdzv-id", "outer", "--hang-timeout", "100"]
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "ELAUNCH_MAX_RESTARTS": "2"}
    words = [tmp_path / "outer.py", tmp_path / "inner.py", tmp_path]
    done = elaunch.run(["run", *flags, *words], env=env)
    assert done.returncode == 0, done.stderr
    outer = json.loads((tmp_path / "outer.json").read_text())
    assert (outer["code"], outer["temp there"], outer["pipe there"]) == (0, True, True)
    for rank in range(2):
        inner = json.loads((tmp_path / f"inner{rank}.json").read_text())
        environ = inner["environ"]
        kept = {"ELAUNCH_CHECKPOINT_DIR", "ELAUNCH_CHECKPOINT_LOCAL", "ELAUNCH_CHECKPOINT_KEEP"}
        assert kept <= set(outer["environ"]) and not kept & set(environ)
        assert "ELAUNCH_RUN_ID_GIVEN" not in environ
        for name in ("RUN_ID", "CHANNEL_KEY", "AGENT_SOCKET"):
            assert environ[f"ELAUNCH_{name}"] != outer["environ"][f"ELAUNCH_{name}"]
        assert environ["TORCHELASTIC_TIMER_FILE"] != outer["pipe"]
        assert environ["TORCHELASTIC_MAX_RESTARTS"] == "2"  # exported by a person
        assert environ["RANK"] == str(rank)
        assert Path(inner["temp"]).parent == Path(outer["temp"])
    assert not Path(outer["temp"]).exists()
