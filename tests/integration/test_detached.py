"""``elaunch run --detach``, and what finds the run by its name: status, logs, stop."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launcher, wait_until

detaches = pytest.mark.executed
"""The agent in the background is a fork of the command."""

SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
os.write(1, b"out \\xff of " + rank.encode() + b"\\n")
print("err of", rank, file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print("last of", rank, end="", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str | Path]:
    """Return a script that runs until the file ``go`` is there."""
    path = tmp_path / "s.py"
    path.write_text(SCRIPT)
    return [path, tmp_path / "go"]


def status(elaunch: Launcher, run: str) -> dict[str, Any]:
    """Return what is known of a run."""
    found: dict[str, Any] = json.loads(elaunch.run(["status", run, "--json"]).stdout)
    return found


def is_up(elaunch: Launcher, run: str, ranks: int) -> None:
    """Wait until every rank has written its first lines."""

    shown = elaunch.start(["logs", run, "--follow"])
    lines = re.compile(rb"(?:out|err) .*of \d")
    all_of_them = "the first lines of all ranks"
    wait_until(lambda: len(lines.findall(shown.output_bytes())) == 2 * ranks, 90, all_of_them)
    shown.end()


@detaches
@pytest.mark.slow
def test_it_outlives_its_shell_and_is_found_by_name(
    elaunch: Launcher, tmp_path: Path, script: list[str | Path]
) -> None:
    """The run id on stdout; a hang-up of the shell's processes does not reach the agent."""
    words = "run -d --rdzv-id back --nproc-per-node 2 --start-method spawn"
    line = f"{sys.executable} -m elaunch {words} {script[0]} {script[1]}; echo ended; kill -HUP 0"
    shell = elaunch.start_command(["setsid", "--wait", "bash", "-c", line]).wait(60)
    assert shell.stdout == "back\nended\n"
    assert "elaunch stop back" in shell.stderr
    is_up(elaunch, "back", 2)
    record = status(elaunch, "back")
    assert record["state"] == "RUNNING"
    agent = record["agent"]["pid"]
    assert os.getsid(agent) == agent
    assert os.readlink(f"/proc/{agent}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{agent}/fd/2") == record["dir"] + "/console.log"
    following = elaunch.start(["logs", "-f", "back"])
    following.wait_for_line("err of 1")
    (tmp_path / "go").touch()
    shown = following.wait(60)
    assert shown.returncode == 0
    assert {"last of 0", "last of 1"} <= set(re.findall(r"last of \d", shown.stdout))
    assert status(elaunch, "back")["state"] == "COMPLETED"


@detaches
@pytest.mark.slow
def test_stop_ends_a_run_by_its_name(elaunch: Launcher, script: list[str | Path]) -> None:
    """It waits for the end; of a run that is over it says so; of two runs of an id, which."""
    words = ["run", "-d", "--rdzv-id", "back", "--start-method", "spawn", *script]
    assert elaunch.run(words).stdout == "back\n"
    is_up(elaunch, "back", 1)
    stopped = elaunch.run(["stop", "back"])
    assert (stopped.returncode, stopped.stdout) == (0, "back: STOPPED\n")
    assert status(elaunch, "back")["exit_code"] == 143
    again = elaunch.run(["stop", "back"])
    assert again.returncode == 2 and "RUN back does not run" in again.stderr
    second = elaunch.run(words)
    assert (second.stdout, "elaunch stop back.2" in second.stderr) == ("back\n", True)
    assert elaunch.run(["stop", "back.2"]).stdout == "back.2: STOPPED\n"


@pytest.mark.slow
def test_the_logs_of_one_rank_are_its_bytes(
    elaunch: Launcher, tmp_path: Path, script: list[str | Path]
) -> None:
    """Both streams, whatever the bytes are; the directories by rank; what is not there is named."""
    (tmp_path / "go").touch()
    words = [
        "run",
        "--rdzv-id",
        "here",
        "--nproc-per-node",
        "2",
        "--start-method",
        "spawn",
        *script,
    ]
    assert elaunch.run(words).returncode == 0
    one = elaunch.start(["logs", "here", "--rank", "1"])
    assert one.wait().returncode == 0
    assert one.output_bytes() == b"out \xff of 1\nlast of 1"
    assert one.output_bytes("stderr") == b"err of 1\n"
    every = elaunch.start(["logs", "here", "-f"])
    assert every.wait().returncode == 0
    came = every.output_bytes().splitlines()
    for rank in (b"0", b"1"):
        own = [line for line in came if line.startswith(b"[rank %s]: " % rank)]
        assert own == [
            b"[rank %s]: out \xff of %s" % (rank, rank),
            b"[rank %s]: last of %s" % (rank, rank),
        ]
    assert len(came) == 4
    record = status(elaunch, "here")
    shown = elaunch.run(["logs", "here", "--dirs", "--rank", "1"]).stdout
    assert shown == f"rank 1  round 0  {record['log_dir']}/attempt_0/1\n"
    for flags, message in (
        (["--rank", "7"], "--rank 7 of run here is not on this node; ranks 0 to 1 are"),
        (["--round", "3"], "--round 3: run here has round 0 only"),
        (["--dirs", "-f"], "leave out --follow"),
    ):
        wrong = elaunch.run(["logs", "here", *flags])
        assert wrong.returncode == 2 and message in wrong.stderr


@detaches
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["--max-restarts", "x"], {}, "--max-restarts: 'x' is not a whole number"),
        (["--dry-run"], {}, "--detach has no effect with --dry-run"),
        (["--checkpoint-memory", "900TiB"], {}, "--checkpoint-memory"),
        ([], {"ELAUNCH_RUN_ID": "outer"}, "--detach: this is a worker of run outer"),
    ],
)
def test_what_is_wrong_at_the_start_is_told_in_the_foreground(
    elaunch: Launcher,
    script: list[str | Path],
    words: list[str],
    environ: dict[str, str],
    message: str,
) -> None:
    """With its exit code, also where the agent itself finds it."""
    done = elaunch.start(["run", "-d", *words, *script], env=environ).wait()
    assert (done.returncode, done.stdout) == (2, ""), done
    assert message in done.stderr
