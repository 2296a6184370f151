"""``elaunch.info()`` and ``elaunch.latest_checkpoint()``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elaunch
from elaunch.errors import PlacementError
from elaunch.training.launch.info import read
from tests.launching import Launcher
from tests.training.launch.test_placement import ELAUNCH, SLURM, TORCH, open_mpi

RESUMED = ELAUNCH | {
    "ELAUNCH_RESTART_REASON": "rank 1 exited with code 7",
    "ELAUNCH_CHECKPOINT_DIR": "/saves",
    "ELAUNCH_RESUME_FROM": "/saves/step_10.pt",
    "ELAUNCH_RESUME_STEP": "10",
}


def test_all_facts_under_elaunch() -> None:
    """Determined's five facts under their names here, and what goes beyond."""
    info = read(RESUMED)
    assert info.node_addrs == ("10.0.0.1", "10.0.0.2")
    assert (info.node_rank, info.nodes) == (1, 2)
    assert (info.slots, info.slot_ids) == (2, (0, 1))
    assert (info.rank, info.local_rank, info.world_size) == (3, 1, 4)
    assert (info.resume_from, info.resume_step) == (Path("/saves/step_10.pt"), 10)
    assert (info.run_id, info.round, info.launcher) == ("job", 5, "elaunch")
    assert info.restart_reason == "rank 1 exited with code 7"
    assert info.checkpoint_dir == Path("/saves")


def test_a_fresh_start() -> None:
    """Empty variables are no checkpoint."""
    fresh = read(RESUMED | {"ELAUNCH_RESUME_FROM": "", "ELAUNCH_RESUME_STEP": ""})
    assert (fresh.resume_from, fresh.resume_step) == (None, None)
    unnumbered = read(RESUMED | {"ELAUNCH_RESUME_STEP": ""})
    assert unnumbered.resume_from is not None and unnumbered.resume_step is None


def test_under_other_launchers() -> None:
    """What they say of the nodes; nothing to resume from."""
    assert read(TORCH).node_addrs == ()
    assert read(TORCH).run_id == "job"
    assert read(SLURM).node_addrs == ("n07", "n08")
    assert read(open_mpi(1, 2, 1, 2)).node_addrs == ("127.0.0.1",)
    alone = read({"ELAUNCH_RESUME_FROM": "/left/over"})
    assert (alone.launcher, alone.resume_from, alone.world_size) == ("alone", None, 1)


def test_a_step_that_is_none() -> None:
    """Named."""
    with pytest.raises(PlacementError, match="ELAUNCH_RESUME_STEP='x'"):
        read(RESUMED | {"ELAUNCH_RESUME_STEP": "x"})


def test_it_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public names, without init."""
    for name, value in RESUMED.items():
        monkeypatch.setenv(name, value)
    assert elaunch.info() == read(RESUMED)
    assert elaunch.latest_checkpoint() == Path("/saves/step_10.pt")


def test_hyperparameters() -> None:
    """Those of the job file, under whatever launcher; what is none is named."""
    info = read(TORCH | {"ELAUNCH_HPARAMS": '{"lr": 0.1, "layers": [1, 2]}'})
    assert info.hparams == {"lr": 0.1, "layers": [1, 2]}
    assert read(TORCH).hparams == {}
    assert hash(info) is not None
    for text in ("[1]", "{"):
        with pytest.raises(PlacementError, match="ELAUNCH_HPARAMS="):
            read(TORCH | {"ELAUNCH_HPARAMS": text})


def test_nothing_heavy_is_imported() -> None:
    """A script pays for what it uses."""
    code = "import sys, elaunch; elaunch.info(); print([m for m in ('torch', 'numpy', 'asyncio', "
    code += "'multiprocessing', 'psutil', 'click') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


SCRIPT = """
import elaunch, json, os, sys, time
from pathlib import Path

info = elaunch.info()
before = elaunch.latest_checkpoint()
saves = info.checkpoint_dir
if info.round == 1 and info.rank == 0:
    (saves / "step_10.pt").rename(saves / "step_20.pt")  # a newer one, meanwhile
facts = {name: getattr(info, name) for name in
         ("round", "rank", "node_rank", "slots", "world_size", "resume_step", "launcher")}
facts |= {"addrs": info.node_addrs, "from": str(info.resume_from), "latest": str(before),
          "same": before == elaunch.latest_checkpoint(), "reason": bool(info.restart_reason)}
os.write(1, (json.dumps(facts) + "\\n").encode())
if info.round == 0:
    (saves / f"up{info.rank}").touch()
    if info.rank == 1:
        import torch
        while not (saves / "up0").exists():
            time.sleep(0.01)
        torch.save({"step": 10}, saves / "part")
        (saves / "part").rename(saves / "step_10.pt")
        sys.exit(7)
    time.sleep(600)
"""


@pytest.mark.slow
def test_in_both_rounds_of_a_real_job(elaunch: Launcher, tmp_path: Path) -> None:
    """None at the first start; after a restart the same path and step on every rank."""
    saves = tmp_path / "saves"
    saves.mkdir()
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--checkpoint-dir={saves}"]
    flags += ["--checkpoint-glob=step_*.pt"]
    done = elaunch.run(["run", *flags, script])
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    for round_number, chosen in ((0, "None"), (1, str(saves / "step_10.pt"))):
        rows = sorted((f for f in facts if f["round"] == round_number), key=lambda f: f["rank"])
        assert [row["rank"] for row in rows] == [0, 1]
        for row in rows:
            assert (row["from"], row["latest"], row["same"]) == (chosen, chosen, True)
            assert row["resume_step"] == (10 if round_number else None)
            assert row["reason"] is bool(round_number)
            assert (row["node_rank"], row["slots"], row["world_size"]) == (0, 2, 2)
            assert row["launcher"] == "elaunch" and len(row["addrs"]) == 1


@pytest.mark.slow
def test_hyperparameters_of_a_real_job(elaunch: Launcher, tmp_path: Path) -> None:
    """By ``info`` and by the context; a job inside of it has its own, or none."""
    script, inner, file = tmp_path / "s.py", tmp_path / "inner.py", tmp_path / "job.yaml"
    inner.write_text("import elaunch; print('inner', dict(elaunch.info().hparams), flush=True)")
    script.write_text(
        "import elaunch, subprocess, sys\n"
        "with elaunch.init(announce=False) as ctx:\n"
        "    print(dict(ctx.info.hparams), flush=True)\n"
        f"run = [sys.executable, '-m', 'elaunch', 'run', {str(inner)!r}]\n"
        "subprocess.run(run, check=True)\n"
    )
    file.write_text(f"entrypoint: {script}\nhyperparameters: {{lr: 0.1, tags: [a, b]}}\n")
    done = elaunch.run(["run", "-f", file])
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == ["{'lr': 0.1, 'tags': ['a', 'b']}", "inner {}"]
