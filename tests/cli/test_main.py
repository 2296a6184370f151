"""The command ``elaunch`` as a process: answers, errors, exit codes, and how soon they come."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from elaunch import __version__
from elaunch.cli import execute
from elaunch.config.flags.table import FLAGS, GROUPS, USUAL


def elaunch(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PET_")}
    return subprocess.run(
        [sys.executable, "-m", "elaunch", *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env=clean,
    )


def test_version_and_help() -> None:
    """Both end with 0 and say nothing on stderr."""
    done = elaunch("--version")
    versions = f"torch {metadata.version('torch')}, Python {platform.python_version()}"
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"elaunch {__version__}, {versions}\n",
        "",
    )
    done = elaunch("run", "--help")
    assert done.returncode == 0 and "--nproc-per-node" in done.stdout and not done.stderr
    assert "run" in elaunch("--help").stdout


def test_help_is_short_and_help_all_has_every_flag() -> None:
    """The short one names the other, and shows what most jobs need."""
    short, long = elaunch("run", "-h").stdout, elaunch("run", "--help-all").stdout
    assert {name for name in USUAL if f"--{name}" not in short} == set()
    assert "--help-all" in short and "--sibling-grace" not in short
    assert {flag.name for flag in FLAGS if f"--{flag.name}" not in long} == set()
    assert [group for group in GROUPS if f"\n{group}:" not in long] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rnu"], "no command 'rnu'; did you mean 'run'?"),
        (["train.py"], "did you mean 'elaunch run train.py'?"),
        (
            ["--nproc-per-node", "2", "x.py"],
            "--nproc-per-node is a flag of 'elaunch run'; did you mean "
            "'elaunch run --nproc-per-node 2 x.py'?",
        ),
        (["--nproc=2", "x.py"], "did you mean 'elaunch run --nproc=2 x.py'?"),
        (["frobnicate"], "the commands are run, "),
        (["run", "--nproc-pr-node", "2", "x.py"], "--nproc-per-node"),
        (
            ["run", "--log=x", "x.py"],
            "--log is ambiguous: --log-dir, --log-line-prefix-template, --logs-specs",
        ),
        (["run", "--role"], "--role needs a value"),
        (["run", "--max-restarts", "x", "x.py"], "--max-restarts: 'x' is not a whole number"),
        (["run", "no-such-script.py"], "script 'no-such-script.py' does not exist"),
        (["run"], "nothing to start"),
        (["--verion"], "--version"),
    ],
)
def test_usage_errors_end_with_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message on stderr, nothing on stdout, no traceback."""
    assert execute(args) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.startswith("elaunch: error: ")
    assert err.count("\n") == 1 and "elaunch explain E-" in err


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ("--nproc-pr-node 2 t.py", "E-USAGE"),
        ("", "E-USAGE"),
        ("--max-restarts x t.py", "E-VALUE"),
        ("no-such-script.py", "E-NO-SCRIPT"),
        ("-m no.such.module", "E-NO-SCRIPT"),
        ("--no-python no-such-program", "E-NO-SCRIPT"),
        ("-f t.py", "E-JOB-FILE"),
        ("-f no.yaml", "E-JOB-FILE"),
        ("--checkpoint-dir t.py t.py", "E-CHECKPOINT-DIR"),
        ("--log-dir t.py t.py", "E-LOG-DIR"),
        ("--nnodes 2 t.py", "E-NO-ENDPOINT"),
        ("--nnodes 2 --node-rank 2 --master-addr 127.0.0.1 t.py", "E-NODE-RANK"),
        ("--master-addr no-such-host.invalid t.py", "E-HOST-NAME"),
        ("--local-addr no-such-host.invalid t.py", "E-HOST-NAME"),
        ("--master-port {taken} t.py", "E-PORT-IN-USE"),
    ],
)
def test_errors_have_their_code(
    args: str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the end of the message, for ``elaunch explain``; the exit code is the class's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("t.py").write_text("print(1)\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = args.format(taken=taken.getsockname()[1]).split()
        assert execute(["run", *words]) == 2
    assert capsys.readouterr().err.endswith(f" (elaunch explain {code})\n")


@pytest.mark.slow
def test_notices_are_printed_on_stderr(tmp_path: Path) -> None:
    """Each on one line, before anything starts."""
    (tmp_path / "s.py").write_text("")
    done = elaunch("run", "--dry-run", "--monitor-interval", "1", "s.py", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("elaunch: note: --monitor-interval has no effect")


@pytest.mark.parametrize(
    ("args", "ending"), [(["--version"], 0), (["run", "--help"], 0), (["run", "--nope"], 2)]
)
def test_what_is_imported_for_an_answer(args: list[str], ending: int) -> None:
    """Little, and nothing heavy: the reason why answers come at once, in 0.15 s."""
    code = (
        f"import sys; from elaunch.cli import execute; assert execute({args}) == {ending};"
        "heavy = ('torch', 'rich', 'psutil', 'yaml', 'elaunch.agent.main');"
        "print([m for m in heavy if m in sys.modules], len(sys.modules) < 200)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["[] True"], done


@pytest.mark.slow
def test_an_interrupt_before_anything_starts_is_130(tmp_path: Path) -> None:
    """No traceback: here while the job file is read, from a FIFO that nobody writes."""
    fifo = tmp_path / "job.yaml"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [sys.executable, "-m", "elaunch", "run", "-f", str(fifo)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    writer = os.open(fifo, os.O_WRONLY)  # returns once elaunch has opened it to read
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    os.close(writer)
    assert (process.returncode, err.strip()) == (130, b"")


ENDING = """
import atexit, sys
from elaunch.__main__ import main
atexit.register(print, "taken apart")
sys.exit(main())
"""


@pytest.mark.parametrize(("command", "expected"), [("run", False), ("logs", True)])
def test_an_agent_is_not_taken_apart(command: str, expected: bool) -> None:
    """That takes CPU after the last line; what was written is there all the same."""
    argv = [sys.executable, "-c", ENDING, command, "--help"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0
    assert "--help" in ended.stdout
    assert ("taken apart" in ended.stdout) == expected
