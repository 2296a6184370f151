"""Real jobs that hang, or seem to: what is declared, what is reported, what follows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import FORK, PROGRESS, both_methods
from tests.integration.watching import agent_lines
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow

SLOW_AGENT = Path(__file__).parent / "jobs" / "slowagent.py"
LINES = """
import ctypes, os, sys, time
rank, number = int(os.environ["RANK"]), int(os.environ["ELAUNCH_ROUND"])

def stuck():
    time.sleep(120)

for step in range(1, 1000):
    print(f"step {step}/1000", flush=True)
    time.sleep(0.05)
    if step == 5 and rank == 1 and number == 0:
        stuck()
    if step == 60:
        break
"""


def job(*words: str, nproc: int = 3, flags: Sequence[str | Path] = ()) -> list[str | Path]:
    """Return the arguments for workers that speak of their progress."""
    return ["run", *FORK, "-r", "3", f"--nproc-per-node={nproc}", *flags, PROGRESS, *words]


def failure(elaunch: Launcher, number: int = 0) -> dict[str, Any]:
    """Return the JSON report of a round of the test's one run."""
    (path,) = elaunch.state.glob(f"elaunch/runs/*/failure-{number}.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def functions(stack: Sequence[str]) -> list[str]:
    """Return the names of a stack's functions."""
    return [frame.rpartition(" in ")[2] for frame in stack]


@pytest.mark.executed
def test_a_rank_that_stays_behind(elaunch: Launcher) -> None:
    """The report names it, shows where it sleeps, and what the others do."""
    done = elaunch.run(job("steps=5", "1:hang", "steps=1000", flags=["--hang-timeout=2"]))
    assert done.returncode == 77
    (seen, *_) = (line for line in agent_lines(done.stderr) if "no progress" in line)
    assert re.search(r"rank 1 has made no progress for [\d.]+ s \(step 5; the others are", seen)
    text = done.stderr
    assert "rank 1: step 5, silent for 2" in text
    line = next(
        n
        for n, code in enumerate(PROGRESS.read_text().splitlines(), 1)
        if "time.sleep(120)" in code
    )
    assert re.search(rf"  rank 1:\n    File \"{PROGRESS}\", line {line} in hang\n", text)
    assert re.search(r"  ranks 0, 2:\n", text)
    found = failure(elaunch)
    assert found["exit_code"] == 77 and found["summary"].startswith("rank 1 has made no progress")
    hang = found["hang"]
    assert (hang["ranks"], hang["source"]) == ([1], "script")
    stacks = {tuple(group["ranks"]): functions(group["main"]) for group in hang["stacks"]}
    assert stacks[1,] == ["hang", "main", "<module>"]
    assert found["first"]["rank"] == 1 and found["first"]["stopped_by_us"]


def test_all_ranks_stand_still(elaunch: Launcher) -> None:
    """Nobody is accused; who has the fewest steps would be."""
    done = elaunch.run(job("steps=5", "hang", flags=["--hang-timeout=2"]))
    assert done.returncode == 77
    assert re.search(r"no rank has made progress for [\d.]+ s \(all at step 5\)", done.stderr)
    assert re.search(r"  ranks 0-2:\n    File .* in hang\n", done.stderr)


def test_who_is_waited_for_is_named(elaunch: Launcher) -> None:
    """The others stand still as well, one step further."""
    words = ("steps=5", "2:hang", "steps=1", "note=barrier #6", "hang")
    done = elaunch.run(job(*words, flags=["--hang-timeout=2"]))
    assert done.returncode == 77
    assert "(step 5; the others are at step 6)" in done.stderr
    assert re.search(r"rank 0: step 6, silent for [\d.]+ s, last call barrier #6", done.stderr)
    assert failure(elaunch)["hang"]["ranks"] == [2]


def test_c_code_that_keeps_pythons_lock(elaunch: Launcher) -> None:
    """Neither the page nor the stacks need it."""
    done = elaunch.run(job("steps=5", "1:gil", "steps=1000", flags=["--hang-timeout=2"]))
    assert done.returncode == 77
    hang = failure(elaunch)["hang"]
    assert hang["ranks"] == [1] and hang["no_stacks"] == []
    (odd,) = (group for group in hang["stacks"] if group["ranks"] == [1])
    assert functions(odd["main"])[0] == "gil"


def test_a_section_may_last_longer_than_the_limit(elaunch: Launcher, tmp_path: Path) -> None:
    """Rank 0 evaluates, the others wait for it: no hang."""
    words = ("steps=5", "0:enter=eval,60", "0:sleep=4", "0:leave", f"meet={tmp_path}", "steps=3")
    done = elaunch.run(job(*words, flags=["--hang-timeout=1"]))
    assert (done.returncode, agent_lines(done.stderr)[1:]) == (0, [])


@pytest.mark.trial
def test_a_section_may_not_last_longer_than_its_own_timeout(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """Long before the limit."""
    words = ("steps=5", "0:enter=eval,1", "0:hang", f"meet={tmp_path}")
    done = elaunch.run(job(*words, flags=["--hang-timeout=100"]))
    assert done.returncode == 77
    assert "rank 0 has not left section eval in time (step 5" in done.stderr
    assert "rank 0: step 5, in section eval" in done.stderr


@pytest.mark.executed
def test_lines_of_the_log(elaunch: Launcher, tmp_path: Path) -> None:
    """An ordinary script; after the restart it goes on and ends well."""
    script = tmp_path / "lines.py"
    script.write_text(LINES)
    flags = ["--hang-timeout=2", r"--progress-regex=step (\d+)/", "--max-restarts=1"]
    words = ["run", *FORK, "-r", "3", "--nproc-per-node=2", "--run-id=lines", *flags, script]
    done = elaunch.run(words)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr
    assert "no line matches --progress-regex" in done.stderr
    hang = failure(elaunch)["hang"]
    assert (hang["ranks"], hang["source"]) == ([1], "log lines")
    (odd,) = (group for group in hang["stacks"] if group["ranks"] == [1])
    assert functions(odd["main"]) == ["stuck", "<module>"]
    shown = elaunch.run(["status", "lines", "--json"])
    record = json.loads(shown.stdout)
    assert (record["state"], record["restarts"]["used"]) == ("COMPLETED", 1)
    assert record["progress"]["source"] == "log lines"
    assert record["history"][1]["recovery_s"] > 0
    assert "60 steps (by log lines)" in elaunch.run(["status", "lines"]).stdout


def test_a_pattern_that_takes_for_ever_stops_nobody(elaunch: Launcher, tmp_path: Path) -> None:
    """The agent goes on, and the training, whose lines may all be progress."""
    script = tmp_path / "lines.py"
    hostile = LINES.replace('f"step {step}/1000"', '"a" * 50 + "!"')
    script.write_text(hostile.replace("rank == 1 and ", "False and "))
    flags = ["--hang-timeout=10", "--progress-regex=(a+)+$", "--max-restarts=0"]
    done = elaunch.run(["run", *FORK, "-r", "3", "--nproc-per-node=2", *flags, script])
    assert done.returncode == 0, done.stderr


def early(elaunch: Launcher, *words: str) -> subprocess.CompletedProcess[str]:
    """Run four ranks with ``auto``; what it has not learned takes 5 s."""
    flags = ["--hang-timeout=auto", "--max-restarts=0", "--run-id=early", "-r", "3"]
    flags += ["--progress-regex=step (\\d+)"] if words[-1] == "lines" else []
    jobs = PROGRESS.parent
    command = ["run", "--nproc-per-node=4", *flags, str(jobs / "early.py"), *words]
    return elaunch.start_command([sys.executable, str(jobs / "impatient.py"), *command]).wait()


@pytest.mark.parametrize(
    ("before", "shows"),
    [
        ("0", "nothing"),
        pytest.param("3", "nothing", marks=pytest.mark.trial),
        ("41", "nothing"),
        pytest.param("3", "steps", marks=pytest.mark.trial),
        ("3", "lines"),
    ],
)
def test_auto_judges_a_rank_that_stops_early(elaunch: Launcher, before: str, shows: str) -> None:
    """Others wait for it, whatever has been learned, and whatever the script shows."""
    done = early(elaunch, "sleep", before, shows)
    assert done.returncode == 77, done.stderr
    what = "init_process_group" if before == "0" else f"all_?reduce #{before}"
    hang = failure(elaunch)["hang"]
    assert hang["ranks"] == [2]
    assert re.search(
        rf"rank 2 has not entered {what}; ranks 0, 1, 3 have been waiting", done.stderr
    )


@pytest.mark.parametrize(
    ("how", "before", "shows"),
    [
        ("spin", "0", "nothing"),
        pytest.param("spin", "3", "lines", marks=pytest.mark.trial),
        ("section", "3", "steps"),
    ],
)
def test_auto_waits_for_a_rank_that_is_busy(
    elaunch: Launcher, how: str, before: str, shows: str
) -> None:
    """With a computation, or in a section, for three times as long as for one that stands still."""
    done = early(elaunch, how, before, shows)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [pytest.param(("busy=6",), marks=pytest.mark.trial), ("sleep=6",)],
    ids=["computes", "waits"],
)
def test_a_script_that_shows_nothing_is_not_killed(elaunch: Launcher, words: Sequence[str]) -> None:
    """For many times the limit; what to do is said once on its node."""
    done = elaunch.run(job("silent", *words, flags=["--hang-timeout=0.2"]))
    assert done.returncode == 0, done.stderr
    (line,) = agent_lines(done.stderr)[1:]
    assert re.search(r"--hang-timeout 0\.2 watches nothing so far: in the first [\d.]+ s", line)


@both_methods
def test_workers_without_a_word_of_elaunch(
    elaunch: Launcher, tmp_path: Path, method: Sequence[str]
) -> None:
    """Their lines are watched; the stacks are there as far as something can take them."""
    script = tmp_path / "lines.py"
    script.write_text(LINES.replace("rank == 1 and ", ""))
    flags = ["--hang-timeout=1", r"--progress-regex=step (\d+)/", "-r", "3", "--nproc-per-node=2"]
    done = elaunch.run(["run", *method, *flags, script])
    assert done.returncode == 77
    if method is FORK:
        assert re.search(r"  ranks 0, 1:\n    File .* in stuck\n", done.stderr)
    else:
        # By py-spy, where that may look into other processes.
        assert re.search(r"No stacks of ranks 0, 1: |  ranks 0, 1:\n    File ", done.stderr)


def test_without_the_flag_nothing_is_watched(elaunch: Launcher) -> None:
    """Progress is shown all the same."""
    running = elaunch.start(
        job("steps=3", "status=warm", "progress=0.5", "hang", nproc=1, flags=["--run-id=off"])
    )

    def shown() -> str:
        return elaunch.run(["status", "off"]).stdout

    wait_until(lambda: "3 steps, 50 % (by the script)" in shown(), what="progress in the status")
    assert re.search(r"^ +status +warm$", shown(), re.M) and "hang timeout" not in shown()
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


def test_the_limit_is_shown(elaunch: Launcher) -> None:
    """And the source, before there is any progress."""
    flags = ["--run-id=on", "--hang-timeout=600"]
    running = elaunch.start(job("silent", "say=up", "hang", nproc=1, flags=flags))
    wait_until(lambda: "RUNNING" in elaunch.run(["status", "on"]).stdout)
    shown = elaunch.run(["status", "on"]).stdout
    assert "none is known: the script has reported nothing yet" in shown
    assert re.search(r"^ +hang timeout +10m", shown, re.M), shown
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


def test_an_agent_that_was_frozen_declares_nothing(elaunch: Launcher, tmp_path: Path) -> None:
    """Its workers went on, and one of them made a long pause just then."""
    flags = ["--hang-timeout=3"]
    words = ("steps=5", "say=up", f"meet={tmp_path}", "sleep=2.5", "steps=40")
    running = elaunch.start(["run", *FORK, "--nproc-per-node=2", *flags, PROGRESS, *words])
    running.wait_for_line("up rank=0")
    running.wait_for_line("up rank=1")
    os.kill(running.pid, signal.SIGSTOP)
    # Nothing to wait for: time has to pass in which nobody looks.
    signal.sigtimedwait([], 8.0)
    os.kill(running.pid, signal.SIGCONT)
    done = running.wait()
    assert (done.returncode, agent_lines(done.stderr)[1:]) == (0, [])


def test_a_worker_that_is_stopped(elaunch: Launcher) -> None:
    """It hangs by all means; the report says what it is."""
    flags = ["--hang-timeout=1", "--sibling-grace=1"]
    done = elaunch.run(job("steps=5", "1:stop", "steps=1", "hang", flags=flags))
    assert done.returncode == 77
    assert "No stacks of rank 1: the process is stopped by a signal (SIGSTOP)" in done.stderr


def test_a_run_that_is_over_by_a_hang_under_another_launcher(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """The launcher's own error file has it."""
    path = tmp_path / "error.json"
    done = elaunch.run(
        job("steps=5", "hang", nproc=1, flags=["--hang-timeout=1"]),
        env={"TORCHELASTIC_ERROR_FILE": str(path)},
    )
    assert done.returncode == 77
    told = json.loads(path.read_text())["message"]
    assert told["message"].startswith("rank 0 has made no progress") and told["errorCode"] == 77
    assert " in hang" in told["extraInfo"]["py_callstack"]


SAVES = """
import elaunch
with elaunch.init(announce=False) as ctx:
    for step in range(10):
        ctx.heartbeat()
    ctx.checkpoint.save({"x": 1}, 10, block=False)
    ctx.checkpoint.wait()
"""


def test_a_wait_for_the_last_save_is_no_hang(elaunch: Launcher, tmp_path: Path) -> None:
    """It has a deadline of its own, and may last several times longer than the limit.

    The ranks ask each other every 5 s meanwhile, so that none is silent for longer.
    """
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    held = [sys.executable, SLOW_AGENT, elaunch.directory, "write=10"]
    flags = ["--run-id=saves", "--hang-timeout=1", f"--checkpoint-dir={tmp_path / 'ck'}"]
    running = elaunch.start_command([*held, "run", *flags, script])

    def has_waited() -> bool:
        shown = json.loads(elaunch.run(["status", "saves", "--json"]).stdout)
        return any((worker["silent_s"] or 0.0) > 3.0 for worker in shown["progress"]["workers"])

    wait_until((elaunch.directory / "reached").exists, 60.0)
    wait_until(has_waited, 60.0)
    (elaunch.directory / "go").touch()
    done = running.wait()
    assert done.returncode == 0, done.stderr


CHECKPOINTS_ONLY = """
import time, torch, torch.distributed as dist, elaunch
with elaunch.init(announce=False) as ctx:
    GROUP
    ctx.checkpoint.load({"x": torch.zeros(1)})
    for step in range(1, 13):
        STEP
        time.sleep(0.5)
        if step in (1, 2, 3):
            ctx.checkpoint.save({"x": torch.ones(1)}, step, block=False)
"""


@pytest.mark.parametrize("collectives", [True, False])
def test_a_script_that_only_saves_is_not_judged_by_that(
    elaunch: Launcher, tmp_path: Path, collectives: bool
) -> None:
    """Between two saves it may train for hours; what its collectives show counts, if it has any."""
    group, step = ('dist.init_process_group("gloo")', "dist.all_reduce(torch.ones(1))")
    script = tmp_path / "saves.py"
    text = CHECKPOINTS_ONLY.replace("GROUP", group if collectives else "pass")
    script.write_text(text.replace("STEP", step if collectives else "pass"))
    flags = ["--hang-timeout=2", f"--checkpoint-dir={tmp_path / 'ck'}"]
    done = elaunch.run(["run", f"--nproc-per-node={1 + collectives}", *flags, script])
    assert done.returncode == 0, done.stderr
    assert "no progress" not in done.stderr
