"""Unchanged scripts of torch.distributed: which rank the others wait for, in a hang and a crash."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest

from tests.integration.jobs import ATTENTIVE, UNUSUAL, WAITING
from tests.integration.watching import agent_lines
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow


def failure(elaunch: Launcher, run: str = "*") -> dict[str, Any]:
    """Return the JSON report of the one round of the test, or of one of its runs."""
    (path,) = elaunch.state.glob(f"elaunch/runs/{run}/failure-0.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    "preload",
    [(), pytest.param(("--preload=none",), marks=pytest.mark.trial)],
    ids=["torch", "none"],
)
def test_the_rank_that_the_others_wait_for_is_named(
    elaunch: Launcher, preload: tuple[str, ...]
) -> None:
    """It holds Python's lock in C, in a script that knows nothing of elaunch.

    Rank 2 has not entered the collective either, since it receives from rank 1 without blocking.
    """
    flags = ["--nproc-per-node=3", "--hang-timeout=2", "-r", "3", *preload]
    done = elaunch.run(["run", *flags, WAITING, "awaited", "1", "30", "60"])
    assert done.returncode == 77
    assert "rank 1 has not entered all_reduce #31; rank 0 has been waiting there for" in done.stderr
    found = failure(elaunch)
    assert (found["hang"]["ranks"], found["hang"]["source"]) == ([1], "collectives")
    assert found["culprit"].startswith("rank 1 has not entered all_reduce #31; rank 0 has been")
    (odd,) = (group for group in found["hang"]["stacks"] if group["ranks"] == [1])
    assert odd["main"][0].endswith("in fault")
    assert not list(elaunch.state.glob("elaunch/runs/*/recorder-*"))


@pytest.mark.parametrize("begins", [pytest.param(0, marks=pytest.mark.trial), 1])
def test_a_rank_that_does_not_come_to_init_process_group(elaunch: Launcher, begins: int) -> None:
    """Neither in the first round nor after a restart has any rank entered a collective yet."""
    flags = ["--nproc-per-node=3", "--hang-timeout=0.5", "-r", "3", f"--max-restarts={begins}"]
    done = elaunch.run(["run", *flags, UNUSUAL, "absent", "1", str(begins), "60"])
    assert done.returncode == 77, done
    said = "rank 1 has not entered init_process_group; ranks 0, 2 have been waiting there for "
    assert said in done.stderr, done
    (path,) = elaunch.state.glob(f"elaunch/runs/*/failure-{begins}.json")
    found = json.loads(path.read_text())
    assert (found["hang"]["ranks"], found["hang"]["source"]) == ([1], "collectives")
    assert found["culprit"].startswith(said)


@pytest.mark.parametrize(
    "flags",
    [(), pytest.param(("--hang-timeout=auto",), marks=pytest.mark.trial)],
    ids=["unwatched", "auto"],
)
def test_a_person_sees_for_which_rank_the_others_wait(
    elaunch: Launcher, flags: tuple[str, ...]
) -> None:
    """Also where nothing would end for it; the log has it once."""
    flags = ("--nproc-per-node=3", "--run-id=first", "-r", "3", *flags)
    words = ["run", *flags, str(UNUSUAL), "absent", "1", "0", "60"]
    job = elaunch.start_command([sys.executable, str(ATTENTIVE), *words])
    said = "rank 1 has not entered init_process_group; ranks 0, 2 have been waiting there for "
    job.wait_for_line(
        rf"^elaunch \S+ {said}.*; `elaunch stacks` shows where they are$", stream="stderr"
    )
    found = json.loads(elaunch.run(["status", "first", "--json"]).stdout)
    assert found["awaited"]["ranks"] == [1] and found["awaited"]["text"].startswith(said)
    assert f"\n  attention: {said}" in elaunch.run(["status", "first"]).stdout
    top = json.loads(elaunch.run(["top", "first", "--json"]).stdout)
    (first,) = top["attention"]
    assert (first["level"], first["title"].startswith(said)) == ("warn", True)
    ((worst, *_),) = [node["ranks"] for node in top["nodes"]]
    assert (worst["rank"], worst["level"]) == (1, 1)
    job.send_signal(signal.SIGTERM)
    ended = job.wait()
    assert len([line for line in agent_lines(ended.stderr) if said in line]) == 1, ended
    assert "awaited" not in json.loads(elaunch.run(["status", "first", "--json"]).stdout)


@pytest.mark.parametrize("flags", [(), ("--no-stacks",)], ids=["asked", "not asked"])
def test_where_the_others_were_when_one_died(elaunch: Launcher, flags: tuple[str, ...]) -> None:
    """They are asked before they are stopped.

    They are in no collective: from one they would end by themselves as soon as rank 1 is gone. They
    have 50 ms to answer: on a busy machine not each of them does, and at times none.
    """
    for attempt in range(5):
        words = ["run", "--nproc-per-node=4", f"--run-id=alone{attempt}", *flags]
        done = elaunch.run([*words, WAITING, "alone", "1", "30", "60"])
        assert done.returncode == 137
        found = failure(elaunch, f"alone{attempt}")["meanwhile"]
        if flags or (found is not None and found["stacks"]):
            break
    assert (found is None) is bool(flags)
    if found is not None:
        (group,) = found["stacks"]
        assert {*group["ranks"]} <= {0, 2, 3} and group["main"][0].endswith("in stand")


def test_the_rank_that_comes_last_is_shown(elaunch: Launcher) -> None:
    """While the script runs, which sleeps for 50 ms in each step on rank 1, and afterwards."""
    words = ["run", "--nproc-per-node=3", "--run-id=slow", WAITING, "slow", "1", "50", "5000"]
    job = elaunch.start(words)
    found: dict[str, Any] = {}

    def named() -> bool:
        shown = elaunch.run(["status", "slow", "--json"])
        found.update(json.loads(shown.stdout) if shown.returncode == 0 else {})
        return found.get("lateness", {}).get("slow") is not None

    wait_until(named, 60.0)
    first, *_ = found["lateness"]["ranks"]
    assert (found["lateness"]["slow"], first["rank"]) == (1, 1)
    assert first["behind_s"] >= 0.03
    assert "  attention: rank 1 arrived last in " in elaunch.run(["status", "slow"]).stdout
    job.send_signal(signal.SIGTERM)
    job.wait()
    shown = elaunch.run(["status", "slow"]).stdout
    assert "attention" not in shown and " rank 1 arrived last in " in shown
