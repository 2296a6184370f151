"""What ``elaunch status`` shows of what a script says under ``elaunch run``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launcher, wait_until

SCRIPT = """
import time
from pathlib import Path
import torch
import elaunch

torch.distributed.init_process_group("gloo")
with elaunch.init(name="tiny digits") as ctx:
    rank = ctx.distributed.rank
    for step in (1, 2, 3):
        with ctx.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
            (path / f"state_{rank}").write_text("ok")
    ctx.checkpoint.save({"w": torch.ones(3)}, 4)
    ctx.checkpoint.save({"w": torch.ones(3)}, 5)
    go = Path(GO)
    while not go.exists():
        time.sleep(0.05)
"""


def status(elaunch: Launcher, run: str) -> tuple[dict[str, Any], str]:
    """Return what ``elaunch status RUN`` says to programs and to people."""
    shown = elaunch.run(["status", run, "--json"])
    assert shown.returncode == 0, shown
    return json.loads(shown.stdout), elaunch.run(["status", run]).stdout


def saves(elaunch: Launcher) -> dict[str, Any]:
    """Return what is known of saves; empty before the first."""
    found: dict[str, Any] = status(elaunch, "told")[0].get("saves", {})
    return found


def start(elaunch: Launcher, tmp_path: Path, *flags: str) -> Any:
    script = tmp_path / "s.py"
    script.write_text(SCRIPT.replace("GO", repr(str(tmp_path / "go"))))
    words = ["run", "--nproc-per-node", "2", "--rdzv-id", "told", *flags, str(script)]
    return elaunch.start(words)


@pytest.mark.slow
def test_its_name_and_what_its_ranks_saved(elaunch: Launcher, tmp_path: Path) -> None:
    """While it runs and when it is over: name, commits of the ranks' own, and when it ended."""
    running = start(elaunch, tmp_path)
    running.wait_for_line("elaunch: run told: ", 90, "stderr")
    wait_until(lambda: saves(elaunch).get("commits") == 5, 90, "five commits")
    record, page = status(elaunch, "told")
    assert (record["name"], record["saves"]["step"]) == ("tiny digits", 5)
    assert re.search(r"^  name +tiny digits$", page, re.M) and "5 in all" in page
    (tmp_path / "go").touch()
    assert running.wait().returncode == 0
    record, page = status(elaunch, "told")
    assert (record["name"], record["saves"]["commits"], record["state"]) == (
        "tiny digits",
        5,
        "COMPLETED",
    )
    assert re.search(r"^  ended +20", page, re.M)
    listed = elaunch.run(["status"]).stdout
    assert "tiny digits" in listed and " ended " in listed


@pytest.mark.slow
def test_what_is_saved_under_torchrun(elaunch: Launcher, tmp_path: Path) -> None:
    """The script keeps the record then: each of torchrun's rounds is a start of one run."""
    script = tmp_path / "s.py"
    # A second round of torchrun finds the first one's keys, and its process group may hang.
    body = "\n".join(line for line in SCRIPT.splitlines() if "torch" not in line)
    body = body.replace("GO", repr(str(tmp_path / "go")))
    body = body.replace("    go = ", "    if ctx.info.round == 0: raise SystemExit(3)\n    go = ")
    script.write_text(body)
    (tmp_path / "go").touch()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    words = [sys.executable, *torchrun, "--nproc-per-node", "2", script]
    done = elaunch.start_command(words).wait(150)
    assert done.returncode == 0, done
    runs = json.loads(elaunch.run(["status", "--json"]).stdout)
    assert len(runs) == 2 and len({run["run_id"] for run in runs}) == 1
    record, page = status(elaunch, runs[0]["run_id"])
    assert (record["name"], record["round"]) == ("tiny digits", 1)
    assert (record["saves"]["commits"], record["saves"]["step"]) == (3, 3)
    assert "3 in all" in page


@pytest.mark.slow
def test_the_command_lines_name_stays(elaunch: Launcher, tmp_path: Path) -> None:
    """A person has given it to this very run."""
    (tmp_path / "go").touch()
    assert start(elaunch, tmp_path, "--name", "by hand").wait().returncode == 0
    assert status(elaunch, "told")[0]["name"] == "by hand"


def test_a_name_that_cannot_be_shown(elaunch: Launcher, tmp_path: Path) -> None:
    """It is an error of the call."""
    script = tmp_path / "s.py"
    script.write_text("import elaunch\nelaunch.init(name='a\\nb')\n")
    done = elaunch.start_command([sys.executable, script]).wait()
    assert done.returncode == 1
    assert "ContextError: init(name='a\\nb'): give a text of one line" in done.stderr


@pytest.mark.slow
def test_where_a_run_is_stands_there_once(elaunch: Launcher, tmp_path: Path) -> None:
    """Not again with each restart."""
    script = tmp_path / "once.py"
    script.write_text(
        "import elaunch\nwith elaunch.init() as ctx:\n    raise SystemExit(not ctx.info.round)\n"
    )
    done = elaunch.run(["run", "--rdzv-id=once", "--max-restarts=1", script])
    assert done.returncode == 0, done
    assert len(re.findall(r"^elaunch: run once: ", done.stderr, re.M)) == 1, done
