"""A job that is asked to save and to end: one node, real workers, the real command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.watching import agent_lines
from tests.launching import Launcher, Running

pytestmark = pytest.mark.slow

ASKS = Path(__file__).with_name("jobs") / "asks.py"
CONTEXT = ["run", "--rdzv-id=job", "--preload=none"]


def start(
    elaunch: Launcher, *words: str, nproc: int = 3, flags: list[str] | None = None
) -> Running:
    """Start a job and wait until each rank has made a few steps."""
    share = elaunch.directory / "share"
    share.mkdir(exist_ok=True)
    save = [f"--checkpoint-dir={share}", "--checkpoint-glob=step_*.json"]
    argv = [*CONTEXT, f"--nproc-per-node={nproc}", *save, *(flags or []), ASKS, share, *words]
    running = elaunch.start(argv)
    for rank in range(nproc):
        running.wait_for_line(rf"^steps rank={rank} ", 60.0)
    return running


def ends(elaunch: Launcher, number: int = 0) -> list[int]:
    """Return the steps at which the ranks of a round were told."""
    found = sorted((elaunch.directory / "share").glob(f"end.{number}.*"))
    return [int(path.read_text()) for path in found]


def record(elaunch: Launcher) -> dict[str, object]:
    """Return the run's record as `elaunch status` tells it."""
    found: dict[str, object] = json.loads(elaunch.run(["status", "job", "--json"]).stdout)
    return found


def preempt(elaunch: Launcher, *flags: str) -> str:
    """Ask the job to end; return what the command says."""
    done = elaunch.run(["preempt", "job", *flags])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_all_ranks_save_at_one_step(elaunch: Launcher) -> None:
    """However skewed they are; the run is to be continued, and is, from that step."""
    running = start(elaunch, "skew=0.03")
    said = preempt(elaunch, "--reason=drain of rack 7")
    assert said.startswith("job: drain of rack 7: the workers are asked to save and to end (3 of 3")
    done = running.wait()
    assert done.returncode == 75
    (step,) = set(ends(elaunch))
    assert len(ends(elaunch)) == 3
    assert f"told rank=2 round=0 step={step} drain of rack 7" in done.stdout
    assert "round 0: preempted: drain of rack 7; to be continued" in agent_lines(done.stderr)
    assert record(elaunch)["state"] == "PREEMPTED"
    again = start(elaunch, f"steps={step + 5}")
    done = again.wait()
    assert done.returncode == 0
    assert "up rank=1 round=0 pid=" in done.stdout and f"from={step}" in done.stdout
    assert record(elaunch)["state"] == "COMPLETED"


def test_a_round_is_restarted(elaunch: Launcher) -> None:
    """All ranks save at one step, the next round begins there; no restart is used for it."""
    running = start(elaunch, nproc=2, flags=["--max-restarts=0"])
    done = elaunch.run(["restart", "job", "--reason=new data"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("job: new data: round 0 is to end, and the next begins from")
    found = running.wait_for_line(r"^up rank=0 round=1 pid=\d+ from=(\d+)$", 60.0)
    twice = elaunch.run(["restart", "job", "--reason=new data"])
    assert (twice.returncode, twice.stderr) == (0, "")
    assert twice.stdout.startswith("job: new data: round 1 has begun for this ")
    assert set(ends(elaunch)) == {int(found[1])}
    running.wait_for_line("^steps rank=1 round=1 ", 60.0)
    shown: Any = record(elaunch)
    assert shown["state"] == "RUNNING" and shown["restarts"]["used"] == 0
    assert shown["history"][-1]["reason"] == f"new data, from step {found[1]}"
    assert shown["history"][-1]["planned"]
    preempt(elaunch)
    assert running.wait().returncode == 75
    again = elaunch.run(["restart", "job"])
    assert again.returncode == 2 and "RUN job does not run" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_ask(elaunch: Launcher, number: signal.Signals) -> None:
    """SIGTERM too, where the script asks."""
    running = start(elaunch, "gloo", nproc=2)
    running.send_signal(number)
    done = running.wait()
    assert done.returncode == 75
    assert len(set(ends(elaunch))) == 1 and len(ends(elaunch)) == 2
    assert record(elaunch)["state"] == "PREEMPTED"


def test_the_time_has_come(elaunch: Launcher) -> None:
    """--preempt-at; it may come before the workers ask for the first time."""
    share = elaunch.directory / "share"
    share.mkdir()
    argv = [*CONTEXT, "--nproc-per-node=3", "--preempt-at=+2s", ASKS, share]
    done = elaunch.run(argv)
    assert done.returncode == 75
    assert done.stdout.count(" the time of --preempt-at has come") == 3
    assert record(elaunch)["state"] == "PREEMPTED"


def test_the_machine_will_be_taken(elaunch: Launcher) -> None:
    """--notice-command; the script learns how long it has, and nothing of the command is left."""
    taken = elaunch.directory / "taken"
    command = f"until [ -e {taken} ]; do sleep 0.05; done; echo preempt +90s spot; sleep 1000"
    running = start(elaunch, "left", nproc=2, flags=[f"--notice-command={command}"])
    taken.touch()
    done = running.wait()
    assert done.returncode == 75
    left = [float(text) for text in re.findall(r"^left rank=\d (.*)$", done.stdout, re.M)]
    assert len(left) == 2 and all(0.0 < seconds <= 85.0 for seconds in left)
    assert "round 0: spot: the workers are asked to save and to end (2 of 2" in done.stderr


def test_the_machine_is_taken_while_the_job_saves(elaunch: Launcher) -> None:
    """The platform's SIGTERM, amid a save that its notice had begun, cuts nothing short."""
    taken, quick = (elaunch.directory / "share" / name for name in ("taken", "quick"))
    command = f"until [ -e {taken} ]; do sleep 0.05; done; echo preempt +20s spot; sleep 1000"
    grace = ["--shutdown-timeout=0.3", "--sibling-grace=0.3"]
    running = start(elaunch, "slow", nproc=2, flags=[f"--notice-command={command}", *grace])
    taken.touch()
    running.wait_for_line("^saving$", 60.0)
    began = time.monotonic()
    running.send_signal(signal.SIGTERM)
    running.wait_for_line(r"SIGTERM received: spot already, grace 19.7 s", 60.0, "stderr")
    while time.monotonic() < began + 1.0:  # longer than --shutdown-timeout and the grace
        assert running.process.poll() is None
        time.sleep(0.1)
    quick.touch()
    done = running.wait()
    assert done.returncode == 75
    (step,) = set(ends(elaunch))
    saved = elaunch.directory / "share" / f"step_{step:06d}.json"
    assert json.loads(saved.read_text()) == {"step": step}
    said = "\n".join(agent_lines(done.stderr))
    assert "round 0: preempted: spot; to be continued\nresult: PREEMPTED after " in said
    assert record(elaunch)["state"] == "PREEMPTED"


def test_a_killed_agent_leaves_no_notice_command(elaunch: Launcher) -> None:
    """Whatever it waits for; the launcher of the tests looks for what is left."""
    running = start(elaunch, nproc=1, flags=["--notice-command=sleep 1000 & sleep 1000"])
    running.send_signal(signal.SIGKILL)
    assert running.wait().returncode == -signal.SIGKILL


def test_who_asks_late_is_told_late(elaunch: Launcher) -> None:
    """A notice waits for a script that is still loading its data."""
    running = start(elaunch, "late=100")
    assert "(no worker has called should_preempt() yet)" in preempt(elaunch)
    assert running.wait().returncode == 75
    assert set(ends(elaunch)) <= {100, 101}


def test_who_does_not_ask_is_killed(elaunch: Launcher) -> None:
    """After the grace; the run can be continued from what it had saved."""
    running = start(elaunch, "deaf", flags=["--shutdown-timeout=1"])
    preempt(elaunch)
    done = running.wait()
    assert done.returncode == 137
    assert (
        "the notice was not followed for 1 s; no worker has asked should_preempt()" in done.stderr
    )
    assert record(elaunch)["state"] == "KILLED"


def test_a_worker_that_is_stopped_is_named(elaunch: Launcher) -> None:
    """The other one asks, waits for it, and ends before the grace is over."""
    flags = ["--shutdown-timeout=4", "--sibling-grace=0.3"]
    running = start(elaunch, nproc=2, flags=flags)
    up = running.wait_for_line(r"^up rank=1 round=0 pid=(\d+)", 60.0)
    os.kill(int(up[1]), signal.SIGSTOP)
    preempt(elaunch)
    done = running.wait()
    assert done.returncode == 1
    assert re.search(r"rank 1 has not answered the notice to end for .* is stopped", done.stderr)


def test_sigterm_reaches_who_does_not_ask(elaunch: Launcher) -> None:
    """As under torchrun."""
    running = start(elaunch, "deaf")
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 143
    assert record(elaunch)["state"] == "STOPPED"


def test_a_second_sigterm_is_not_patient(elaunch: Launcher) -> None:
    """Nor is SIGINT."""
    running = start(elaunch, "late=1000000", "gloo", nproc=2)
    running.send_signal(signal.SIGUSR1)
    running.wait_for_line("are asked to save", 60.0, "stderr")
    running.send_signal(signal.SIGTERM)
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143


@pytest.mark.parametrize(
    ("other", "pause"),
    [
        (signal.SIGTERM, 0.0),
        (signal.SIGTERM, 0.01),
        (signal.SIGHUP, 0.0),
        (signal.SIGINT, 0.01),
        *(
            pytest.param(*row, marks=pytest.mark.trial)
            for row in (
                (signal.SIGHUP, 0.01),
                (signal.SIGINT, 0.0),
                (signal.SIGQUIT, 0.0),
                (signal.SIGQUIT, 0.01),
            )
        ),
    ],
)
def test_the_same_request_more_than_once(
    elaunch: Launcher, other: signal.Signals, pause: float
) -> None:
    """`uv run` forwards what the process group has got already; a terminal closes meanwhile."""
    running = start(elaunch, "slow", nproc=2)
    for number in (signal.SIGTERM, other, other):
        running.send_signal(number)
        time.sleep(pause)  # without it the kernel hands out the lower number first
    running.wait_for_line("^saving$", 60.0)
    (elaunch.directory / "share" / "quick").touch()
    done = running.wait()
    assert done.returncode == 75, done.stderr
    assert len(set(ends(elaunch))) == 1
    assert re.search(rf"SIGTERM received.* \(sent by \S+, pid {os.getpid()}\)", done.stderr)


@pytest.mark.parametrize("also", ["", "gloo"])
def test_sigterm_to_every_process(elaunch: Launcher, also: str) -> None:
    """As systemd does it: all ranks save, and their DataLoader workers serve them until then."""
    words = ["loader", *([also] if also else [])]
    running = start(elaunch, *words, nproc=2)
    pids = elaunch.leftovers()
    for pid in [running.pid, *pids]:
        with contextlib.suppress(ProcessLookupError):  # it has ended as the ones before asked it to
            os.kill(pid, signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 75, done.stderr
    assert len(set(ends(elaunch))) == 1 and len(ends(elaunch)) == 2
    assert "DataLoader worker" not in done.stderr


def test_a_late_sigterm_spoils_no_save(elaunch: Launcher) -> None:
    """One process of many gets it when it has saved and closed the context already."""
    share = elaunch.directory / "share"
    share.mkdir()
    script = elaunch.directory / "late.py"
    script.write_text(LATE)
    running = elaunch.start([*CONTEXT, "--nproc-per-node=1", script, share])
    running.wait_for_line("asks", 60.0)
    running.send_signal(signal.SIGTERM)
    pid = int(running.wait_for_line(r"closed (\d+)", 60.0)[1])
    os.kill(pid, signal.SIGTERM)
    (share / "go").touch()
    done = running.wait()
    assert done.returncode == 75, done.stderr


LATE = """
import os, pathlib, sys, time
import elaunch

with elaunch.init() as ctx:
    for _ in range(50):  # the agent has heard by then that this rank asks
        ctx.preempt.should_preempt()
        time.sleep(0.01)
    print("asks", flush=True)
    while not ctx.preempt.should_preempt():
        time.sleep(0.01)
print("closed", os.getpid(), flush=True)
while not pathlib.Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
"""


def test_children_end_by_sigterm_of_their_parent(elaunch: Launcher) -> None:
    """Whatever way they were made in, after the script has asked."""
    share = elaunch.directory / "share"
    share.mkdir()
    script = elaunch.directory / "children.py"
    script.write_text(CHILDREN)
    done = elaunch.run([*CONTEXT, "--nproc-per-node=1", script])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "pool ended",
        "process -15",
        "program -15",
        "fork 15",
        "of a dataset -15",
    ]


CHILDREN = """
import multiprocessing, os, signal, subprocess, time
import elaunch
from torch.utils.data import DataLoader

class Dataset:
    def __len__(self):
        return 1

    def __getitem__(self, index):  # here, and not in a process of the DataLoader's
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        subprocess.run(["kill", str(process.pid)], check=True)
        process.join()
        return process.exitcode

if __name__ == "__main__":
    with elaunch.init() as ctx:
        assert not ctx.preempt.should_preempt()
        forks = multiprocessing.get_context("fork")
        with forks.Pool(2) as pool:
            pool.map(abs, range(4))
        pool.join()
        print("pool ended")
        process = forks.Process(target=time.sleep, args=(600,))
        process.start()
        process.terminate()
        process.join()
        print("process", process.exitcode)
        program = subprocess.Popen(["sleep", "600"], preexec_fn=os.setsid)
        program.terminate()
        print("program", program.wait())
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        print("fork", os.waitpid(pid, 0)[1], flush=True)
        print("of a dataset", next(iter(DataLoader(Dataset()))).item(), flush=True)
"""


def test_a_failure_stays_one(elaunch: Launcher) -> None:
    """A worker that fails on the way out: its code, and no restart."""
    running = start(elaunch, "fail=1", flags=["--max-restarts=3"])
    preempt(elaunch)
    done = running.wait()
    assert done.returncode == 7
    assert "no restart: elaunch preempt" in done.stderr
    assert "up rank=0 round=1" not in done.stdout


def test_a_job_that_is_done_is_done(elaunch: Launcher) -> None:
    """Told in its last step or after it: completed."""
    running = start(elaunch, "deaf", "steps=60")
    preempt(elaunch)
    assert running.wait().returncode == 0
    assert record(elaunch)["state"] == "COMPLETED"


def test_one_rank_that_asks_alone(elaunch: Launcher) -> None:
    """It is told who did not, and what they did last, instead of waiting for ever."""
    running = start(elaunch, "only=0")
    preempt(elaunch)
    done = running.wait()
    assert done.returncode == 1
    assert "CollectiveTimeout" in done.stderr
    assert (
        "should_preempt" in done.stderr and "rank 1 (" in done.stderr and "rank 2 (" in done.stderr
    )


@pytest.mark.trial
def test_one_rank_that_asks_alone_without_a_timeout(elaunch: Launcher) -> None:
    """The error that names the others comes before the agent ends the ranks."""
    running = start(elaunch, "only=0", "patient", nproc=2, flags=["--shutdown-timeout=20"])
    preempt(elaunch)
    done = running.wait()
    assert done.returncode == 1
    assert "CollectiveTimeout" in done.stderr and "rank 1 (" in done.stderr
    assert "the notice was not followed" not in done.stderr


def test_a_deadline_by_the_command(elaunch: Launcher) -> None:
    """`elaunch preempt --deadline`, as a batch script of Slurm calls it."""
    running = start(elaunch, "deaf", nproc=1)
    assert "grace 1 s" in preempt(elaunch, "--deadline=2", "--reason=the time limit")
    assert running.wait().returncode == 137


def test_mistakes(elaunch: Launcher) -> None:
    """A run that is not there, one that is over, a reason that is none."""
    done = elaunch.run(["preempt", "jbo"])
    assert done.returncode == 2 and "there is no run 'jbo'" in done.stderr
    running = start(elaunch, "steps=5")
    assert running.wait().returncode == 0
    done = elaunch.run(["preempt", "job"])
    assert done.returncode == 2 and "does not run: `elaunch status job` tells" in done.stderr
    done = elaunch.run(["preempt", "job", "--reason="])
    assert done.returncode == 2 and "--reason ''" in done.stderr
