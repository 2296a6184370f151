"""Every rank resumes from the same newest complete checkpoint, written by a tree that is dead."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import makers
from tests.integration.jobs import FORK, both_methods
from tests.integration.test_restart import shown, state
from tests.integration.watching import act, agent_lines
from tests.launching import Launcher, wait_until

pytestmark = pytest.mark.slow

Method = Sequence[str]
RESUME = "show=ELAUNCH_RESUME_FROM,ELAUNCH_RESUME_STEP,ELAUNCH_CHECKPOINT_DIR"


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Return the checkpoint directory of one test."""
    path = tmp_path / "saves"
    path.mkdir()
    return path


def flags(saves: Path, *more: str) -> list[str]:
    """Return the flags for files that ``torch.save`` wrote."""
    return [f"--checkpoint-dir={saves}", "--checkpoint-glob=step_*.pt", *more]


def resumed(stdout: str, number: int, nproc: int = 2) -> tuple[str, str]:
    """Return what all ranks of a round were told to resume from, and the step."""
    told = shown(stdout)
    answers = {
        (told[number, rank]["ELAUNCH_RESUME_FROM"], told[number, rank]["ELAUNCH_RESUME_STEP"])
        for rank in range(nproc)
    }
    assert len(answers) == 1
    return answers.pop()


@both_methods
def test_a_restart_resumes_from_what_the_last_round_saved(
    elaunch: Launcher, method: Method, saves: Path
) -> None:
    """The first start is a fresh one; all ranks are told the same, and the record has it."""
    words = [RESUME, f"ckpt={saves}", f"meet={saves}", "1r0:exit=7", "r0:wait"]
    done = elaunch.run(act(method, *words, nproc=3, flags=flags(saves, "--max-restarts=1")))
    assert done.returncode == 0
    assert resumed(done.stdout, 0, 3) == ("", "")
    assert resumed(done.stdout, 1, 3) == (str(saves / "step_10.pt"), "10")
    assert {told["ELAUNCH_CHECKPOINT_DIR"] for told in shown(done.stdout).values()} == {str(saves)}
    path = str(saves / "step_10.pt")
    record = state(elaunch)
    assert record["checkpoint"] == {"path": path, "step": 10, "format": "torch.save"}
    assert [entry["resumed_step"] for entry in record["history"]] == [None, 10]
    assert re.search(r"restart 1 of 1 since the last progress, from step 10", done.stderr)


def test_the_first_start_resumes_from_an_earlier_job(elaunch: Launcher, saves: Path) -> None:
    """As a requeued job does."""
    for number in range(3):
        done = elaunch.run(act(FORK, RESUME, f"ckpt={saves}", flags=flags(saves)))
        before = "" if number == 0 else str(10 * number)
        assert resumed(done.stdout, 0)[1] == before
    assert state_of_last(elaunch)["checkpoint"]["step"] == 20


def state_of_last(elaunch: Launcher) -> dict[str, Any]:
    """Return the record of the newest of several runs."""
    records = [
        json.loads(path.read_text()) for path in elaunch.state.glob("elaunch/runs/*/state.json")
    ]
    newest: dict[str, Any] = max(records, key=lambda record: record["started_at"])
    return newest


def test_a_torn_one_is_passed_over_with_a_line(elaunch: Launcher, saves: Path) -> None:
    """The newest is cut short, the one before it is empty; each is named once."""
    for step in (20, 120, 130):
        makers.saved(saves / f"step_{step}.pt")
    makers.truncate(saves / "step_130.pt", 500)
    makers.truncate(saves / "step_120.pt", 0)
    words = [RESUME, f"meet={saves}", "1r0:exit=7", "r0:wait"]
    done = elaunch.run(act(FORK, *words, flags=flags(saves, "--max-restarts=1")))
    assert done.returncode == 0
    for number in range(2):
        assert resumed(done.stdout, number) == (str(saves / "step_20.pt"), "20")
    passed = [line for line in agent_lines(done.stderr) if line.startswith("skipped")]
    assert [line.partition(": ")[0] for line in passed] == [
        f"skipped {saves}/step_130.pt",
        f"skipped {saves}/step_120.pt",
    ]
    assert all(line.partition(": ")[2] for line in passed)


SAVES_LIKE_A_TRAINER = """
import os, shutil, signal, sys, time
from pathlib import Path
rank, start = os.environ["RANK"], int(os.environ["ELAUNCH_RESUME_STEP"] or 0)
print(f"rank={rank} from {start}", flush=True)
whole, saves = map(Path, sys.argv[1:])
for step in (start + 10, start + 20):
    path = saves / f"checkpoint-{step}"
    path.mkdir(exist_ok=True)
    state = path / "trainer_state.json"
    if rank == "2" and step == 20 and start == 0:
        while not state.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    shutil.copy(whole / "rng_state.pth", path / f"rng_state_{rank}.pth")
    if rank == "0":
        for name in ("model.safetensors", "training_args.bin"):
            shutil.copy(whole / name, path)
        while len([*path.glob("rng_*")]) < (2 if start == 0 and step == 20 else 3):
            time.sleep(0.01)
        state.with_suffix(".tmp").write_text(f'{{"global_step": {step}}}')
        state.with_suffix(".tmp").rename(state)
    while not state.exists():
        time.sleep(0.01)
"""


def test_a_trainers_checkpoint_without_the_last_ranks_random_state(
    elaunch: Launcher, saves: Path, tmp_path: Path
) -> None:
    """The rank is killed when all others have saved; its file is the only one that is missing."""
    whole = makers.trainer(tmp_path)
    makers.training_arguments(whole, 3)
    makers.saved(whole / "rng_state.pth")
    script = tmp_path / "trainer.py"
    script.write_text(SAVES_LIKE_A_TRAINER)
    flags = [f"--checkpoint-dir={saves}", "--max-restarts=1", "--nproc-per-node=3"]
    done = elaunch.run(["run", *FORK, *flags, script, whole, saves])
    assert done.returncode == 0, done.stderr
    assert f"skipped {saves}/checkpoint-20: missing: rng_state_2.pth" in done.stderr
    assert [done.stdout.count(f"rank={rank} from 10\n") for rank in range(3)] == [1, 1, 1]
    assert state(elaunch)["history"][1]["resumed_step"] == 10


def test_a_placeholder_in_the_arguments(elaunch: Launcher, saves: Path) -> None:
    """Dropped with its option in round 0, filled in round 1."""
    words = [f"ckpt={saves}", f"meet={saves}", "1r0:exit=7", "r0:wait", "argv"]
    words += ["--resume", "{checkpoint}", "--from={checkpoint_step}", "--lr", "{lr}", "end"]
    done = elaunch.run(act(FORK, *words, flags=flags(saves, "--max-restarts=1")))
    assert done.returncode == 0
    filled = ["--resume", f"{saves}/step_10.pt", "--from=10", "--lr", "{lr}", "end"]
    assert sorted(done.stdout.splitlines()) == [f"{rank}.1 argv={filled}" for rank in range(2)]
    fresh = elaunch.run(act(FORK, *words[-7:], flags=[f"--checkpoint-dir={saves}/none"]))
    left = ["--lr", "{lr}", "end"]
    assert sorted(fresh.stdout.splitlines()) == [f"{rank}.0 argv={left}" for rank in range(2)]


@both_methods
def test_a_daemon_of_the_old_round_cannot_interfere(
    elaunch: Launcher, method: Method, saves: Path
) -> None:
    """It would write a newer checkpoint half a second after its worker's death."""
    words = [f"r0:ckpt={saves}", f"1r0:later={saves}", f"r0:meet={saves}", "1r0:exit=7", "r0:wait"]
    words += [RESUME, "sleep=0.8"]
    done = elaunch.run(act(method, *words, flags=flags(saves, "--max-restarts=1")))
    assert done.returncode == 0
    assert resumed(done.stdout, 1) == (str(saves / "step_10.pt"), "10")
    assert not (saves / "step_999.pt").exists()


def test_a_directory_that_cannot_be_read_any_more_ends_the_job(
    elaunch: Launcher, saves: Path
) -> None:
    """Starting afresh would train over what is there."""
    words = [f"ckpt={saves}", f"1r0:until={saves}.moved/step_10.pt", "1r0:exit=7", "wait"]
    running = elaunch.start(act(FORK, *words, flags=flags(saves, "--max-restarts=1")))
    wait_until(lambda: (saves / "step_10.pt").exists())
    moved = saves.with_name("saves.moving")
    saves.rename(moved)
    saves.write_text("a file is no directory")
    moved.rename(f"{saves}.moved")
    done = running.wait()
    assert done.returncode == 74
    assert "cannot look for checkpoints" in done.stderr
    assert "rank 1 (local_rank 1" in done.stderr  # the failure is reported all the same


def test_files_that_nobody_understands(elaunch: Launcher, saves: Path) -> None:
    """A restart says what it throws away; a job that must resume ends instead."""
    (saves / "weights.npz").write_bytes(b"0")
    words = [f"ckpt={saves}", "0r0:exit=7"]
    line = [f"--checkpoint-dir={saves}", "--max-restarts=1"]
    done = elaunch.run(act(FORK, *words, nproc=1, flags=line))
    assert done.returncode == 0
    told = [text for text in agent_lines(done.stderr) if "no checkpoint is recognised" in text]
    assert len(told) == 2 and "workers start without one (--require-resume makes" in told[1]
    again = elaunch.run(act(FORK, *words, nproc=1, flags=[*line, "--require-resume"]))
    assert again.returncode == 74
    assert f"none of the 2 entries of {saves} can be resumed from" in again.stderr
    assert "leave the flag out to start afresh" in again.stderr
