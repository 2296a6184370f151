"""examples/ddp_checkpoint.py under the real commands: a kill changes no bit of its result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL

import pytest
import torch

from tests.launching import TORCHRUN, Launcher, Running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[2] / "examples" / "ddp_checkpoint.py"
DEADLINE = 120.0
STEPS = "--steps=60"
SLOWLY = ["--seconds=0.03"]
Word = str | Path


def start(elaunch: Launcher, launcher: str, words: Sequence[Word], directory: str) -> Running:
    """Start the example with two ranks."""
    place = elaunch.directory / directory
    env = {"OMP_NUM_THREADS": "1"}
    if launcher == "elaunch":
        flags = ["--nproc-per-node=2", "--max-restarts=1", f"--checkpoint-dir={place}"]
        return elaunch.start(["run", "--rdzv-id=job", *flags, SCRIPT, STEPS, *words], env=env)
    argv: list[Word] = [*TORCHRUN, "--nproc-per-node=2", SCRIPT, STEPS, *words]
    return elaunch.start_command(argv, env=env | {"ELAUNCH_CHECKPOINT_DIR": str(place)})


def result(running: Running) -> str:
    """Return the last line of a run that ends well: step and digest of the parameters."""
    done = running.wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ends at step 60: ")
    return last


def kill_a_worker(elaunch: Launcher, place: Path, rank: int) -> None:
    """SIGKILL a rank of the job that runs, when it has saved."""
    wait_until(lambda: list(place.glob("step-*/COMMIT")), DEADLINE, "a checkpoint")
    runs = json.loads(elaunch.run(["status", "--json"]).stdout)
    live = next(run for run in runs if run["state"] == "RUNNING")
    shown = json.loads(elaunch.run(["status", Path(live["dir"]).name, "--json"]).stdout)
    os.kill(shown["workers"][rank]["pid"], SIGKILL)


@pytest.mark.trial
def test_a_killed_rank_changes_nothing(elaunch: Launcher) -> None:
    """Momentum included; one file for torch.load can be made, without DDP's prefix."""
    wanted = result(start(elaunch, "elaunch", [], "undisturbed"))
    running = start(elaunch, "elaunch", SLOWLY, "ckpt")
    kill_a_worker(elaunch, elaunch.directory / "ckpt", 0)
    assert result(running) == wanted
    begun = [line for line in running.output().splitlines() if line.startswith("starts at")]
    assert len(begun) == 2 and begun[0] == "starts at step 0" and begun[1] > begun[0]
    # torchrun is started again: what it restarts itself may wait for ever in the old store.
    running = start(elaunch, "torchrun", SLOWLY, "torchrun")
    kill_a_worker(elaunch, elaunch.directory / "torchrun", 1)
    assert running.wait(DEADLINE).returncode != 0
    again = start(elaunch, "torchrun", [], "torchrun")
    assert result(again) == wanted
    assert not again.output().startswith("starts at step 0\n")
    for place in (elaunch.directory / "ckpt", elaunch.directory / "torchrun"):
        check_kept(elaunch, place)


def check_kept(elaunch: Launcher, place: Path) -> None:
    """The newest three, whole; each can be exported."""
    kept = sorted(path.name for path in place.glob("step-*"))
    assert [name[:13] for name in kept] == ["step-00000040", "step-00000050", "step-00000060"]
    file = place.with_suffix(".pt")
    assert elaunch.run(["checkpoints", "export", place, kept[-1], file]).returncode == 0
    saved = torch.load(file, weights_only=True)
    assert [*saved] == ["model", "optimizer"]
    assert not any(key.startswith("module.") for key in saved["model"])
    assert len(saved["optimizer"]["state"]) == 4


def test_alone(elaunch: Launcher) -> None:
    """Without a launcher."""
    place = {"ELAUNCH_CHECKPOINT_DIR": str(elaunch.directory / "ckpt"), "OMP_NUM_THREADS": "1"}
    argv: list[Word] = [sys.executable, SCRIPT, "--steps=20"]
    done = elaunch.start_command(argv, env=place).wait(DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("starts at step 0\nends at step 20: ")
