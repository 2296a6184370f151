"""Which rank is accused, over many runs of unchanged scripts with one fault each, and with none.

``ELAUNCH_CULPRIT_TRIALS=60`` makes sixty of the common faults, of the unusual ones, and of none.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaunch import text
from tests.integration.jobs import UNUSUAL, WAITING
from tests.integration.watching import Word, agent_lines
from tests.launching import Launcher, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.trial, pytest.mark.timeout(3600)]

TRIALS = int(os.environ.get("ELAUNCH_CULPRIT_TRIALS", "22"))
IMPATIENT = WAITING.with_name("impatient.py")
HANGS = (
    *("before", "after", "stopped", "collective", "size", "type", "order", "gil", "loader"),
    *("ends", "busy", "groups", "ddp", "fsdp", "receives", "inside"),
)
CRASHES = ("segfault", "oom", "raises")
LATER = ("compile", "allocates", "slow", "slow")
DELAYS = (20, 50)
"""Milliseconds that a slow rank takes longer for a step."""
CLEAN = ("plain", "eval", "save", "uneven", "first", "loads", "ddp-clean", "fsdp-clean")
CLEAN_LATER = ("compile-clean",)
RANKS = 4
NAMED = (
    *("spins", "fifo", "half-barrier", "ring", "pipeline", "backward", "monitored"),
    *("async", "objects", "two", "new-group", "nested", "while-evaluating", "raises-stuck"),
    *("second-round", "eight", "skips", "thread", "halves-apart", "times-out-late"),
    *("splits", "mesh", "last-words"),
)
"""Unusual faults whose culprit can be known."""
UNNAMED = (
    *("unsent", "tags", "root", "gather-root", "unused", "destroys", "store", "times-out"),
    *("extra-sum", "extra-end", "monitored-times-out", "all-raise"),
    *("ring-times-out", "leaves", "swallows"),
)
"""Those in which it cannot, or not always: a guilty rank may be named, and no other."""
CLEAN_UNUSUAL = (
    *("pipeline-clean", "ring-clean", "async-clean", "objects-clean", "thread-clean"),
    *("new-group-part", "halves-clean", "exports"),
)
PATIENT = ("times-out", "times-out-late", "ring-times-out", "while-evaluating")
"""Faults that end the round by themselves; --hang-timeout is not to be earlier."""
DEADLINE = 300.0


def report(elaunch: Launcher, run_id: str) -> dict[str, Any]:
    """Return the failure report of a run's last round."""
    paths = (elaunch.state / "elaunch" / "runs" / run_id).glob("failure-*.json")
    found: dict[str, Any] = json.loads(max(paths).read_text())
    return found


def accused(found: dict[str, Any]) -> list[int]:
    """Return the ranks that the report names."""
    if found["culprit"] or found["hang"] is not None:
        ranks: list[int] = found["culprit_ranks"]
        return ranks
    return [] if found["likely_victim"] else [found["first"]["rank"]]


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
        found = re.search(r"attention: (rank (\d+) arrived last in .*)", shown)
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
    if elaunch.start_command(command).wait(DEADLINE).returncode == 0:
        return who, [], "ended with 0"
    return who, *told(report(elaunch, f"t{number}"))


def told(found: dict[str, Any]) -> tuple[list[int], str]:
    """Return the ranks that a report names, and how."""
    meanwhile = (found["meanwhile"] or {}).get("collectives")
    return accused(found), str((found["culprit"], found["summary"], meanwhile, found["code"]))


def unusual(elaunch: Launcher, number: int, what: str) -> tuple[list[int], list[int], str]:
    """Make one unusual fault; return the guilty ranks, those that are named, and how."""
    chance = random.Random(number)
    size = 8 if what == "eight" else RANKS
    who, when = chance.randrange(size), chance.randrange(25, 45)
    seconds = 60 if what in PATIENT else 4
    flags = [f"--nproc-per-node={size}", f"--run-id=u{number}", f"--hang-timeout={seconds}"]
    flags += ["-r", "3", f"--max-restarts={int(what == 'second-round')}"]
    words = [str(UNUSUAL), what, str(who), str(when), str(when if what == "extra-end" else 200)]
    elaunch.start_command([sys.executable, "-m", "elaunch", "run", *flags, *words]).wait(DEADLINE)
    named, how = told(report(elaunch, f"u{number}"))
    others = {"two": [who, (who + 1) % size], "second-round": [(who + 1) % size]}
    others["all-raise"] = list(range(size))
    return sorted(others.get(what, [who])), named, how


class Tally:
    """Counts who is named rightly and wrongly; prints each trial as it ends."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.trials = self.right = 0
        self.wrong: list[str] = []

    def add(self, what: str, guilty: Sequence[int], named: Sequence[int], how: str) -> None:
        """Count one trial; ``guilty`` are to be named, or nobody where there are none."""
        self.trials += 1
        self.right += list(named) == list(guilty)
        rightly, who = (text.ranks(each) if each else "nobody" for each in (guilty, named))
        self.say(f"{what}, {rightly}: {who} {how}")

    def say(self, line: str) -> None:
        """Print a line at once."""
        with self._capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    def accuse(self, what: str) -> None:
        """Count a wrong accusation."""
        self.wrong.append(what)

    def end(self, share: float) -> None:
        """Fail if anybody was named wrongly, or the guilty too rarely."""
        self.say(f"{self.right} right and {len(self.wrong)} wrong of {self.trials}")
        assert not self.wrong
        assert self.right >= share * self.trials


@pytest.mark.executed
def test_the_culprit_is_named(
    elaunch: Launcher, capsys: pytest.CaptureFixture[str], cgroup: str
) -> None:
    """In 95 of 100; and nobody else, ever."""
    tally = Tally(capsys)
    for number, what in enumerate(kinds(HANGS + CRASHES, LATER)):
        if what == "allocates" and not cgroup:
            continue
        who, named, how = trial(elaunch, number, what, cgroup)
        # A rank that receives waits as those do that wait for it: nobody can say who is right.
        tally.add(f"{number} {what}", [] if what == "receives" else [who], named, how)
        if any(rank != who for rank in named):
            tally.accuse(f"{number} {what}")
    tally.end(0.95)


@pytest.mark.executed
def test_the_culprit_of_unusual_faults(
    elaunch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named in 95 of 100 where that can be known, and nobody else, ever."""
    tally = Tally(capsys)
    for number, what in enumerate(kinds(NAMED + UNNAMED, ())):
        guilty, named, how = unusual(elaunch, number, what)
        some = what in UNNAMED and set(named) < set(guilty)
        tally.add(f"{number} {what}", named if some else guilty, named, how)
        if not set(named) <= set(guilty):
            tally.accuse(f"{number} {what}")
    tally.end(0.95)


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
        lines += called_hung(elaunch, [sys.executable, str(IMPATIENT), *words], f"{number} {what}")
    with capsys.disabled():
        print(f"\n{len(lines)} of {TRIALS} were called hung", *lines, sep="\n  ")
    assert not lines


def test_no_clean_run_of_an_unusual_kind_is_called_hung(
    elaunch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor with a limit in seconds that is shorter than the run: sends, threads, parts of ranks."""
    lines = []
    for number, what in enumerate(kinds(CLEAN_UNUSUAL, ())):
        limit = ("4", "auto")[number // len(CLEAN_UNUSUAL) % 2]
        flags = ["--nproc-per-node=4", f"--hang-timeout={limit}", "-r", "3"]
        words = ["run", *flags, UNUSUAL, what, str(number % RANKS), "30", "600"]
        lines += called_hung(elaunch, [sys.executable, str(IMPATIENT), *words], f"{number} {what}")
    with capsys.disabled():
        print(f"\n{len(lines)} of {TRIALS} were called hung", *lines, sep="\n  ")
    assert not lines


def called_hung(elaunch: Launcher, command: Sequence[Word], what: str) -> list[str]:
    """Run a clean job; return a line if it was called hung, or did not end with 0."""
    done = elaunch.start_command(command).wait(DEADLINE)
    hung = [line for line in agent_lines(done.stderr) if "stacks" in line]
    return [f"{what}: {done.returncode} {hung}"] if done.returncode or hung else []
