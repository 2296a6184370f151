"""``elaunch status`` as a command: output to pipes and terminals, errors, exit codes."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import warm
from tests.launching import wait_until
from tests.views.conftest import Play, environ, play
from tests.views.jobs import BACKENDS, Meetings, PlayedJob
from tests.views.playing import final

__all__ = ["environ", "play"]

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "elaunch", "status"]


def run(environ: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command with pipes for its output."""
    return warm.run([*COMMAND, *args], environ)


class Terminal:
    """The command on a terminal of its own."""

    def __init__(
        self,
        environ: dict[str, str],
        *args: str,
        columns: int = 80,
        rows: int = 50,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._fd, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = warm.Popen(
            [*command, *args],
            {"TERM": "xterm-256color"} | environ,
            ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""

    def read(self, seconds: float) -> bool:
        """Take what is written within ``seconds``, less if there is something at once.

        Return whether there may be more: the kernel cuts what it hands over anywhere, also in the
        middle of a character.
        """
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        try:
            self.text += self._decoder.decode(os.read(self._fd, 1 << 16))
        except OSError:  # EIO: nobody has the other end open any more
            return False
        return True

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str) -> None:
        """Wait until the output matches."""

        def seen() -> bool:
            self.read(0.05)
            return re.search(pattern, self.text) is not None

        wait_until(seen, 60, f"{pattern!r} on the terminal")

    def ended(self) -> int:
        """Wait for the end, return the exit code."""

        def over() -> bool:
            self.read(0.05)
            return self.process.poll() is not None

        wait_until(over, 60, "the command ends")
        while self.read(0):
            continue
        os.close(self._fd)
        return self.process.returncode


def test_no_runs(environ: dict[str, str]) -> None:
    done = run(environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No run of this user is recorded" in done.stdout
    assert run(environ, "--json").stdout == "[]\n"


@pytest.mark.slow
def test_the_list_and_one_run_on_a_pipe(play: Play, environ: dict[str, str]) -> None:
    agent = play(2)
    done = run(environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^train-3fa2c1 +RUNNING +0 +0/3 +2 ", done.stdout, re.M)
    done = run(environ, "train")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("train-3fa2c1  RUNNING  for ")
    assert "\x1b" not in done.stdout
    agent.kill()
    done = run(environ, "train-3fa2c1")
    assert done.returncode == 0
    assert done.stdout.startswith("train-3fa2c1  LOST\n  the agent (pid ")


@pytest.mark.slow
def test_runs_is_the_list(play: Play, environ: dict[str, str]) -> None:
    """``elaunch runs`` and ``runs ls`` list what ``elaunch status`` lists, and nothing else."""
    play(1)
    command = [sys.executable, "-m", "elaunch", "runs"]
    for words in ([], ["ls", "--all"]):
        done = warm.run([*command, *words, "--json"], environ)
        assert [entry["run_id"] for entry in json.loads(done.stdout)] == ["train-3fa2c1"]
    done = warm.run([*command, "train"], environ)
    assert done.returncode == 2 and "one run: elaunch status train" in done.stderr


@pytest.mark.slow
def test_json(play: Play, environ: dict[str, str]) -> None:
    agent = play(1)
    assert [entry["run_id"] for entry in json.loads(run(environ, "--json").stdout)] == [
        "train-3fa2c1"
    ]
    document = json.loads(run(environ, "train", "--json").stdout)
    assert document["workers"][0]["rss_bytes"] > 0
    assert document["dir"] == str(agent.run.path)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["status {} --watch", "logs -f {}"])
def test_a_follower_ends_with_its_reader(play: Play, environ: dict[str, str], words: str) -> None:
    """Ends a command that follows, also where nothing happens any more."""
    agent = play(1)
    logs = agent.run.logs / "attempt_0" / "0"
    logs.mkdir(parents=True)
    (logs / "stdout.log").write_text("one\ntwo\n")
    agent.write(log_dir=str(agent.run.logs))
    command = f"{sys.executable} -m elaunch {words.format(agent.run.path)} | head -1"
    done = subprocess.run(
        ["sh", "-c", command], env=environ, capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.count("\n") == 1 and not done.stderr


def test_an_unknown_run(play: Play, environ: dict[str, str]) -> None:
    done = run(environ, "train-3fa2c2")
    assert (done.returncode, done.stdout) == (2, "")
    play(0)
    done = run(environ, "train-3fa2c2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "elaunch: error: there is no run 'train-3fa2c2'; the nearest: train-3fa2c1 "
        "(elaunch explain E-NO-RUN)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--interval", "2"], "--interval 2 has an effect only with --watch"),
        (["--watch", "--interval", "0"], "'--interval'"),
        (["--all", "train"], "leave out RUN 'train'"),
        (["--jsn"], "--json"),
        (["train", "--rdzv-id=train"], "a job is named by --rdzv-id"),
        (["--all", "--rdzv-endpoint=h:1"], "--all lists runs of this machine"),
        (["--rdzv-backend=etcd"], "--rdzv-endpoint"),
        (["--rdzv-backend=etcd-v2", "--rdzv-endpoint=h:1"], "etcd"),
    ],
)
def test_flags_without_effect_are_refused(
    environ: dict[str, str], args: list[str], message: str
) -> None:
    done = run(environ, *args)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture(params=sorted(BACKENDS))
def meetings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meetings]:
    """Give a real store of every backend in turn."""
    with BACKENDS[request.param](tmp_path) as meetings:
        yield meetings


@pytest.mark.slow
def test_a_job_on_all_its_nodes(meetings: Meetings, environ: dict[str, str]) -> None:
    with PlayedJob(meetings, "train-1", nodes=2):
        done = run(environ, *meetings.flags)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("train-1  RUNNING  round 0\n  all nodes are there\n")
        assert re.search(r"^   1  000002  node2  10\.0\.0\.2  alive  2-3 ", done.stdout, re.M)
        done = run(environ, *meetings.flags, "--rdzv_id", "train-1", "--json")
        assert json.loads(done.stdout)["world_size"] == 4
        done = run(environ, *meetings.flags, "--run-id=train-2")
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search(r"error: there is no job 'train-2' in .*: train-1 \(elaunch", done.stderr)


@pytest.mark.slow
def test_a_job_is_watched_to_its_end(meetings: Meetings, environ: dict[str, str]) -> None:
    with PlayedJob(meetings, "train-1") as job:
        command = [*COMMAND, *meetings.flags, "--watch", "--json", "--interval", "60"]
        with warm.Popen(command, environ, ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["state"] == "RUNNING"
            job.post(phase="over", exit_code=3, reason="rank 0 exited with code 3")
            assert json.loads(process.stdout.readline())["state"] == "FAILED"
            assert process.wait(60) == 0


@pytest.mark.slow
def test_several_jobs_in_one_etcd(environ: dict[str, str], tmp_path: Path) -> None:
    with BACKENDS["etcd"](tmp_path) as meetings:
        done = run(environ, *meetings.flags)
        assert (done.returncode, done.stdout) == (2, "")
        assert "there is no job in etcd at " in done.stderr
        with PlayedJob(meetings, "train-1"), PlayedJob(meetings, "eval-1"):
            done = run(environ, *meetings.flags)
            assert [line.split()[:2] for line in done.stdout.splitlines()] == [
                ["run", "state"],
                ["eval-1", "RUNNING"],
                ["train-1", "RUNNING"],
            ]
            listed = json.loads(run(environ, *meetings.flags, "--json").stdout)
            assert [job["run_id"] for job in listed] == ["eval-1", "train-1"]


@pytest.mark.slow
def test_a_store_that_is_not_there(meetings: Meetings, environ: dict[str, str]) -> None:
    meetings.close()
    done = run(environ, *meetings.flags, "--rdzv-id=train-1", "--rdzv-conf=join_timeout=1")
    assert (done.returncode, done.stdout) == (69, "")
    assert re.search(r"^elaunch: error: .*127\.", done.stderr)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_secret(meetings: Meetings, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of some length\n")
    (tmp_path / "secret").chmod(0o600)
    with PlayedJob(meetings, "train-1", secret=b"a secret of some length"):
        done = run(environ, *meetings.flags)
        assert done.returncode == 69
        assert "--rdzv-secret-file" in done.stderr
        done = run(environ, *meetings.flags, f"--rdzv-secret-file={tmp_path}/secret")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_an_unreadable_record(play: Play, environ: dict[str, str]) -> None:
    agent = play(0)
    agent.kill()
    agent.run.state_file.write_text('{"schema": 9}')
    done = run(environ, "train")
    assert done.returncode == 73
    assert "its schema is 9, this version reads 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert "UNREADABLE" in run(environ).stdout


@pytest.mark.slow
def test_output_that_the_encoding_cannot_hold(play: Play, environ: dict[str, str]) -> None:
    play(0, reason="naïve → \udcff", run_id="läuft")
    done = run(environ | {"PYTHONIOENCODING": "ascii"}, "läuft")
    assert (done.returncode, done.stderr) == (0, "")
    assert "na\\xefve \\u2192 \\udcff" in done.stdout


@pytest.mark.slow
def test_a_reader_that_goes_away(play: Play, environ: dict[str, str]) -> None:
    play(0)
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "--json"], env=environ, stdout=write_end, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(write_end)
    os.close(read_end)
    assert b"Traceback" not in process.communicate(timeout=60)[1]


@pytest.mark.slow
def test_watching_on_a_pipe_prints_changes_until_the_end(
    play: Play, environ: dict[str, str]
) -> None:
    agent = play(1)
    command = [*COMMAND, "train", "--watch", "--json", "--interval", "0.1"]
    with warm.Popen(command, environ, ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "RUNNING"
        agent.write(state="RESTARTING")
        assert json.loads(process.stdout.readline())["state"] == "RESTARTING"
        agent.end(**final("FAILED", agent.record(), exit_code=3))
        assert json.loads(process.stdout.readline())["state"] == "FAILED"
        assert process.stdout.read() == ""
        assert process.wait(60) == 0


def test_watching_what_has_ended_shows_it_once(play: Play, environ: dict[str, str]) -> None:
    agent = play(0)
    agent.end(**final("STOPPED", agent.record(), exit_code=143))
    done = run(environ, "train", "--watch")
    assert done.returncode == 0
    assert done.stdout.count("STOPPED  exit code 143") == 1


@pytest.mark.slow
def test_watching_on_a_terminal(play: Play, environ: dict[str, str]) -> None:
    agent = play(1)
    terminal = Terminal(environ, "train", "--watch", "--interval", "0.1")
    terminal.wait_for(r"RUNNING")
    terminal.wait_for(r"for \d")
    agent.end(**final("COMPLETED", agent.record(), exit_code=0))
    assert terminal.ended() == 0
    assert "COMPLETED" in terminal.text
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "number", "code"),
    [
        (["train", "--watch"], signal.SIGINT, 130),
        (["--watch"], signal.SIGINT, 130),
        (["--watch"], signal.SIGTERM, 143),
        (["--watch"], signal.SIGHUP, 129),
    ],
)
def test_interrupting_a_watch_is_quiet(
    play: Play, environ: dict[str, str], args: list[str], number: signal.Signals, code: int
) -> None:
    """The cursor is there again."""
    play(1)
    terminal = Terminal(environ, *args, "--interval", "0.1")
    terminal.wait_for("RUNNING")
    os.kill(terminal.process.pid, number)
    assert terminal.ended() == code
    assert "Traceback" not in terminal.text and "Aborted" not in terminal.text
    assert terminal.text.count("\x1b[?25h") == 1


def test_interrupting_a_watch_on_a_pipe_is_quiet(play: Play, environ: dict[str, str]) -> None:
    play(1)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*COMMAND, "train", "--watch"]
    with warm.Popen(command, environ, ROOT, text=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colours(
    play: Play, environ: dict[str, str], variables: dict[str, str], coloured: bool
) -> None:
    agent = play(0)
    agent.kill()
    terminal = Terminal(environ | variables, "train")
    assert terminal.ended() == 0
    assert ("\x1b[1;31m" in terminal.text) is coloured
    assert "LOST" in terminal.text


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_the_terminal(play: Play, environ: dict[str, str], columns: int) -> None:
    play(2, reason="rank 1 was killed by SIGKILL; " * 6)
    for args in ([], ["train"]):
        terminal = Terminal(environ | {"NO_COLOR": "1"}, *args, columns=columns)
        assert terminal.ended() == 0
        text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text)
        assert max(len(line) for line in text.splitlines()) <= columns


@pytest.mark.slow
def test_rich_and_psutil_are_imported_only_where_they_are_needed(
    play: Play, environ: dict[str, str]
) -> None:
    agent = play(0)
    agent.kill()
    code = (
        "import sys\nfrom elaunch.cli.views.status import status\n"
        "try:\n    status(sys.argv[1:])\nexcept SystemExit:\n"
        "    print({'rich', 'psutil', 'torch', 'yaml', 'tempfile'} & set(sys.modules))"
    )

    def loaded(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            env=environ,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        return done.stdout.splitlines()[-1]

    assert loaded("--help") == "set()"
    assert loaded("train") == "{'tempfile'}"
