"""``ctx.train.steps`` in real jobs: the same bits in every world and launcher, and after kills."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.jobs import FORK
from tests.launching import TORCHRUN, Launcher

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]

JOB = Path(__file__).parent / "jobs" / "stepping.py"
STEPS = 9


@dataclass(frozen=True)
class Result:
    """What rank 0 has printed: the digest, and the loss and weights of each step, by its number."""

    weights: str
    losses: dict[int, str]

    def is_like(self, other: Result) -> bool:
        """Return whether the weights are the same, and each step that both have."""
        both = self.losses.keys() & other.losses.keys()
        return self.weights == other.weights and all(
            self.losses[step] == other.losses[step] for step in both
        )


def result(stdout: str) -> Result:
    """Read it."""
    match = re.search(r"^weights (\w+) ", stdout, re.MULTILINE)
    assert match is not None, stdout
    found = re.findall(r"^loss (\d+) (.*)$", stdout, re.MULTILINE)
    return Result(match[1], {int(number): loss for number, loss in found})


def train(elaunch: Launcher, size: int, *words: str, flags: tuple[str, ...] = ()) -> Result:
    """Run it on some ranks under elaunch."""
    command = ["run", f"--nproc-per-node={size}", *FORK, *flags, JOB, *words]
    done = elaunch.run(command, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stdout + done.stderr
    return result(done.stdout)


@pytest.mark.parametrize("sizes", [(3, 5), pytest.param((4, 6), marks=pytest.mark.trial)])
def test_worlds_of_1_to_6_have_the_same_bits(elaunch: Launcher, sizes: tuple[int, ...]) -> None:
    """With dropout, Adam, clipping, bf16, noise in the data, loader workers, and a short step."""
    alone = train(elaunch, 1, "autocast=bf16")
    assert len(alone.losses) == STEPS
    assert train(elaunch, 2, "autocast=bf16", "workers=2") == alone
    for size in sizes:
        assert train(elaunch, size, "autocast=bf16") == alone


def test_torchrun_and_a_script_alone_have_them_too(elaunch: Launcher) -> None:
    """Whatever the number of threads that the launcher sets; in bf16, too."""
    words = ("micro=4", "autocast=bf16")
    ours = train(elaunch, 2, *words)
    alone = elaunch.start_command([sys.executable, JOB, *words]).wait()
    assert alone.returncode == 0, alone.stderr
    assert result(alone.stdout) == ours
    assert train(elaunch, 5, *words) == ours, "two of five ranks compute nothing"
    command = [*TORCHRUN, "--nproc-per-node=3", JOB, *words]
    torchrun = elaunch.start_command(command).wait()
    assert torchrun.returncode == 0, torchrun.stderr
    assert result(torchrun.stdout) == ours


@pytest.mark.parametrize("every", ["2", "auto"])
def test_a_kill_changes_no_bit(elaunch: Launcher, every: str) -> None:
    """The next round goes on from the newest checkpoint, in mid-epoch."""
    until = "until=26" if every == "auto" else "until=9"
    undisturbed = train(elaunch, 1, until)
    place = elaunch.directory / "ckpts"
    flags = ("--max-restarts=1", f"--checkpoint-dir={place}")
    kill = "kill=24" if every == "auto" else "kill=7"
    killed = train(elaunch, 3, f"every={every}", kill, until, "call=1", flags=flags)
    assert killed.is_like(undisturbed)
    assert 1 not in killed.losses, "it has begun anew"
    newest = elaunch.run(["checkpoints", "ls", place]).stdout
    assert f"step-{int(until[6:]):08d}" in newest


def test_it_ends_in_time_and_goes_on_with_another_world(elaunch: Launcher) -> None:
    """Preempted at a step, saved there; the next start goes on with other ranks."""
    undisturbed = train(elaunch, 1)
    place = elaunch.directory / "ckpts"
    flags = ["--rdzv-id=again", f"--checkpoint-dir={place}", *FORK]
    command = ["run", "--nproc-per-node=4", *flags, JOB, "every=100", "pause=5"]
    job = elaunch.start(command, env={"OMP_NUM_THREADS": "1"})
    job.wait_for_line("^paused")
    assert elaunch.run(["preempt", "again"]).returncode == 0
    done = job.wait()
    assert done.returncode == 75, done.stderr
    assert re.search(r"^weights \w+ 5 True$", done.stdout, re.MULTILINE)
    after = train(elaunch, 3, "every=100", flags=tuple(flags))
    assert after.is_like(undisturbed)
    assert sorted(after.losses) == [6, 7, 8, 9]


@pytest.mark.trial
def test_worlds_that_change_have_the_losses_of_one(elaunch: Launcher) -> None:
    """4 ranks, 2, 3, 1, 4: at each step, and the weights in the end."""
    undisturbed = train(elaunch, 1, "autocast=bf16")
    place = elaunch.directory / "ckpts"
    flags = ["--rdzv-id=again", f"--checkpoint-dir={place}", *FORK, JOB, "every=100"]
    found: dict[int, str] = {}
    for size, pause in ((4, 2), (2, 4), (3, 5), (1, 7), (4, 0)):
        command = ["run", f"--nproc-per-node={size}", *flags, "autocast=bf16", f"pause={pause}"]
        job = elaunch.start(command, env={"OMP_NUM_THREADS": "1"})
        if pause:
            job.wait_for_line("^paused")
            assert elaunch.run(["preempt", "again"]).returncode == 0
        done = job.wait()
        assert done.returncode == (75 if pause else 0), done.stderr
        last = result(done.stdout)
        found |= last.losses
    assert Result(last.weights, found) == undisturbed


def test_loops_that_follow_each_other_go_on(elaunch: Launcher) -> None:
    """Killed in the second, whose optimizer is another: it goes on there."""
    script = elaunch.directory / "loops.py"
    script.write_text(LOOPS)

    def run(name: str, *words: str) -> tuple[str, list[str]]:
        flags = ["--nproc-per-node=2", "--max-restarts=1", *FORK]
        flags.append(f"--checkpoint-dir={elaunch.directory / name}")
        done = elaunch.run(["run", *flags, script, *words], env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1], done.stdout.splitlines()

    undisturbed, _ = run("undisturbed")
    found, lines = run("killed", "5")
    assert found == undisturbed
    assert "round 1: 4 and 0 steps, then 2" in lines
    ls = elaunch.run(["checkpoints", "ls", elaunch.directory / "killed"]).stdout
    assert "step-00000008" in ls


LOOPS = """
import hashlib, os, signal, sys
import torch
import elaunch

with elaunch.init(announce=False) as ctx:
    ctx.distributed.barrier()  # so that all begin anew when one dies
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    first = torch.optim.Adam(model.parameters(), lr=0.1)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for optimizer in (first, second):
        state = {"model": model, "optimizer": optimizer}
        loop = ctx.train.steps(
            state, batch=lambda step, leaf: torch.rand(2, 4), global_batch=4, micro_batch=2,
            until=4, save_every=1, keep=elaunch.Keep(last=3),
        )
        done = 0
        seen.append(loop.done)
        for step in loop:
            for x in step.micro_batches():
                step.backward(model(x).square().mean())
            step.apply(optimizer)
            done += 1
            if sys.argv[1:] and optimizer is second and step.number == 3 and not ctx.info.round:
                if ctx.distributed.rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        seen.append(done)
    if ctx.distributed.rank == 0:
        print(f"round {ctx.info.round}: {seen[0]} and {seen[1]} steps, then {seen[3]}")
        print(hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
"""


def test_a_bad_micro_batch_is_left_out_by_all_alike(elaunch: Launcher) -> None:
    """The same bits on one rank and on three, of which one alone has seen it."""
    words = ("bad=4.7", "on_bad=skip")
    assert train(elaunch, 1, *words) == train(elaunch, 3, *words)
    command = ["run", "--nproc-per-node=3", *FORK, JOB, "bad=4.7"]
    done = elaunch.run(command, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1
    assert (
        "NotFiniteError: step 4: not finite: the loss or gradients of micro-batch 7 (samples "
        in (done.stderr)
    )


CHECKED = ("samples=500", "batch=120", "until=4", "autocast=bf16")
"""480 micro-batches, of which some five are compared."""


def test_a_check_changes_no_bit(elaunch: Launcher) -> None:
    """Micro-batches are computed twice, and count once."""
    plain = train(elaunch, 3, *CHECKED)
    assert train(elaunch, 3, *CHECKED, "check=yes", "workers=1") == plain
    assert train(elaunch, 1, *CHECKED, "check=yes") == plain


@pytest.mark.parametrize(
    ("size", "fault", "who"),
    [
        (3, "spoil=2", r"rank 2 \(host \S+\) computed other bits than the rest, [23] of 5 times"),
        (3, "flip=2", r"rank 2 \(host \S+\) computed other bits than the rest, [23] of 5 times"),
        (2, "flip=1.once", r"rank 1 \(host \S+\) computed other bits than the rest, 1 of 4 times"),
        (
            2,
            "flip=0",
            r"rank 0 \(host \S+\), rank 1 \(host \S+\) computed different bits, and no maj",
        ),
        (1, "flip=0.once", r"rank 0 \(host \S+\) computed other bits than the rest, 1 of 4 times"),
    ],
)
def test_a_rank_that_computes_wrong_bits_is_named(
    elaunch: Launcher, size: int, fault: str, who: str
) -> None:
    """By all ranks, with its host, the step, the micro-batch and the samples."""
    command = ["run", f"--nproc-per-node={size}", *FORK, JOB, *CHECKED, "check=yes"]
    done = elaunch.run([*command, fault], env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1
    what = rf"BitsDifferError: step \d+: micro-batch \d+ \(samples \d+\): {who}"
    assert re.search(what, done.stderr), done.stderr


def test_a_check_may_only_warn(elaunch: Launcher) -> None:
    """Then the training goes on, and the metrics say in which steps bits differed."""
    command = ["run", "--nproc-per-node=3", "--rdzv-id=warns", *FORK, JOB, *CHECKED]
    done = elaunch.run([*command, "check=warn", "flip=2"], env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 2 \(host .*; the step goes on", done.stderr)
    assert '"differing"' in elaunch.run(["metrics", "warns", "--json"]).stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before, exceptions have no notes")
def test_an_error_in_a_micro_batch_has_its_number(elaunch: Launcher) -> None:
    """And the samples, in the traceback and in the report."""
    done = elaunch.run(["run", "--nproc-per-node=2", "--rdzv-id=it", *FORK, JOB, "raise=4.7"])
    assert done.returncode == 1
    note = r"ValueError: these samples\n *elaunch: in micro-batch 7 of step 4 \(samples \d+\)\n"
    assert re.search(note, done.stderr)
    assert "in micro-batch 7 of step 4" in elaunch.run(["why", "it"]).stdout


def test_metrics_are_in_the_run(elaunch: Launcher) -> None:
    """Of each step: the loss, and what was logged."""
    found = train(elaunch, 2, flags=("--rdzv-id=metrics",))
    shown = elaunch.run(["metrics", "metrics", "--json"]).stdout
    assert len(re.findall(r'"loss"', shown)) >= STEPS
    assert '"most"' in shown and len(found.losses) == STEPS


def test_the_example_keeps_its_promise(elaunch: Launcher) -> None:
    """Killed, and gone on with under another number of ranks: the digest of one process alone."""
    script = Path(__file__).parents[2] / "examples" / "digits_steps.py"
    alone = elaunch.start_command([sys.executable, script, "--epochs=3"]).wait()
    assert alone.returncode == 0, alone.stderr
    digest = alone.stdout.splitlines()[-1]
    assert digest.startswith("42 steps: ") and "epoch 2: " in alone.stdout
    command = ["run", "--nproc-per-node=3", "--max-restarts=1", "--rdzv-id=digits", *FORK]
    command += [f"--checkpoint-dir={elaunch.directory / 'ckpts'}", script, "--epochs=3"]
    job = elaunch.start([*command, "--save-every=5", "--step-seconds=0.05"])
    job.wait_for_line("^epoch 0")
    shown = json.loads(elaunch.run(["status", "digits", "--json"]).stdout)
    pids = [worker["pid"] for worker in shown["workers"]]
    os.kill(pids[1], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert "round 1 goes on: " in done.stderr
    assert done.stdout.splitlines()[-1] == digest


def test_the_transformer_has_one_digest(elaunch: Launcher) -> None:
    """On one rank and on three."""
    script = Path(__file__).parents[2] / "examples" / "chars_steps.py"
    alone = elaunch.start_command([sys.executable, script, "--steps=3"]).wait()
    assert alone.returncode == 0, alone.stderr
    digest = alone.stdout.splitlines()[-1]
    assert digest.startswith("3 steps: ")
    done = elaunch.run(["run", "--nproc-per-node=3", *FORK, script, "--steps=3"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == digest


@pytest.mark.trial
@pytest.mark.timeout(1000)
def test_kills_do_not_show_in_the_curve(elaunch: Launcher) -> None:
    """Of examples/chars_steps.py: what draws the curve of the page compares all bits."""
    script = Path(__file__).parents[2] / "scripts" / "docs" / "curve.py"
    picture = elaunch.directory / "curve.svg"
    words = ["--steps=30", "--every=5", "--ranks=3", f"--out={picture}"]
    done = elaunch.start_command([sys.executable, script, *words]).wait(900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^30 steps: \w+, [1-9]\d* kills, the same bits", done.stdout, re.MULTILINE)
    assert picture.read_text().count("<polyline") == 2


def test_the_script_of_the_page_runs(elaunch: Launcher) -> None:
    """As it stands there, on two ranks."""
    page = Path(__file__).parents[2] / "docs" / "steps.md"
    whole = re.search(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert whole is not None
    script, place = elaunch.directory / "train.py", elaunch.directory / "ckpts"
    script.write_text(whole[1])
    flags = ["--nproc-per-node=2", f"--checkpoint-dir={place}", *FORK]
    done = elaunch.run(["run", *flags, script])
    assert done.returncode == 0, done.stderr
    assert "step-00000200.r0" in elaunch.run(["checkpoints", "ls", place]).stdout
