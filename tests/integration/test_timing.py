"""Where the time of a real job went: known sleeps fall into the classes that they belong to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launcher

pytestmark = pytest.mark.slow

SCRIPT = """
import os, time
import elaunch

with elaunch.init(announce=False) as ctx:
    rank, last = ctx.distributed.rank, ctx.checkpoint.latest()
    done = 0 if last is None else last.step
    if last is not None:
        with ctx.checkpoint.restore_path() as path:
            time.sleep(0.6)
    for step in range(done + 1, 13):
        time.sleep(0.1)
        if rank == 1:
            time.sleep(0.1)
        ctx.distributed.barrier()
        ctx.train.report_training_metrics(step, {"loss": 1.0})
        if step == 4:
            with ctx.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
                (path / f"state_{rank}").write_text("ok")
                time.sleep(0.5)
        if step == 8 and ctx.info.round == 0:
            with ctx.section("eval"):
                time.sleep(0.7)
            if rank == 1:
                os._exit(7)
            time.sleep(60)
"""


def timing(elaunch: Launcher, run: str) -> tuple[dict[str, Any], dict[str, float], str]:
    """Return the run's document, its seconds by class, whose sum is right, and its page."""
    shown = elaunch.run(["status", run, "--json"])
    assert shown.returncode == 0, shown
    document = json.loads(shown.stdout)
    found = document["timing"]
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], rel=1e-3)
    return document, found["seconds"], elaunch.run(["status", run]).stdout


def test_a_crash_and_a_resume(elaunch: Launcher, tmp_path: Path) -> None:
    """Two workers, a checkpoint at step 4, a crash after step 8: four steps are done again."""
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    flags = ["--checkpoint-dir", str(tmp_path / "ck"), "--max-restarts", "1", "--run-id", "timed"]
    done = elaunch.run(["run", "--nproc-per-node", "2", *flags, str(script)])
    assert done.returncode == 0, done
    document, seconds, page = timing(elaunch, "timed")
    found = document["timing"]
    lasted = document["ended_at"] - document["started_at"]
    assert found["wall_s"] == pytest.approx(lasted, abs=1.0)
    assert found["slots"] == 2 and found["failures"] == 1 and found["reports"] == "steps"
    assert seconds["load"] >= 0.6 and seconds["save"] >= 0.5 and seconds["section"] >= 0.7
    assert seconds["lost"] >= 4 * 0.1 and seconds["train"] >= 8 * 0.1
    assert seconds["wait"] >= 0.3  # rank 0 alone waits, so that it is half of what it waits
    assert all(seconds[kind] > 0 for kind in ("start", "init", "first_step", "detect", "kill"))
    assert seconds["nodes"] == 0
    slowest = found["slowest"]
    assert slowest["rank"] == 1 and slowest["step_s"] >= 0.2 > 0.1 <= slowest["median_s"]
    said = re.findall(
        r"^elaunch \S+ (result|goodput|recoveries|slowest rank|advice): ", done.stderr, re.M
    )
    assert said in (["result"], ["result", "advice"])
    assert re.search(r"^elaunch \S+ result: COMPLETED after .*, 1 restart$", done.stderr, re.M)
    for name, text in (
        ("goodput", " is train; "),
        ("slowest rank", "rank 1: "),
        ("recoveries", "1, "),
    ):
        assert re.search(rf"^ *{name} +.*{text}", page, re.M), page


def test_a_script_that_tells_nothing_and_a_run_that_goes_on(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """It is all train, and that is said; nothing is printed; the next agent adds to the last's."""
    script = tmp_path / "s.py"
    script.write_text("import sys, time\ntime.sleep(1.0)\nsys.exit(int(sys.argv[1]))\n")
    words = ["run", "--nproc-per-node", "1", "--no-python", "--run-id", "goeson", "python3"]
    failed = elaunch.run([*words, str(script), "3"])
    assert failed.returncode == 3 and "goodput" not in failed.stderr
    _, before, page = timing(elaunch, "goeson.1")
    assert before["train"] >= 1.0 and "not known: the script does not report its steps" in page
    assert elaunch.run([*words, str(script), "0"]).returncode == 0
    document, seconds, _ = timing(elaunch, "goeson.2")
    assert seconds["train"] >= before["train"] + 1.0
    assert document["timing"]["failures"] == 1
    assert elaunch.run([*words, str(script), "0"]).returncode == 0
    assert timing(elaunch, "goeson.3")[1]["train"] < seconds["train"]  # that one was completed
