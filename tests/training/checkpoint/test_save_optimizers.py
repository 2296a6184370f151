"""How fresh optimizers get a state to load into; torch gives them one by a step without gradients.

Some cannot be given one so, and torch's own need no step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state

from elaunch.training.checkpoint.state import optimizers
from tests.training.checkpoint.groups import in_group
from tests.training.checkpoint.models import bits

Made = tuple[nn.Module, torch.optim.Optimizer]


def made(kind: str, seed: int) -> Made:
    """Return a model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    if kind == "sparse":
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.01)
    return model, torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Train on, the same on all ranks."""
    for step in range(number):

        def loss(step: int = step) -> Any:
            optimizer.zero_grad()
            found = model(torch.ones(3, 8) * (step + 1)).square().sum()
            found.backward()
            return found

        if isinstance(optimizer, torch.optim.SparseAdam):
            loss()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_sparse()
            optimizer.step()
        else:
            optimizer.step(loss)


def goes_on(ctx: Any, kind: str, block: bool) -> Any:
    """Save, load into a fresh one and into one that has gone further, and train all of them on."""
    model, optimizer = made(kind, 0)
    steps(model, optimizer, 3)
    ctx.checkpoint.save({"model": model, "optimizer": optimizer}, 3, block=block)
    ctx.checkpoint.wait()
    fresh, further = made(kind, 1), made(kind, 2)
    steps(*further, 5)
    ends = []
    for each in (fresh, further):
        ctx.checkpoint.load({"model": each[0], "optimizer": each[1]})
    for each in ((model, optimizer), fresh, further):
        steps(*each, 3)
        ends.append(bits(each[0].state_dict()))
    return ends[0] == ends[1] == ends[2]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "block"), [("lbfgs", True), ("lbfgs", False), ("sparse", True)])
def test_the_training_goes_on(tmp_path: Path, kind: str, block: bool) -> None:
    """As if it had never stopped."""
    assert in_group(goes_on, 2, tmp_path, kind, block) == [True, True]


def test_a_step_that_fails_leaves_a_fresh_optimizer_as_it_was() -> None:
    """torch sets the learning rate to 0 for it."""
    model, optimizer = made("sparse", 0)
    assert optimizers.state_to_fill(model, optimizer, None) is None
    assert optimizer.param_groups[0]["lr"] == 0.01 and not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


OWN: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {},
    "Rprop": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "SGD": {"momentum": 0.9},
}


class Counted(torch.optim.Adam):
    """Not one of torch's own: it may do otherwise."""


def state_made(kind: str, shortened: bool) -> tuple[dict[str, Any], int]:
    """Return type, shape and strides of a fresh optimizer's state, and the steps that it took."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    chosen = Counted if kind == "Counted" else getattr(torch.optim, kind)
    optimizer = chosen([{"params": [each]} for each in model.parameters()], **OWN.get(kind, {}))
    steps: list[Any] = []
    optimizer.register_step_pre_hook(lambda *given: steps.append(given))
    if not shortened:
        _init_optim_state(optimizer)
    state = optimizers.state_to_fill(model, optimizer, None)
    assert state is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    told = {
        name: {
            key: (value.dtype, value.shape, value.stride()) if torch.is_tensor(value) else value
            for key, value in held.items()
        }
        for name, held in state["state"].items()
    }
    return told, len(steps)


@pytest.mark.parametrize("kind", OWN)
def test_torchs_own_begin_their_state_without_a_step(kind: str) -> None:
    """That would take gradients for all parameters, and is seen by the script's hooks."""
    by_step, _ = state_made(kind, shortened=False)
    found, steps = state_made(kind, shortened=True)
    assert found == by_step
    # AdamW of torch 2.6 is no Adam: it wants to be told of amsgrad to begin its state.
    takes_one = kind == "SGD" or (kind == "AdamW" and torch.__version__ < (2, 7))
    assert steps == int(takes_one)


def test_any_other_optimizer_makes_the_step() -> None:
    """A class of the script's own may keep more than the one that it is derived from."""
    assert state_made("Counted", shortened=True)[1] == 1


class Refuses(torch.optim.SGD):
    """Does not tell its state."""

    def state_dict(self) -> dict[str, Any]:
        """Refuse."""
        raise KeyError("out of order")


def test_an_optimizer_that_has_a_state_keeps_it() -> None:
    """Its error is told, and is no sign that it cannot be given one."""
    model = nn.Linear(8, 4)
    optimizer = Refuses(model.parameters(), lr=0.01)
    optimizer.state[model.weight] = {"momentum_buffer": torch.ones(4, 8)}
    with pytest.raises(KeyError, match="out of order"):
        optimizers.state_to_fill(model, optimizer, None)
    assert list(optimizer.state) == [model.weight]
