"""The examples train to their goal under each launcher, and a kill changes no bit of the result.

The reference is an undisturbed run with two workers. Interrupted runs save at the same steps, so
their last checkpoint must hold the same bits, under torchrun too (a trial).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launching import TORCHRUN, Launcher

ROOT = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Six epochs of 22 steps; the last step is saved, and most others that are saved are in mid-epoch.
ARGUMENTS = "--epochs 6 --save-every 12 --log-every 1".split()
LAST = "step_00000132"
SLOWED = ["--step-seconds", "0.02"]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Example:
    """One example, and how to read the checkpoints that it writes."""

    name: str
    suffix: str
    run_options: tuple[str, ...]
    read: Callable[[Path, Path], dict[str, Any]]

    @property
    def script(self) -> Path:
        """Its file."""
        return ROOT / "examples" / self.name


def read_file(path: Path, _scratch: Path) -> dict[str, Any]:
    """Return what a torch.save file holds."""
    import torch

    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def read_shards(path: Path, scratch: Path) -> dict[str, Any]:
    """Return what a DCP directory holds, put together."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = scratch / f"{path.parent.name}.pt"
    dcp_to_torch_save(path, whole)
    return read_file(whole, scratch)


EXAMPLES = [
    pytest.param(
        Example("digits_ddp.py", ".pt", ("--checkpoint-glob", "step_*.pt"), read_file),
        id="digits_ddp.py",
    ),
    pytest.param(
        Example("digits_dcp.py", "", (), read_shards),
        id="digits_dcp.py",
        marks=pytest.mark.trial,
    ),
]


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    """Return each example in turn."""
    chosen: Example = request.param
    return chosen


@pytest.fixture(scope="module")
def reference(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the last checkpoint of an undisturbed run."""
    launcher = Launcher(tmp_path_factory.mktemp("reference"), forks=True)
    checkpoints = launcher.directory / "reference"
    options = ["--nproc-per-node=2", "--checkpoint-dir", checkpoints, *example.run_options]
    done = launcher.run(["run", *options, example.script, *ARGUMENTS], env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    yield checkpoints / (LAST + example.suffix)
    launcher.close()


def torchrun(launcher: Launcher, example: Example, checkpoints: Path, *more: str) -> Any:
    """Start an example with two workers under torchrun."""
    argv = [*TORCHRUN, "--nproc-per-node", "2", example.script, "--checkpoint-dir", checkpoints]
    return launcher.start_command([*argv, *ARGUMENTS, *more], env=ONE_THREAD)


def finish_under_torchrun(launcher: Launcher, example: Example, checkpoints: Path) -> Any:
    """Run an example under torchrun to its end; return what the last run printed.

    torch 2.13 may abort a process that has finished: a thread of gloo that still lets go of its
    last tensor asks for Python's lock, which the interpreter does not give any more. In a worker
    that elaunch forks this is mended (elaunch.server.torchfix); under torchrun another run
    goes on.
    """
    done = torchrun(launcher, example, checkpoints).wait()
    for _ in range(3):
        if done.returncode == 0 or "terminate called without an active" not in done.stderr:
            break
        again = torchrun(launcher, example, checkpoints).wait()
        again.stdout = done.stdout + again.stdout
        done = again
    return done


def assert_same(example: Example, left: Path, right: Path, scratch: Path) -> None:
    """Compare two checkpoints bit by bit."""
    import torch

    def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        pairs = value.items() if isinstance(value, dict) else ()
        pairs = enumerate(value) if isinstance(value, list) else pairs
        inner = [item for key, part in pairs for item in flat(part, f"{name}/{key}")]
        yield from inner or [(name, value)]

    one, two = (dict(flat(example.read(path, scratch))) for path in (left, right))
    assert one.keys() == two.keys() and len(one) > 10
    for name, value in one.items():
        same = torch.equal(value, two[name]) if torch.is_tensor(value) else value == two[name]
        assert same, f"{name} differs"


@pytest.mark.trial
def test_stopped_and_started_again_under_torchrun(
    elaunch: Launcher, example: Example, reference: Path, tmp_path: Path
) -> None:
    """Without elaunch's help the script finds its own newest checkpoint."""
    checkpoints = tmp_path / "checkpoints"
    first = torchrun(elaunch, example, checkpoints, *SLOWED)
    first.wait_for_line("^step 70 ")
    first.send_signal(signal.SIGTERM)
    assert first.wait().returncode != 0
    done = finish_under_torchrun(elaunch, example, checkpoints)
    assert done.returncode == 0, done.stderr
    assert "\nstep 60 " not in done.stdout, "trained again from before the newest checkpoint"
    assert re.search(r"^resumed from step_000000(60|72|84)\b", done.stdout, re.MULTILINE)
    assert_same(example, checkpoints / (LAST + example.suffix), reference, tmp_path)


@pytest.mark.trial
def test_a_worker_is_killed_under_elaunch(
    elaunch: Launcher, example: Example, reference: Path, tmp_path: Path
) -> None:
    """The group restarts once, from a checkpoint, and ends with the bits of the undisturbed run."""
    checkpoints = tmp_path / "checkpoints"
    options = ["--nproc-per-node=2", "--max-restarts=2", "--rdzv-id=job"]
    options += ["--checkpoint-dir", str(checkpoints), *example.run_options]
    words = [*options, str(example.script), *ARGUMENTS, *SLOWED]
    job = elaunch.start(["run", *words], env=ONE_THREAD)
    job.wait_for_line("^step 30 ")
    workers = json.loads(elaunch.run(["status", "--json", "job"]).stdout)["workers"]
    job.wait_for_line("^step 70 ")
    os.kill(next(worker["pid"] for worker in workers if worker["rank"] == 1), signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^resumed from step_0000", done.stdout, re.MULTILINE)) == 1
    assert json.loads(elaunch.run(["status", "--json", "job"]).stdout)["round"] == 1
    assert_same(example, checkpoints / (LAST + example.suffix), reference, tmp_path)


@pytest.mark.trial
def test_one_worker_goes_on_alone_to_the_goal(
    elaunch: Launcher, example: Example, reference: Path, tmp_path: Path
) -> None:
    """Plain ``python script``, from what two workers saved in mid-epoch, to more than 95 %."""
    name = "step_00000060" + example.suffix
    copy = shutil.copytree if example.suffix == "" else shutil.copy
    (tmp_path / "checkpoints").mkdir()
    copy(reference.with_name(name), tmp_path / "checkpoints" / name)
    words = "--checkpoint-dir checkpoints --log-every 1".split()
    argv = [sys.executable, example.script, *words]
    done = elaunch.start_command(argv, env=ONE_THREAD).wait()
    steps = [int(step) for step in re.findall(r"^step (\d+) ", done.stdout, re.MULTILINE)]
    assert steps == list(range(61, 331)), done.stderr
    match = re.search(r"^finished: step 330 test accuracy ([\d.]+)%$", done.stdout, re.MULTILINE)
    assert match and float(match[1]) > 95, done.stdout


def test_demo(elaunch: Launcher) -> None:
    """``make demo`` holds what it promises, and tells it."""
    done = elaunch.start_command([sys.executable, ROOT / "scripts" / "demo.py"]).wait(280.0)
    assert done.returncode == 0, done.stdout + done.stderr
    for heading in ("What happened", "What was lost", "How long the recovery took", "one restart"):
        assert heading in done.stdout
