"""``load`` of one file of ``torch.save``: what ``save_ddp()`` has written, and others' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.training.checkpoint.state.perrank import PerRank
from tests.training.checkpoint.ddprig import Ranks, saved
from tests.training.checkpoint.models import plain, train


def trained(seed: int) -> dict[str, Any]:
    """Return a model and its optimizer after a step."""
    model = plain(seed)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def test_the_file_of_save_ddp(ranks: Ranks) -> None:
    """Modules, also from under DDP's prefix, optimizers, values, what each rank had of its own."""
    before = trained(1)
    weights = before["model"].state_dict()
    content = {
        "model": {f"module.{name}": value for name, value in weights.items()},
        "optimizer": before["optimizer"].state_dict(),
        "seen": {"epoch": 3, "rows": [torch.ones(2)]},
        "own": {"elaunch.per_rank": [{"at": 10}, {"at": 11}]},
    }

    def work(checkpoint: CheckpointContext, _: int) -> Any:
        saved(checkpoint, content, 5)
        own, rows = PerRank({"at": 0}), [torch.zeros(2)]
        state = {**trained(2), "seen": {"epoch": 0, "rows": rows}, "own": own}
        found = checkpoint.load(state)
        assert state["seen"]["epoch"] == 3 and rows[0].sum() == 2
        same = [torch.equal(value, weights[n]) for n, value in state["model"].state_dict().items()]
        moments = [
            one["exp_avg"].sum() for one in state["optimizer"].state_dict()["state"].values()
        ]
        wanted = [
            one["exp_avg"].sum() for one in before["optimizer"].state_dict()["state"].values()
        ]
        return found.step, own.value, all(same) and moments == wanted

    assert ranks.run(2, work).all() == [(5, {"at": 10}, True), (5, {"at": 11}, True)]


def test_another_state(ranks: Ranks) -> None:
    """Is an error that names the keys; without ``strict`` what both have is loaded."""
    content = {"model": nn.Linear(2, 2).state_dict(), "old": 1}

    def work(checkpoint: CheckpointContext, _: int) -> Any:
        saved(checkpoint, content, 1)
        state: dict[str, Any] = {"model": nn.Linear(2, 2), "new": 2}
        with pytest.raises(CheckpointError, match="only the file has"):
            checkpoint.load(state)
        checkpoint.load(state, strict=False)
        return state["new"]

    assert ranks.run(2, work).all() == [2, 2]


def test_a_file_by_its_path(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever its name is; a run begins with it at step 0."""
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")

    def work(checkpoint: CheckpointContext, _: int) -> Any:
        state = {"w": torch.zeros(2)}
        found = checkpoint.load(state, source=tmp_path / "weights.pt")
        return found.step, found.next_step, float(state["w"].sum())

    assert ranks.run(2, work).all() == [(0, 0, 2.0)] * 2
