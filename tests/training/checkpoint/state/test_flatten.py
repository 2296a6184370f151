"""Which tensors neither a save nor a load takes, and what the error says to each of the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.dcp.metadata import Stored
from elaunch.training.checkpoint.state.flatten import flatten
from elaunch.training.checkpoint.state.perrank import PerRank


def on_meta() -> nn.Module:
    """Return a module without data."""
    return nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3, device="meta"))


class Holder:
    """An object whose state has a tensor without data."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"tensor": torch.empty(2, device="meta")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


NO_DATA = "it has no data (device meta); module.to_empty(device=…) gives it some"
NO_SIZE = "it has no size yet, since its module is a lazy one; call the module with an input first"
ODD: list[tuple[Callable[[], Any], str, str, str]] = [
    (on_meta, "k.1.weight", NO_DATA, NO_DATA),
    (lambda: nn.LazyLinear(3), "k.weight", NO_SIZE, NO_SIZE),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()), "k.1.weight", NO_SIZE, NO_SIZE),
    (lambda: [torch.empty(2, device="meta")], "k.0", NO_DATA, NO_DATA),
    (Holder, "k.tensor", NO_DATA, NO_DATA),
    (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "k",
        "it is a nested tensor; save its parts in a list",
        "it is a nested tensor; load what was saved in its place",
    ),
    (
        lambda: torch.eye(2).to_sparse(),
        "k",
        "it is sparse (torch.sparse_coo); save value.to_dense()",
        "it is sparse (torch.sparse_coo); load what was saved in its place",
    ),
]


@pytest.mark.parametrize(("make", "key", "saving", "loading"), ODD)
def test_odd_tensors(make: Callable[[], Any], key: str, saving: str, loading: str) -> None:
    """By their keys; a load does not speak of saving."""
    stored = Stored(Metadata({}), 1)
    with pytest.raises(CheckpointError) as save:
        flatten({"k": make()}, 0)
    assert str(save.value).startswith(f"{key} cannot be saved: {saving}")
    with pytest.raises(CheckpointError) as load:
        flatten({"k": make()}, 0, stored)
    assert str(load.value).startswith(f"{key} cannot be loaded into: {loading}")


def test_what_each_rank_has_of_its_own() -> None:
    """Is looked at as well."""
    with pytest.raises(CheckpointError, match=r"k\.rank-00002\.1\.weight cannot be saved"):
        flatten({"k": PerRank(on_meta())}, 2)
