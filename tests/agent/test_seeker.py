"""The search for the next round's checkpoint, as the loop and the coordinator ask for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.agent import events, seeker
from elaunch.config import Settings, resolve
from elaunch.errors import CheckpointError
from elaunch.rendezvous.view import Found, Search


def settings(directory: Path, cwd: Path) -> Settings:
    """Return the settings of a job with a checkpoint directory."""
    line = {"checkpoint-dir": str(directory), "checkpoint-glob": "step_*.pt"}
    script = cwd / "train.py"
    script.write_text("")
    return resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, cwd)


def test_every_node_is_told_what_the_coordinator_found(tmp_path: Path) -> None:
    """The newest, as plain data; the loop hears of it too."""
    import torch

    for step in (2, 10):
        torch.save({"step": step}, tmp_path / f"step_{step}.pt")
    posted: list[events.Event] = []
    found = seeker.for_all_nodes(settings(tmp_path, tmp_path), posted.append)(Search()).checkpoint
    assert found is not None
    assert (found["path"], found["step"]) == (str(tmp_path / "step_10.pt"), 10)
    (event,) = posted
    assert isinstance(event, events.CheckpointChosen)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    """A directory that is empty."""
    (tmp_path / "ck").mkdir()
    assert (
        seeker.for_all_nodes(settings(tmp_path / "ck", tmp_path), lambda _: None)(Search())
        == Found()
    )


def test_storage_that_cannot_be_read_is_no_fresh_start(tmp_path: Path) -> None:
    """Nobody may begin anew because a disk is away for a moment."""
    made = settings(tmp_path / "ck", tmp_path)
    if (tmp_path / "ck").is_dir():
        (tmp_path / "ck").rmdir()
    (tmp_path / "ck").write_text("a file where the directory was")
    with pytest.raises(CheckpointError, match="cannot look for checkpoints"):
        seeker.for_all_nodes(made, lambda _: None)(Search())
