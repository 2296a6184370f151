"""Who is accused, over many runs of unchanged scripts with one fault each, and with none.

``ELAUNCH_CULPRIT_TRIALS=60`` makes sixty of both.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import WAITING
from tests.integration.watching import agent_lines
from tests.launching import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.trial, pytest.mark.timeout(3600)]

TRIALS = int(os.environ.get("ELAUNCH_CULPRIT_TRIALS", "18"))
IMPATIENT = WAITING.with_name("impatient.py")
HANGS = (
    *("before", "after", "stopped", "collective", "size", "type", "order", "gil", "loader"),
    *("ends", "busy", "groups", "ddp", "fsdp", "receives"),
)
CRASHES = ("segfault", "oom", "raises")
CLEAN = ("plain", "eval", "save", "uneven", "first", "loads", "ddp-clean", "fsdp-clean")
RANKS = 4


def report(elaunch: Launcher, run_id: str) -> dict[str, Any]:
    """Return the failure report of a run's only round."""
    path = elaunch.state / "elaunch" / "runs" / run_id / "failure-0.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def accused(found: dict[str, Any]) -> list[int]:
    """Return the ranks that the report names."""
    if found["hang"] is None and found["culprit"]:
        return [int(re.match(r"rank (\d+) ", found["culprit"])[1])]  # type: ignore[index]
    if found["hang"] is None:
        return [] if found["likely_victim"] else [found["first"]["rank"]]
    ranks: list[int] = found["hang"]["ranks"]
    return ranks if len(ranks) < RANKS else []


def test_the_culprit_is_named(elaunch: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """In 95 of 100; and nobody else, ever."""
    right, wrong, lines = 0, 0, []
    for number in range(TRIALS):
        chance = random.Random(number)
        what = (HANGS + CRASHES)[number % len(HANGS + CRASHES)]
        who, when = chance.randrange(RANKS), chance.randrange(25, 45)
        flags = ["--nproc-per-node=4", f"--run-id=t{number}", "--hang-timeout=4", "-r", "3"]
        done = elaunch.run(["run", *flags, WAITING, what, str(who), str(when), "200"])
        if done.returncode == 0:
            lines.append(f"{number} {what} rank {who}: ended with 0")
            continue
        found = report(elaunch, f"t{number}")
        named = accused(found)
        # A rank that receives waits as those do that wait for it: nobody can say who is right.
        right += named == ([] if what == "receives" else [who])
        wrong += any(rank != who for rank in named)
        told = found["summary"], (found["meanwhile"] or {}).get("collectives")
        lines.append(f"{number} {what} rank {who}: {named} {told}")
    with capsys.disabled():
        print(f"\n{right} right and {wrong} wrong of {TRIALS}", *lines, sep="\n  ")
    assert wrong == 0
    assert right >= 0.95 * TRIALS


def test_no_clean_run_is_called_hung(
    elaunch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations, saves and first steps of one rank last longer than all that was seen before."""
    lines = []
    for number in range(TRIALS):
        chance = random.Random(number)
        what, who = CLEAN[number % len(CLEAN)], chance.randrange(RANKS)
        flags = ["--nproc-per-node=4", "--hang-timeout=auto", "-r", "3", f"--workdir={tmp_path}"]
        words = ["run", *flags, WAITING, what, str(who), str(chance.randrange(100, 180)), "400"]
        done = elaunch.start_command([sys.executable, str(IMPATIENT), *words]).wait(120.0)
        hung = [line for line in agent_lines(done.stderr) if "stacks" in line]
        if done.returncode or hung:
            lines.append(f"{number} {what} rank {who}: {done.returncode} {hung}")
    with capsys.disabled():
        print(f"\n{len(lines)} of {TRIALS} were called hung", *lines, sep="\n  ")
    assert not lines
