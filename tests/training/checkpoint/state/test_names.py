"""Names of parameters that are looked up once: always those that torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from elaunch.training.checkpoint.state import modules, optimizers
from tests.training.checkpoint.models import bits, network, plain, train


class Wrapped(nn.Module):
    """A module that is called what DDP calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = network()
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Do as the module in it."""
        result: torch.Tensor = self.module(values)
        return result


class Extra(nn.Linear):
    """A module with a state of its own that is no tensor."""

    def get_extra_state(self) -> Any:
        """Return it."""
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        """Take it."""


class Renaming(nn.Linear):
    """A module whose hook changes what is saved."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_state_dict_post_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


def tied() -> nn.Module:
    """Return a module with one parameter under two names."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def both(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the states are torch's, with the names and in the order that it has them in."""
    for _ in range(3):
        own, torchs = modules.state_of(module), dict(get_model_state_dict(module))
        assert list(own) == list(torchs)
        assert bits(own) == bits(torchs)
        own = optimizers.state_to_save(module, optimizer)
        assert bits(own) == bits(dict(get_optimizer_state_dict(module, optimizer)))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    first, *rest = module.parameters()
    return torch.optim.Adam([{"params": rest}, {"params": [first], "lr": 0.5}], weight_decay=0.1)


@pytest.mark.parametrize(
    "made",
    [
        *(network, Wrapped, tied, lambda: nn.Linear(8, 4).double(), lambda: torch.compile(plain())),
        *(lambda: Extra(8, 4), Renaming),
    ],
)
def test_states_are_those_of_torch(made: Any) -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    both(model, optimizer)


def test_odd_tensors_are_left_to_torch() -> None:
    """The calls that save them, or not, look at them themselves."""
    model = network()
    model.register_buffer("odd", torch.nested.nested_tensor([torch.ones(2)]))
    for _ in range(2):
        assert list(modules.state_of(model)) == list(model.state_dict())
    assert modules.names_of(model) is None


def test_what_changes_is_seen() -> None:
    """Values, places in memory, parameters and groups, each behind a state that was known."""
    model = plain()
    optimizer = adam(model)
    train(model, optimizer)
    both(model, optimizer)
    assert optimizers._named(model, optimizer) is not None, "it is one of those that are known"
    train(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.25
    both(model, optimizer)
    for kind in (torch.float64, torch.float32):
        model.to(kind)
        both(model, optimizer)
    model.append(nn.Linear(7, 2))
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 1.0})
    train(model, optimizer)
    both(model, optimizer)
    model[0], model[2] = model[2], model[0]
    both(model, optimizer)


def test_another_module_of_the_same_parameters() -> None:
    """Its names are others."""
    model = plain()
    optimizer = adam(model)
    train(model, optimizer)
    both(model, optimizer)
    both(nn.ModuleDict({"inner": model}), optimizer)
    both(model, optimizer)


def test_a_state_that_is_known_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = adam(model)
    train(model, optimizer)
    both(model, optimizer)
    monkeypatch.setattr(modules, "get_model_state_dict", lambda *_: pytest.fail("torch's"))
    monkeypatch.setattr(optimizers, "get_optimizer_state_dict", lambda *_: pytest.fail("torch's"))
    modules.state_of(model)
    optimizers.state_to_save(model, optimizer)
