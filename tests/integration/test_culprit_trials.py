"""Who is accused, over many runs of unchanged scripts with one fault each, and with none.

``ELAUNCH_CULPRIT_TRIALS=60`` makes sixty of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import WAITING
from tests.integration.watching import agent_lines
from tests.launching import Launcher, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.trial, pytest.mark.timeout(3600)]

TRIALS = int(os.environ.get("ELAUNCH_CULPRIT_TRIALS", "22"))
IMPATIENT = WAITING.with_name("impatient.py")
HANGS = (
    *("before", "after", "stopped", "collective", "size", "type", "order", "gil", "loader"),
    *("ends", "busy", "groups", "ddp", "fsdp", "receives"),
)
CRASHES = ("segfault", "oom", "raises")
LATER = ("compile", "allocates", "slow", "slow")
DELAYS = (20, 50)
"""Milliseconds that a slow rank takes longer for a step."""
CLEAN = ("plain", "eval", "save", "uneven", "first", "loads", "ddp-clean", "fsdp-clean")
CLEAN_LATER = ("compile-clean",)
RANKS = 4


def report(elaunch: Launcher, run_id: str) -> dict[str, Any]:
    """Return the failure report of a run's only round."""
    path = elaunch.state / "elaunch" / "runs" / run_id / "failure-0.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def accused(found: dict[str, Any]) -> list[int]:
    """Return the ranks that the report names."""
    if found["hang"] is None and found["culprit"]:
        if re.match(r"rank \d+ has entered [^,]*, rank \d+ has entered [^,]*:", found["culprit"]):
            return []  # one against one
        return [int(re.match(r"rank (\d+) ", found["culprit"])[1])]  # type: ignore[index]
    if found["hang"] is None:
        return [] if found["likely_victim"] else [found["first"]["rank"]]
    ranks: list[int] = found["hang"]["ranks"]
    return ranks if len(ranks) < RANKS else []


def kinds(first: tuple[str, ...], later: tuple[str, ...]) -> list[str]:
    """Return the kind of each trial: the ``later`` ones come last, once each."""
    return [*(first[n % len(first)] for n in range(TRIALS - len(later))), *later]


def slowest(elaunch: Launcher, flags: list[str], who: int, delay: int) -> tuple[list[int], str]:
    """Return the rank that is named as the slow one, and the lines of the agent about a hang."""
    words = ["run", *flags, WAITING, "slow", str(who), str(delay), "5000"]
    job, named = elaunch.start(words), ""

    def is_named() -> bool:
        nonlocal named
        shown = elaunch.run(["status", flags[1].partition("=")[2]]).stdout
        found = re.search(r"attention: (rank (\d+) is last in .*)", shown)
        named = found[1] if found else ""
        return bool(named)

    with contextlib.suppress(AssertionError):
        wait_until(is_named, 60.0)
    job.send_signal(signal.SIGTERM)
    hung = [line for line in agent_lines(job.wait().stderr) if "stacks" in line]
    ranks = [int(named.split()[1])] if named else []
    return ranks, "; ".join([named, *hung])


def trial(elaunch: Launcher, number: int, what: str, cgroup: str) -> tuple[int, list[int], str]:
    """Make one fault; return the guilty rank, the ranks that are named, and how."""
    chance = random.Random(number)
    who, when = chance.randrange(RANKS), chance.randrange(25, 45)
    flags = ["--nproc-per-node=4", f"--run-id=t{number}", "--hang-timeout=4", "-r", "3"]
    if what == "slow":
        return who, *slowest(elaunch, flags, who, DELAYS[number % 2])
    if what == "allocates":
        flags[2] = "--hang-timeout=60"  # it takes its time
    words = ["run", *flags, str(WAITING), what, str(who), str(when), "200"]
    command = [sys.executable, "-m", "elaunch", *words]
    if what == "allocates":
        command = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *command]
    if elaunch.start_command(command).wait(120.0).returncode == 0:
        return who, [], "ended with 0"
    found = report(elaunch, f"t{number}")
    told = found["summary"], (found["meanwhile"] or {}).get("collectives"), found["code"]
    return who, accused(found), str(told)


@pytest.mark.executed
def test_the_culprit_is_named(
    elaunch: Launcher, capsys: pytest.CaptureFixture[str], cgroup: str
) -> None:
    """In 95 of 100; and nobody else, ever."""
    right, wrong, lines = 0, 0, []
    for number, what in enumerate(kinds(HANGS + CRASHES, LATER)):
        if what == "allocates" and not cgroup:
            continue
        who, named, how = trial(elaunch, number, what, cgroup)
        # A rank that receives waits as those do that wait for it: nobody can say who is right.
        right += named == ([] if what == "receives" else [who])
        wrong += any(rank != who for rank in named)
        lines.append(f"{number} {what} rank {who}: {named} {how}")
    with capsys.disabled():
        print(f"\n{right} right and {wrong} wrong of {len(lines)}", *lines, sep="\n  ")
    assert wrong == 0
    assert right >= 0.95 * len(lines)


def test_no_clean_run_is_called_hung(
    elaunch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations, saves and first steps of one rank last longer than all that was seen before."""
    lines = []
    for number, what in enumerate(kinds(CLEAN, CLEAN_LATER)):
        chance = random.Random(number)
        who = chance.randrange(RANKS)
        flags = ["--nproc-per-node=4", "--hang-timeout=auto", "-r", "3", f"--workdir={tmp_path}"]
        words = ["run", *flags, WAITING, what, str(who), str(chance.randrange(100, 180)), "400"]
        done = elaunch.start_command([sys.executable, str(IMPATIENT), *words]).wait(120.0)
        hung = [line for line in agent_lines(done.stderr) if "stacks" in line]
        if done.returncode or hung:
            lines.append(f"{number} {what} rank {who}: {done.returncode} {hung}")
    with capsys.disabled():
        print(f"\n{len(lines)} of {TRIALS} were called hung", *lines, sep="\n  ")
    assert not lines
