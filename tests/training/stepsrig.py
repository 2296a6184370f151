"""A loop over steps on one rank, around the context's real parts; arguments for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elaunch.training.distributed import DistributedContext
from elaunch.training.preempt.preempt import PreemptContext
from elaunch.training.steps.loop import Script, Steps
from elaunch.training.steps.refusals import Options
from elaunch.training.steps.world import StepsWorld
from elaunch.wire.progress import ProgressPage

X = torch.arange(20.0).reshape(10, 2)


def options(**changes: Any) -> Options:
    """Return arguments that are right, but for the changes: ten samples, two leaves in a step."""
    right = dict.fromkeys(["batch", "collate_fn", "keep", "epochs", "save_every"])
    right |= {"dataset": TensorDataset(X), "loader": {}, "until": 5, "last": "drop"}
    right |= {"on_bad_batch": "raise", "check": False}
    right |= {"global_batch": 4, "micro_batch": 2, "shuffle": True, "seed": 0, "threads": 1}
    return Options(**{**right, **changes})


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return a state that trains a module."""
    return {"model": module, "optimizer": torch.optim.SGD(module.parameters(), 0.001)}


class Rig:
    """A rank alone, a module with an optimizer, and what was reported."""

    def __init__(self) -> None:
        self.page = ProgressPage()
        self.ranks = DistributedContext()
        self.preempt = PreemptContext(self.ranks, self.page, None)
        self.preempt.start()
        self.reported: list[tuple[int, Mapping[str, Any]]] = []
        self.script = Script(
            StepsWorld(self.ranks, None, lambda *_: pytest.fail("nobody dies here")),
            self.preempt,
            lambda: pytest.fail("nothing is saved here"),
            lambda step, metrics: self.reported.append((step, dict(metrics))),
            lambda: len(self.reported),
            lambda _: None,
        )
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)

    def loop(self, **changes: Any) -> Steps:
        """Begin a loop over ten samples."""
        state = {"model": self.model, "optimizer": self.optimizer}
        return Steps(self.script, state, options(**changes))

    def close(self) -> None:
        """End what it has begun."""
        self.preempt.close()
        self.ranks.close()
        self.page.close()
