"""Where the output of workers goes, and what is said at the end, as the flags ask for it."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest

from tests.integration.jobs import FORK
from tests.integration.watching import act, wait_for_workers
from tests.launching import Launcher, without_waits

pytestmark = pytest.mark.slow
SPEAK = ("say=out", "err=oops")


def logs(root: Path, number: int = 0) -> dict[tuple[str, str], str]:
    """Return the log files of an attempt below ``root``: (local rank, file) → content."""
    files = root.glob(f"*/attempt_{number}/*/*.log")
    return {(path.parent.name, path.name): path.read_text() for path in files}


def own_lines(text: str) -> list[str]:
    """Return the lines that are not the agent's, sorted."""
    return sorted(line for line in text.splitlines() if not line.startswith("elaunch "))


def out(rank: int) -> re.Pattern[str]:
    """Return what matches the line that a worker says on stdout."""
    return re.compile(rf"out rank={rank} round=0 pid=\d+")


def test_by_default_all_is_shown_and_kept(elaunch: Launcher) -> None:
    """Unprefixed on the console; the files are in the run directory."""
    done = elaunch.run(act(FORK, *SPEAK))
    for rank, line in enumerate(own_lines(done.stdout)):
        assert out(rank).fullmatch(line)
    assert own_lines(done.stderr) == ["oops", "oops"]
    (run_dir,) = elaunch.state.glob("elaunch/runs/*")
    assert len(list((run_dir / "logs").glob("attempt_0/*/*.log"))) == 4


def test_redirected_streams_are_in_the_files_only(elaunch: Launcher, tmp_path: Path) -> None:
    """-r 3; the layout is torchrun's."""
    flags = ["-r", "3", f"--log-dir={tmp_path}/logs", "--rdzv-id", "a job/1"]
    done = elaunch.run(act(FORK, *SPEAK, flags=flags))
    assert (done.stdout, own_lines(done.stderr)) == ("", [])
    found = logs(tmp_path / "logs")
    assert sorted(found) == [
        (rank, f"{name}.log") for rank in "01" for name in ("stderr", "stdout")
    ]
    for rank in (0, 1):
        assert out(rank).fullmatch(found[str(rank), "stdout.log"].rstrip("\n"))
        assert found[str(rank), "stderr.log"] == "oops\n"
    (base,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"a\S*job\S*1_\w{8}", base.name)


def test_a_template_for_the_prefix(elaunch: Launcher) -> None:
    """torchrun's flag wins over its variable."""
    name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    flags = ["--tee=2", "--log-line-prefix-template", "${hostname}:${rank}: "]
    named = elaunch.run(act(FORK, *SPEAK, flags=flags), env={name: "<${role_name}> "})
    host = socket.gethostname()
    assert own_lines(named.stderr) == [f"{host}:0: oops", f"{host}:1: oops"]
    assert all(out(rank).fullmatch(line) for rank, line in enumerate(own_lines(named.stdout)))


def test_no_files_at_all(elaunch: Launcher, tmp_path: Path) -> None:
    """--log-dir /dev/null: what would only be in a file is shown instead; errors still report."""
    words = [*SPEAK, f"meet={tmp_path}", "1:exit=3", "wait"]
    done = elaunch.run(act(FORK, *words, flags=["--log-dir=/dev/null"]))
    assert done.returncode == 3
    assert len([line for line in done.stdout.splitlines() if "out rank=" in line]) == 2
    assert not list(elaunch.directory.rglob("*.log"))
    done = elaunch.run(act(FORK, *SPEAK, flags=["--log-dir=/dev/null", "-r", "3"]))
    assert len([line for line in done.stdout.splitlines() if "out rank=" in line]) == 2


def test_nothing_is_left_in_the_temporary_directory(elaunch: Launcher, tmp_path: Path) -> None:
    """After a run that succeeded, and after one that failed and was restarted."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for words, code in ((SPEAK, 0), ((*SPEAK, "1:exit=3", "sleep=0.2"), 3)):
        flags = ["--max-restarts=1", "-t", "3"]
        done = elaunch.run(act(FORK, *words, flags=flags), env={"TMPDIR": str(temporary)})
        assert done.returncode == code
        assert os.listdir(temporary) == []


def test_a_failure_is_reported_last_with_its_cause_first(elaunch: Launcher) -> None:
    """Rank, traceback, log, then torchrun's table if asked for, then the result."""
    words = ["say=up", "1:raise=the data are gone", "wait"]
    done = elaunch.run(act(FORK, *words, flags=["--torchrun-report"]))
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("rank 1 (local_rank 1, pid") :]
    lines = report.rstrip("\n").split("\n")
    assert re.match(r"rank 1 \(local_rank 1, pid \d+\) on host \S+ exited with code 1", lines[0])
    assert "RuntimeError: the data are gone" in report[: report.index("=====")]
    assert lines[-2] == "=" * 60 and " result: FAILED after " in lines[-1]
    table = lines[lines.index("=" * 60) :]
    assert table[1].endswith("act.py FAILED")
    root = table.index("Root Cause (first observed failure):")
    rows = dict(re.findall(r"^  (\w+) *: (.*)$", "\n".join(table[root:]), re.M))
    assert rows["rank"] == "1 (local_rank: 1)"
    assert rows["exitcode"].startswith("1 (pid: ")
    assert "torch.distributed.elastic.multiprocessing.errors.ChildFailedError" in done.stderr


FOUR_LINES = """\
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1: raise ValueError("my own bug")
dist.barrier()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.trial), 4])
def test_a_script_of_four_lines_fails(elaunch: Launcher, tmp_path: Path, nproc: int) -> None:
    """Its own traceback is shown once, nobody else's, and no table."""
    script = tmp_path / "four.py"
    script.write_text(FOUR_LINES)
    done = elaunch.run(["run", f"--nproc-per-node={nproc}", "--run-id=four", str(script)])
    assert done.returncode == 1
    lines = without_waits(done.stderr).splitlines()
    assert len(lines) <= 20, done.stderr
    assert done.stderr.count("Traceback (most recent") == 1, done.stderr
    assert "  ValueError: my own bug" in lines
    assert "Connection closed by peer" not in done.stderr
    logs = elaunch.run(["logs", "four", "--rank", "1"])
    assert logs.stderr.count("ValueError: my own bug") == 1


SLOW_END = """\
import atexit, os, signal, sys, threading, torch.distributed as dist
def end():
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        signal.pause()
atexit.register(end)
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    if "own" in sys.argv: signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    if "thread" in sys.argv:
        threading.Thread(target=threading.Event().wait).start()
        dist.destroy_process_group()
    raise ValueError("my own bug")
dist.barrier()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "nproc"),
    [
        ("signalled", 2),
        ("own", 4),
        ("thread", 2),
        *(
            pytest.param(*row, marks=pytest.mark.trial)
            for row in (("signalled", 4), ("own", 2), ("thread", 4))
        ),
    ],
)
def test_the_rank_that_raised_ends_last(
    elaunch: Launcher, tmp_path: Path, how: str, nproc: int
) -> None:
    """The report is about it; of those that have lost it nothing but their ends is shown."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_END)
    words = [f"--nproc-per-node={nproc}", "--run-id=slow", "--torchrun-report", str(script), how]
    done = elaunch.run(["run", *words])
    assert done.returncode == 1
    printed, _, table = without_waits(done.stderr).partition("\ntorch.distributed.elastic.")
    assert len(printed.splitlines()) <= 19, done.stderr
    assert printed.count("Traceback (most recent") == 1, done.stderr
    assert "  ValueError: my own bug" in printed.splitlines()
    assert "Connection closed by peer" not in printed
    assert "rank      : 1 (" in table.partition("Root Cause")[2], done.stderr
    assert "my own bug" in table.partition("Root Cause")[2], done.stderr
    shown = elaunch.run(["why", "slow"]).stdout
    assert shown.count("Traceback (most recent") == 1, shown


def test_an_error_of_an_atexit_callback_is_not_the_cause(elaunch: Launcher, tmp_path: Path) -> None:
    """The report is about what has ended the script before."""
    script = tmp_path / "callback.py"
    script.write_text(
        "import atexit\natexit.register(lambda: {}['lost'])\nraise ValueError('my own bug')\n"
    )
    done = elaunch.run(["run", str(script)])
    assert done.returncode == 1
    assert "rank 0 failed at callback.py:3: ValueError: my own bug\n" in done.stderr
    assert "KeyError" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "words", "shown"),
    [
        (["-t", "3"], ["1:raise=boom", "wait"], 2),
        (["--log-dir=/dev/null"], ["1:raise=boom", "wait"], 2),
        ([], ["err=Traceback (most recent call last):"], 2),
        ([], ["err=Traceback (most recent call last):", "err=going on", "sleep=1.1", "err=on"], 2),
    ],
)
def test_tracebacks_that_are_shown_after_all(
    elaunch: Launcher, flags: list[str], words: list[str], shown: int
) -> None:
    """Of streams that are tee'd, that no file has, and of workers that do not fail."""
    done = elaunch.run(act(FORK, *words, flags=flags))
    assert done.stderr.count("Traceback (most recent call last):") == shown, done.stderr
    assert "Tracebacks of" not in done.stderr


def test_a_restarted_failure_is_reported_without_the_table(elaunch: Launcher) -> None:
    """Tools that look for the table find it when the job has failed, and only then."""
    words = ["r0:raise=first blood"]
    done = elaunch.run(act(FORK, *words, flags=["--max-restarts=1", "--torchrun-report"]))
    assert done.returncode == 0
    assert "RuntimeError: first blood" in done.stderr
    assert "=====" not in done.stderr


def test_the_launchers_own_error_file(elaunch: Launcher, tmp_path: Path) -> None:
    """What started elaunch reads it; each worker still has one of its own."""
    path = tmp_path / "reply.json"
    words = ["show=TORCHELASTIC_ERROR_FILE", "1:raise=out of luck", "wait"]
    done = elaunch.run(act(FORK, *words), env={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert done.returncode == 1
    assert str(path) not in done.stdout
    reply = json.loads(path.read_text())
    assert "out of luck" in reply["message"]["message"]
    assert reply["message"]["errorCode"] == 1


def test_error_files_are_absolute_and_in_place(elaunch: Launcher, tmp_path: Path) -> None:
    """Also with a relative --log-dir and with no files at all."""
    for flags in (["--log-dir=logs"], ["--log-dir=/dev/null"], []):
        done = elaunch.run(act(FORK, "show=TORCHELASTIC_ERROR_FILE", "error={}", flags=flags))
        assert done.returncode == 0, done.stderr
        paths = [Path(line.partition("=")[2]) for line in own_lines(done.stdout)]
        assert [path.name for path in paths] == ["error.json", "error.json"]
        assert all(path.is_absolute() and path.read_text() == "{}" for path in paths)


def test_two_runs_of_one_name_at_once(elaunch: Launcher, tmp_path: Path) -> None:
    """Each has its logs, its record and its store; neither disturbs the other."""
    flags = ["--rdzv-id=same", f"--log-dir={tmp_path}/logs"]
    words = ["say=up", f"until={tmp_path}/go", "show=MASTER_PORT,TORCHELASTIC_RUN_ID"]
    runs = [elaunch.start(act(FORK, *words, flags=flags)) for _ in range(2)]
    for running in runs:
        wait_for_workers(running)
    (tmp_path / "go").touch()
    ports = []
    for running in runs:
        done = running.wait()
        assert done.returncode == 0
        assert done.stdout.count("TORCHELASTIC_RUN_ID=same") == 2
        ports.append(set(re.findall(r"MASTER_PORT=(\d+)", done.stdout)))
    assert [len(each) for each in ports] == [1, 1] and ports[0] != ports[1]
    assert len(list((tmp_path / "logs").glob("same_*/attempt_0"))) == 2
    records = [json.loads(p.read_text()) for p in elaunch.state.glob("elaunch/runs/*/state.json")]
    assert sorted(Path(record["dir"]).name for record in records) == ["same", "same.2"]
    assert {(record["run_id"], record["state"]) for record in records} == {("same", "COMPLETED")}


def test_a_name_can_be_used_again(elaunch: Launcher) -> None:
    """As a requeued job does."""
    for _ in range(2):
        assert elaunch.run(act(FORK, "exit=0", flags=["--rdzv-id=again"])).returncode == 0
