"""What each rank has of its own, values that contradict each other, and ``check_same``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elaunch
from elaunch.errors import ContextError
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.models import bits, plain


class Position:
    """A position in the data, with a state of changing shape."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        """Return it; more of it when it has begun."""
        begun = {"seen": {"files": ["a"] * self.at, "by": {1: 2}}} if self.at else {}
        return {"at": self.at, "empty": {}, **begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.at, self.loaded = state["at"], state


def draw() -> list[float]:
    """Return what each generator gives next."""
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def save_own(ctx: Any) -> Any:
    """Save what differs between the ranks; return what the generators give after it."""
    rank = ctx.distributed.rank
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    state = {
        "rng": elaunch.rng_state(),
        "position": elaunch.PerRank(Position(10 + rank)),
        "plain": elaunch.PerRank({"list": [rank, {"x": torch.full((rank + 1,), rank)}]}),
        "summed": elaunch.PerRank(rank + 1, on_resize=sum),
        "module": elaunch.PerRank(local_module(rank)),
        "kept": kept(rank),
        "same": 5,
    }
    ctx.checkpoint.save(state, 1)
    return draw()


def kept(number: int) -> elaunch.PerRank:
    """Return a module and its optimizer, which a rank that was not there keeps as they are."""
    module = local_module(number)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0 + number)
    value = {"m": module, "o": optimizer, "n": number}
    return elaunch.PerRank(value, on_more_ranks="keep", on_fewer_ranks="drop")


def local_module(rank: int) -> nn.Module:
    """Return a module that is another on each rank."""
    torch.manual_seed(100 + rank)
    module = nn.Linear(2, 2)
    torch.manual_seed(rank)
    return module


def load_own(ctx: Any) -> Any:
    """Load it; return what each rank got."""
    np.random.seed(77)
    torch.manual_seed(77)
    random.seed(77)
    module = nn.Linear(2, 2)
    position = Position(0)
    state = {
        "rng": elaunch.rng_state(),
        "position": elaunch.PerRank(position, on_fewer_ranks="drop"),
        "plain": elaunch.PerRank(None, on_fewer_ranks="drop"),
        "summed": elaunch.PerRank(0, on_resize=sum),
        "module": elaunch.PerRank(module, on_fewer_ranks="drop"),
        "kept": kept(7),
        "same": 0,
    }
    untouched = torch.Generator().manual_seed(77)
    torch.set_rng_state(untouched.get_state())
    ctx.checkpoint.load(state)
    assert position.loaded["seen"]["by"] == {1: 2} and position.loaded["empty"] == {}
    held = state["plain"].value["list"]
    return (
        draw(),
        position.at,
        (held[0], held[1]["x"].tolist()),
        state["summed"].value,
        bits(module.state_dict()),
        in_kept(state["kept"]),
    )


def in_kept(marked: elaunch.PerRank) -> Any:
    """Return what :func:`kept` returned, as it is now."""
    value = marked.value
    return bits(value["m"].state_dict()), value["o"].param_groups[0]["lr"], value["n"]


@pytest.mark.slow
def test_per_rank(tmp_path: Path) -> None:
    """The same number of ranks gets its own; fewer and more as the docs say."""
    after = in_group(save_own, 2, tmp_path)
    same = in_group(load_own, 2, tmp_path)
    assert [one[0] for one in same] == after
    assert [one[1] for one in same] == [10, 11]
    assert [one[2] for one in same] == [(0, [0]), (1, [1, 1])]
    assert [one[3] for one in same] == [1, 2]
    modules = [bits(local_module(rank).state_dict()) for rank in range(2)]
    assert [one[4] for one in same] == modules
    three = in_group(load_own, 3, tmp_path)
    assert [one[0] for one in three[:2]] == after, "its own"
    assert three[2][0][2] not in (after[0][2], after[1][2]), "not another rank's numbers"
    assert [one[1] for one in three] == [10, 11, 10]
    assert [one[3] for one in three] == [3, 3, 3]
    assert [one[4] for one in three] == [*modules, modules[0]]
    assert [one[5] for one in three] == [in_kept(kept(number)) for number in (0, 1, 7)]
    (alone,) = in_group(load_own, 1, tmp_path)
    assert alone[0] == after[0] and alone[1:4] == (10, (0, [0]), 3)


def contradictions(ctx: Any) -> Any:
    """Save what differs between the ranks without saying so."""
    rank = ctx.distributed.rank
    told = []
    for state in (
        {"lr": 0.1, "position": 10 + rank % 2},
        {"counter": torch.tensor([rank])},
        {"big": torch.arange(100_000.0) + (rank == 1) * (torch.arange(100_000) > 50_000)},
        {"model": local_module(rank)},
        {"shape": torch.zeros(rank + 1)},
        {"kind": torch.zeros(1) if rank else 0},
        {"arrays": [np.arange(3 + rank)]},
    ):
        try:
            ctx.checkpoint.save(state, 1)
            told.append(None)
        except elaunch.SaveError as error:
            told.append(str(error))
    ctx.checkpoint.save({"set": set(rank_order(rank)), "array": np.arange(3)}, 1)
    return told, [found.step for found in ctx.checkpoint.list()]


def rank_order(rank: int) -> list[str]:
    """Return the same words in another order: equal sets with different pickles."""
    words = [str(number) for number in range(40)]
    return words[::-1] if rank else words


@pytest.mark.ranks
def test_values_that_differ(tmp_path: Path) -> None:
    """Each is an error on all ranks that names key and ranks; equal ones are none."""
    said = in_group(contradictions, 3, tmp_path)
    assert said[0] == said[1] == said[2] and not isinstance(said[0], Raised), said[0]
    told, steps = said[0]
    assert steps == [1]
    assert "position is 10 on ranks 0, 2, 11 on rank 1" in told[0] and "PerRank" in told[0]
    assert "lr" not in told[0]
    assert "counter is a tensor that differs" in told[1]
    assert "big is a tensor that differs" in told[2] and "rank 1" in told[2]
    assert "model.weight is a tensor that differs" in told[3]
    assert "shape is a tensor of torch.float32 and size (1,) on rank 0" in told[4]
    assert "kind is a value on rank 0 and a tensor" in told[5]
    assert "arrays is" in told[6]


def sameness(ctx: Any) -> Any:
    """Check a state that is the same, and others that are not."""
    rank = ctx.distributed.rank
    model = nn.parallel.DistributedDataParallel(plain())
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "own": elaunch.PerRank(rank)}
    ctx.checkpoint.check_same(state)
    if rank == 2:
        with torch.no_grad():
            model.module[2].weight[3, 3] += 1e-7
    told = []
    for other in (state, {"step": 1 if rank == 1 else 2}):
        try:
            ctx.checkpoint.check_same(other)
        except elaunch.CheckpointError as error:
            told.append(str(error))
    return told


@pytest.mark.ranks
def test_check_same(tmp_path: Path) -> None:
    """One bit of one parameter on one rank is found, and the rank is named."""
    said = in_group(sameness, 3, tmp_path)
    assert said[0] == said[1] == said[2] and not isinstance(said[0], Raised), said[0]
    assert "rank 2 of 3: model.2.weight" in said[0][0]
    assert "rank 1 of 3: step" in said[0][1]


def test_a_mistyped_word() -> None:
    """Is refused where it stands, with those that there are."""
    with pytest.raises(ContextError, match=r"PerRank\(on_more_ranks='kepe'\): give \"wrap\" or"):
        elaunch.PerRank(1, on_more_ranks="kepe")  # type: ignore[arg-type]
    with pytest.raises(ContextError, match='give "error" or "drop"'):
        elaunch.PerRank(1, on_fewer_ranks="dorp")  # type: ignore[arg-type]
