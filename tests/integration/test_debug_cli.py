"""``elaunch debug`` of running ranks: attach, leave in every way, and the job completes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import FORK
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, time
secret = "of rank " + os.environ["RANK"]
def train(until):
    while not os.access(until, os.F_OK):
        print("step", secret, flush=True)
        time.sleep(0.05)
if secret == "of rank 1":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 13])  # as a call of C that lasts
    train("open")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGRTMIN + 13])
    print("open", flush=True)
train("stop")
"""


def test_a_rank_is_looked_at_and_goes_on(elaunch: Launcher, tmp_path: Path) -> None:
    """However the debugger ends, and longer than --hang-timeout; one that gave up never begins."""
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    flags = ["--rdzv-id=d", "--nproc-per-node=2", "--hang-timeout=3", "--progress-regex=^step"]
    job = elaunch.start(["run", *flags, *FORK, script], cwd=tmp_path)
    for rank in (0, 1):
        job.wait_for_line(f"step of rank {rank}")

    def debugger(rank: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "elaunch", "debug", "d", "--rank", str(rank)]
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            argv, env=elaunch.env, text=True, stdin=pipe, stdout=pipe, stderr=same
        )

    with debugger(0) as first:
        shown, _ = first.communicate("p secret\nimport time; time.sleep(4)\nrun\nb train\nc\n", 60)
        assert first.returncode == 0 and "'of rank 0'" in shown
        assert "`elaunch restart` does that" in shown
    with debugger(0) as second:
        assert second.stdout is not None
        assert "pdb in rank 0" in second.stdout.readline()
        assert "s.py(" in second.stdout.readline()
        refused = elaunch.run(["debug", "d", "--rank", "0"])
        assert refused.returncode == 2 and "another `elaunch debug`" in refused.stderr
        second.kill()
    kept = elaunch.state / "elaunch" / "runs" / "d"
    wait_until(
        lambda: not list(kept.glob("debug-*")), what="the socket of a killed command is gone"
    )
    pid = int(shown.partition("pid ")[2].partition(":")[0])
    os.kill(pid, signal.SIGSTOP)
    stopped = elaunch.start(["debug", "d", "--rank", "0"])
    stopped.wait_for_line(f"`kill -CONT {pid}`; Ctrl-C gives up", stream="stderr")
    os.kill(pid, signal.SIGCONT)
    assert stopped.wait().returncode == 0
    waits = elaunch.start(["debug", "d", "--rank", "1"])
    waits.wait_for_line("Ctrl-C gives up", stream="stderr")
    waits.send_signal(signal.SIGINT)
    assert waits.wait().returncode == 130
    (tmp_path / "open").touch()
    job.wait_for_line("open")
    with debugger(1) as last:
        shown, _ = last.communicate("import os; os._exit(0)\n", 60)
    assert last.returncode == 69 and "has ended; `elaunch status d`" in shown, shown
    (tmp_path / "stop").touch()
    ended = job.wait()
    assert ended.returncode == 0, ended
    assert "Traceback" not in ended.stderr


def test_breakpoint_in_a_rank_that_is_not_shown(elaunch: Launcher, tmp_path: Path) -> None:
    """Its prompt is at the terminal where the answers are typed; the job completes."""
    script = tmp_path / "s.py"
    script.write_text('import os\nrank = os.environ["RANK"]\nif rank == "1":\n    breakpoint()\n')
    flags = ["--nproc-per-node=2", "--local-ranks-filter=0"]
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "elaunch", "run", *flags, *FORK, str(script)]
    with subprocess.Popen(argv, env=elaunch.env, stdin=theirs, stdout=theirs, stderr=theirs) as job:
        os.close(theirs)
        shown = b""
        for prompts, typed in enumerate((b"p 6 * 7, rank\n", b"c\n"), 1):
            while shown.count(b"(rank 1, Pdb) ") < prompts:
                shown += os.read(ours, 4096)
            os.write(ours, typed)
        assert b"(42, '1')" in shown
        assert job.wait(60) == 0
    os.close(ours)
