"""The tutorials among the examples: one result under each launcher, at each size, after faults.

x, the number that the ranks of ``increment.py`` make grow together, has a closed form: whatever is
done twice or lost shows in it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM, SIGUSR1
from typing import Any

import pytest

from elaunch.checkpoint.storage.storage import open_storage
from tests import programs
from tests.integration.jobs import FORK
from tests.integration.nodes import Build, Job
from tests.launching import TORCHRUN, Launcher, Running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
INCREMENT, SHARDED = EXAMPLES / "increment.py", EXAMPLES / "sharded.py"
OWN_LAUNCHER = EXAMPLES / "own_launcher.py"
WRAP = [sys.executable, "-m", "elaunch", "wrap", "--tee=0", "--"]
TRIAL = pytest.mark.trial
OTHERS = ("elaunch", "torchrun", "mpirun")
LAUNCHERS = [
    ("python", 1),
    *((name, 2) for name in OTHERS[:2]),
    *(pytest.param(name, 1, marks=TRIAL) for name in OTHERS),
    *(pytest.param(name, 4, marks=TRIAL) for name in OTHERS),
    pytest.param(OTHERS[2], 2, marks=TRIAL),
]
# With torch, a process group and its threads each of these takes seconds: not all of them.
HEAVY = [
    ("python", 1),
    ("elaunch", 2),
    pytest.param("torchrun", 2, marks=TRIAL),
    pytest.param("elaunch", 1, marks=TRIAL),
    pytest.param("elaunch", 4, marks=TRIAL),
    pytest.param("mpirun", 4, marks=TRIAL),
]
Word = str | Path
DEADLINE = 180.0


def command(launcher: str, size: int, script: Path, words: Sequence[Word] = ()) -> list[Word]:
    """Return the command line that starts ``size`` ranks of a script."""
    python: list[Word] = [sys.executable, script, *words]
    count = f"--nproc-per-node={size}"
    if launcher == "elaunch":
        return [sys.executable, "-m", "elaunch", "run", count, *FORK, script, *words]
    if launcher == "torchrun":
        return [*TORCHRUN, count, script, *words]
    if launcher == "mpirun":
        programs.needed("mpirun", "orted", "ssh")
        # The test's directory is too deep for mpirun's sockets.
        flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader,tcp"]
        return ["mpirun", *flags, "-np", str(size), *WRAP, *python]
    return python


def saved(directory: Path) -> list[str]:
    """Return the flags with which a job keeps its state there."""
    return [f"--checkpoint-dir={directory}", "--checkpoint-glob=step_*.json"]


def the_run(elaunch: Launcher) -> dict[str, Any]:
    """Return the one run that `elaunch status` lists."""
    (run,) = json.loads(elaunch.run(["status", "--json"]).stdout)
    found: dict[str, Any] = run
    return found


def rows(elaunch: Launcher, run: str, *flags: str) -> list[dict[str, Any]]:
    """Return what `elaunch metrics` shows of a run."""
    done = elaunch.run(["metrics", run, "--json", *flags])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_groups(shown: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of training and those of validation; there are no others."""
    training = [row for row in shown if row["group"] == "training"]
    validation = [row for row in shown if row["group"] == "validation"]
    assert len(training) + len(validation) == len(shown)
    return training, validation


def total(size: int, steps: int = 100) -> int:
    """Return x after so many steps of so many ranks."""
    return steps * size * (size + 1) // 2


def last_line(size: int, steps: int = 100) -> str:
    """Return what rank 0 says at the end."""
    return f"after {steps} steps x is, rank by rank, {[total(size, steps)] * size}\n"


@pytest.mark.parametrize(("launcher", "size"), LAUNCHERS)
def test_increment(elaunch: Launcher, launcher: str, size: int) -> None:
    """The closed form on every rank; the run is listed; metrics are the chief's alone."""
    done = elaunch.start_command(command(launcher, size, INCREMENT)).wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(last_line(size))
    run = the_run(elaunch)
    assert (run["state"], run["name"], run["world_size"]) == ("COMPLETED", "increment", size)
    assert run["started_at"] <= run["ended_at"]
    assert re.findall(rf"elaunch status {run['run_id']}\b", done.stderr) != []
    training, (validation,) = in_groups(rows(elaunch, run["run_id"]))
    assert [(row["steps_completed"], row["rank"], row["x"]) for row in training] == [
        (steps, 0, total(size, steps)) for steps in range(10, 101, 10)
    ]
    assert (validation["steps_completed"], validation["x"]) == (100, total(size))


@pytest.mark.parametrize(("launcher", "size"), HEAVY)
def test_sharded(elaunch: Launcher, launcher: str, size: int) -> None:
    """Each batch is one rank's row; each checkpoint has every rank's part."""
    done = elaunch.start_command(command(launcher, size, SHARDED)).wait(DEADLINE)
    # torch's own threads may abort a process at its exit; see finish_under_torchrun of the others.
    assert done.returncode == 0 or "terminate called without" in done.stderr, done.stderr
    run = the_run(elaunch)
    assert (run["state"], run["name"], run["world_size"]) == ("COMPLETED", "sharded", size)
    training, validation = in_groups(rows(elaunch, run["run_id"]))
    expected = [(batch, batch % size) for batch in range(100)]
    assert [(row["steps_completed"], row["rank"]) for row in training] == expected
    assert all(0 <= row["loss"] < 1 and row["round"] == 0 for row in training)
    assert [row["steps_completed"] for row in validation] == list(range(9, 100, 10))
    assert_parts(own_place(elaunch, run["run_id"]), size)
    if (launcher, size) == ("elaunch", 2):
        assert rows(elaunch, run["run_id"], "--group=training") == training
        assert rows(elaunch, run["run_id"], "--group=validation") == validation
        second = [row for row in training if row["rank"] == 1]
        assert rows(elaunch, run["run_id"], "--group=training", "--rank=1") == second


def assert_parts(directory: Path, size: int) -> None:
    """See that the four checkpoints have what all ranks wrote."""
    found = open_storage(directory).listed()
    assert [each.step for each in found] == [24, 49, 74, 99]
    for each in found:
        said = {"steps_completed": each.step} | {f"rank_{rank}": "ok" for rank in range(size)}
        assert each.metadata == said
        parts = {part.name: part.read_text() for part in Path(each.place).glob("state_*")}
        assert parts == {f"state_{rank}": f"{each.step},{rank}" for rank in range(size)}


def own_place(elaunch: Launcher, run: str) -> Path:
    """Return where a run without --checkpoint-dir keeps its checkpoints."""
    return elaunch.state / "elaunch" / run / "checkpoints"


def start_slowly(elaunch: Launcher, seconds: float) -> Running:
    """Start the increment with four ranks and its state in ``share``; a step takes ``seconds``."""
    flags = ["--rdzv-id=job", "--nproc-per-node=4", "--max-restarts=1", *FORK]
    flags += saved(elaunch.directory / "share")
    return elaunch.start(["run", *flags, INCREMENT, f"--seconds={seconds}"])


def wait_for_step(directory: Path, step: int) -> None:
    """Wait until a state is saved."""
    path = directory / f"step_{step:06d}.json"
    wait_until(path.exists, DEADLINE, f"{path} is there")


def assert_counted(elaunch: Launcher) -> list[int]:
    """See that the four ranks' metrics have each ten steps once; return the rounds they are of."""
    training = rows(elaunch, "job", "--group=training")
    assert [(row["steps_completed"], row["x"]) for row in training] == [
        (steps, total(4, steps)) for steps in range(10, 101, 10)
    ]
    return [row["round"] for row in training]


def test_a_killed_rank_changes_nothing(elaunch: Launcher) -> None:
    """Any one of them; the round after goes on from the last state."""
    share, victim = elaunch.directory / "share", random.randrange(4)
    running = start_slowly(elaunch, 0.05)
    wait_for_step(share, 10)
    workers = json.loads(elaunch.run(["status", "job", "--json"]).stdout)["workers"]
    wait_for_step(share, 30)
    os.kill(next(worker["pid"] for worker in workers if worker["rank"] == victim), SIGKILL)
    done = running.wait(DEADLINE)
    assert done.returncode == 0, f"rank {victim}\n{done.stderr}"
    assert done.stdout.endswith(last_line(4))
    assert f"round 0: rank {victim} was killed by SIGKILL; restart 1 of 1" in done.stderr
    assert len(list(share.glob("step_*.json"))) == 10
    assert set(assert_counted(elaunch)) == {0, 1}


@pytest.mark.trial
def test_a_preempted_job_loses_no_step(elaunch: Launcher) -> None:
    """It ends at a step whose state is the last one saved; the same command goes on from there."""
    share = elaunch.directory / "share"
    running = start_slowly(elaunch, 0.1)
    wait_for_step(share, 10)
    assert elaunch.run(["preempt", "job"]).returncode == 0
    assert running.wait(DEADLINE).returncode == 75
    assert the_run(elaunch)["state"] == "PREEMPTED"
    last = max(share.glob("step_*.json"))
    steps = json.loads(last.read_text())["steps_completed"]
    assert json.loads(last.read_text())["x"] == total(4, steps) and steps < 100
    before = rows(elaunch, "job", "--group=training")
    assert before[-1]["steps_completed"] == steps
    done = start_slowly(elaunch, 0.0).wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(last_line(4))
    # Nothing that the first run had reported was done again.
    assert_counted(elaunch)
    everything = rows(elaunch, "job", "--group=training", "--all")
    assert len(everything) == 10
    assert everything[: len(before)] == [row | {"superseded": False} for row in before]


def test_the_last_step_is_saved(elaunch: Launcher) -> None:
    """Also where it is none of those that are saved anyway."""
    words = ["run", *FORK, *saved(elaunch.directory / "share"), INCREMENT, "--steps=95"]
    assert elaunch.run(words, deadline=DEADLINE).stdout.endswith(last_line(1, 95))
    found = [path.name for path in sorted((elaunch.directory / "share").glob("*"))]
    steps = [*range(10, 91, 10), 95]
    assert found == [f"step_{step:06d}.json" for step in steps]


@pytest.mark.trial
def test_only_loopback_is_needed(elaunch: Launcher) -> None:
    """No network, no resolver, no server."""
    alone = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    programs.allowed("no right to a network of one's own" if alone.returncode else None)
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    job = command("elaunch", 2, SHARDED)
    done = elaunch.start_command([*inside, *job]).wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    run = the_run(elaunch)
    assert run["state"] == "COMPLETED"
    assert_parts(own_place(elaunch, run["run_id"]), 2)


# ── the script that is its own launcher ──────────────────────────────────────────────────────────

RUN = [sys.executable, "-m", "elaunch", "run", "--rdzv-id=job", *FORK]
WAYS: list[list[Word]] = [
    [sys.executable, OWN_LAUNCHER, "launcher"],
    [*RUN, OWN_LAUNCHER, "launcher"],
    [*RUN, "--nproc-per-node=4", OWN_LAUNCHER],
]
STAND_IN = """
import os, signal, sys, time
from pathlib import Path

def main(ctx, steps, seconds):
    rank = ctx.distributed.rank
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"up.{rank}").touch()
    while rank == 2:
        if Path("exit").exists():
            sys.exit(int(Path("exit").read_text()))
        if Path("die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    ctx.distributed.barrier()
"""
SLOW = f"""
import runpy

def main(ctx, steps, seconds):
    runpy.run_path({str(INCREMENT)!r})["main"](ctx, steps, 0.1)
"""


def stand_in(elaunch: Launcher, text: str) -> Path:
    """Put another ``increment.py`` beside a copy of the launcher; return the copy."""
    (elaunch.directory / "increment.py").write_text(text)
    return Path(shutil.copy(OWN_LAUNCHER, elaunch.directory))


@pytest.mark.parametrize(
    "way",
    [pytest.param(WAYS[0], marks=TRIAL), WAYS[1], pytest.param(WAYS[2], marks=TRIAL)],
    ids=["alone", "inside", "instead"],
)
def test_own_launcher(elaunch: Launcher, way: list[Word]) -> None:
    """By itself, as the only worker of elaunch, and as a worker like any other."""
    done = elaunch.start_command(way).wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == last_line(4)
    run = the_run(elaunch)
    assert (run["state"], run["name"]) == ("COMPLETED", "own_launcher")
    assert len(rows(elaunch, run["run_id"], "--group=training")) == 10


@pytest.mark.trial
@pytest.mark.parametrize(("how", "code"), [("exit", 7), pytest.param("die", 137, marks=TRIAL)])
def test_own_launcher_ends_with_the_first_failure(elaunch: Launcher, how: str, code: int) -> None:
    """Its code, not that of those it ended; also who ignores SIGTERM is gone."""
    script = stand_in(elaunch, STAND_IN)
    argv: list[Word] = [sys.executable, script] if how == "exit" else [*RUN, script]
    running = elaunch.start_command([*argv, "launcher"])
    wait_until(lambda: len(list(elaunch.directory.glob("up.*"))) == 4, DEADLINE, "all are up")
    (elaunch.directory / f"{how}.new").write_text(str(code))
    (elaunch.directory / f"{how}.new").rename(elaunch.directory / how)
    assert running.wait(DEADLINE).returncode == code


@pytest.mark.trial
def test_own_launcher_is_stopped(elaunch: Launcher) -> None:
    """With all that it has started."""
    running = elaunch.start_command([sys.executable, stand_in(elaunch, STAND_IN), "launcher"])
    wait_until(lambda: len(list(elaunch.directory.glob("up.*"))) == 4, DEADLINE, "all are up")
    running.send_signal(SIGTERM)
    assert running.wait(DEADLINE).returncode == 143
    wait_until(lambda: not elaunch.leftovers(), what="nothing is left")


@pytest.mark.trial
def test_own_launcher_is_preempted(elaunch: Launcher) -> None:
    """The notice to elaunch's agent reaches the ranks that it has not started."""
    share = elaunch.directory / "share"
    argv: list[Word] = [*RUN, *saved(share)]
    running = elaunch.start_command([*argv, stand_in(elaunch, SLOW), "launcher"])
    wait_for_step(share, 10)
    running.send_signal(SIGUSR1)
    assert running.wait(DEADLINE).returncode == 75
    assert the_run(elaunch)["state"] == "PREEMPTED"
    assert len(list(share.glob("step_*.json"))) < 10
    done = elaunch.start_command([*argv, OWN_LAUNCHER, "launcher"]).wait(DEADLINE)
    assert done.returncode == 0 and done.stdout == last_line(4)
    assert_counted(elaunch)


def test_own_launcher_knows_two_words(elaunch: Launcher) -> None:
    """A third is an error that repeats it."""
    done = elaunch.start_command([sys.executable, OWN_LAUNCHER, "lancher"]).wait(DEADLINE)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: lancher: neither launcher nor worker\n")


# ── two nodes ────────────────────────────────────────────────────────────────────────────────────


def test_increment_on_two_nodes(cluster: Build) -> None:
    """A rank of the second node is killed; x is that of four ranks that were not."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", *saved(job.share)]
    words = ["--seconds=0.05"]
    agents = [job.start(number, flags, words, script=INCREMENT) for number in (1, 2)]
    wait_for_step(job.share, 10)
    status = job.machines[2].elaunch(["status", "job", "--json"]).wait(DEADLINE)
    wait_for_step(job.share, 30)
    os.kill(json.loads(status.stdout)["workers"][1]["pid"], SIGKILL)
    ended = [agent.wait(DEADLINE) for agent in agents]
    assert [done.returncode for done in ended] == [0, 0]
    assert ended[0].stdout.endswith(last_line(4))
    assert json.loads(max(job.share.glob("step_*.json")).read_text())["x"] == total(4)


@pytest.mark.trial
def test_sharded_on_two_nodes(cluster: Build) -> None:
    """Each node keeps the rows of its own ranks; the parts are put together in shared storage."""
    job = Job(cluster, "c10d", 2)
    flags = ["--nnodes=2", "--nproc-per-node=2", f"--checkpoint-dir={job.share / 'ckpt'}"]
    agents = [job.start(number, flags, script=SHARDED) for number in (1, 2)]
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [0, 0]
    assert_parts(job.share / "ckpt", 4)
    for number in (1, 2):
        argv = ["metrics", "job", "--group=training", "--json"]
        shown = job.machines[number].elaunch(argv).wait(DEADLINE).stdout
        ranks = {json.loads(line)["rank"] for line in shown.splitlines()}
        assert ranks == {number * 2 - 2, number * 2 - 1} and shown.count("\n") == 50


@pytest.mark.trial
def test_own_launcher_on_two_nodes(cluster: Build) -> None:
    """One launcher per node; the ranks know each other by the numbers that it made."""
    job = Job(cluster, "c10d", 2)
    flags, env = ["--nnodes=2", "--nproc-per-node=1"], {"SLOTS": "2"}
    agents = [
        job.start(number, flags, ["launcher"], script=OWN_LAUNCHER, env=env) for number in (1, 2)
    ]
    ended = [agent.wait(DEADLINE) for agent in agents]
    assert [(done.returncode, done.stdout) for done in ended] == [(0, last_line(4)), (0, "")]


# ── the tutorial as it stands ────────────────────────────────────────────────────────────────────

TUTORIAL = Path(__file__).parent / "jobs" / "tutorial.py"


def start_tutorial(elaunch: Launcher, seconds: float, *flags: str, run: str = "job") -> Running:
    """Start it with two ranks; a step takes ``seconds``."""
    argv = ["run", f"--run-id={run}", "--nproc-per-node=2", "--max-restarts=1", *FORK]
    own = [] if flags else [f"--checkpoint-dir={elaunch.directory / 'ck'}"]
    return elaunch.start([*argv, *own, *flags, TUTORIAL, "60", str(seconds)])


def wait_for_commits(elaunch: Launcher, count: int) -> None:
    """Wait until so many checkpoints are there."""
    storage = open_storage(elaunch.directory / "ck")
    wait_until(lambda: len(storage.listed()) >= count, DEADLINE, f"{count} checkpoints")


def test_the_tutorial_as_it_stands(elaunch: Launcher) -> None:
    """A rank is killed, then the job is preempted: x is that of a run without faults."""
    running = start_tutorial(elaunch, 0.1)
    wait_for_commits(elaunch, 1)
    workers = json.loads(elaunch.run(["status", "job", "--json"]).stdout)["workers"]
    os.kill(workers[1]["pid"], SIGKILL)
    running.wait_for_line("begins with x=")
    wait_for_commits(elaunch, 3)
    assert elaunch.run(["preempt", "job"]).returncode == 0
    assert running.wait(DEADLINE).returncode == 75
    last = open_storage(elaunch.directory / "ck").listed()[-1].step
    done = start_tutorial(elaunch, 0.0).wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"begins with x={3 * last} at {last}\nx is 180\n"


@pytest.mark.trial
def test_a_new_run_from_the_weights_of_another(elaunch: Launcher) -> None:
    """--init-from: the tutorial begins at step 0; killed, it goes on from its own checkpoints."""
    assert start_tutorial(elaunch, 0.0).wait(DEADLINE).returncode == 0
    origin, own = elaunch.directory / "ck", elaunch.directory / "new"
    flags = [f"--checkpoint-dir={own}", f"--init-from={origin}"]
    running = start_tutorial(elaunch, 0.1, *flags, run="new")
    running.wait_for_line("begins with x=180 at 0")
    wait_until(lambda: open_storage(own).listed() != [], DEADLINE, "a checkpoint")
    workers = json.loads(elaunch.run(["status", "new", "--json"]).stdout)["workers"]
    os.kill(workers[0]["pid"], SIGKILL)
    done = running.wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    again = done.stdout.splitlines()[1]
    step = int(again.rpartition(" ")[2])
    assert again == f"begins with x={180 + 3 * step} at {step}" and step > 0
    assert done.stdout.endswith("x is 360\n")
