"""Whatever ``dcp.save`` takes: the recipes of torch's documentation, with ``save`` and ``load``.

Every recipe makes the same values on any number of ranks, so that what one world saves another one
can compare with what it would have made itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elaunch
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.models import bits, plain, train

Recipe = Callable[[int], tuple[dict[str, Any], Callable[[], Any]]]
"""Returns, for a seed, a state and what returns the values that are to be compared."""


def line() -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> DeviceMesh:
    """Return a mesh of two dimensions; of one row where the ranks are odd in number."""
    size = dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("data", "tensor"))


def values(seed: int, *shape: int) -> torch.Tensor:
    """Return numbers that depend on seed and shape only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 100 + len(shape)))


def spread(seed: int, *shape: int, mesh: DeviceMesh | None = None, by: Any = None) -> DTensor:
    """Return a DTensor, by default one that is cut along its first dimension."""
    return distribute_tensor(values(seed, *shape), mesh or line(), by or [Shard(0)])


def whole(value: Any) -> Any:
    """Return a nested value as bytes; what is sharded is gathered."""
    if isinstance(value, dict):
        return {key: whole(member) for key, member in value.items()}
    if isinstance(value, list):
        return [whole(member) for member in value]
    if hasattr(value, "local_shards"):
        full = torch.zeros(value.size())
        for shard in value.local_shards():
            into = full
            for dim, (at, size) in enumerate(
                zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            ):
                into = into.narrow(dim, at, size)
            into.copy_(shard.tensor)
        dist.all_reduce(full)
        value = full
    return bits(value)


def as_it_is(state: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Compare the state itself."""
    return state, lambda: whole(state)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model in FSDP2 and its optimizer; a seed above 0 has not been trained."""
    model = plain(seed)
    fully_shard(model, mesh=line())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + seed)
    if not seed:
        train(model, optimizer)
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return all of a model and its optimizer as bytes."""
    return bits(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


class AppState(Stateful):
    """The recipe of torch's tutorial, word for word."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return both states, under the names of the parameters."""
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set both."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def app(seed: int) -> Any:
    """Return ``{"app": AppState(model, optimizer)}``."""
    model, optimizer = trained(seed)
    return {"app": AppState(model, optimizer)}, lambda: everything(model, optimizer)


def state_dicts(seed: int) -> Any:
    """Return what get_state_dict returned, and give it back by hand."""
    model, optimizer = trained(seed)
    own, moments = get_state_dict(model, optimizer)
    state = {"model": own, "optimizer": moments, "epoch": 1 - seed}

    def after() -> Any:
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=moments)
        return everything(model, optimizer), state["epoch"]

    return state, after


def flat_optimizer(seed: int) -> Any:
    """Return an optimizer's state with flat keys."""
    model, optimizer = trained(seed)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return as_it_is({"optimizer": get_optimizer_state_dict(model, optimizer, options=flat)})


def dtensors(seed: int) -> Any:
    """Return DTensors of all placements, by themselves."""
    return as_it_is(
        {
            "rows": spread(seed, 8, 4),
            "columns": spread(seed, 5, 6, by=[Shard(1)]),
            "replicated": spread(seed, 5, by=[Replicate()]),
            "one dimension": spread(seed, 9),
            "uneven": spread(seed, 7, 4),
            "one row": spread(seed, 1, 4),
            "no row": spread(seed, 0, 4),
            "transposed": spread(seed, 8, 4).t(),
            "parameter": nn.Parameter(spread(seed, 6, 2)),
            "bfloat16": spread(seed, 8, 4).to(torch.bfloat16),
            "whole": values(seed, 3, 3),
        }
    )


def containers(seed: int) -> Any:
    """Return DTensors in dicts and lists of all kinds."""
    return as_it_is(
        {
            "list": [spread(seed, 8), [spread(seed, 3)]],
            "dict": {"a": {"b": [spread(seed, 4), {"c": spread(seed, 5)}]}, "n": 1 - seed},
            "numbers": {0: spread(seed, 4), 1: values(seed, 2)},
            "ordered": OrderedDict(a=spread(seed, 4)),
        }
    )


def mesh_of_two_dimensions(seed: int) -> Any:
    """Return DTensors over two dimensions of a mesh."""
    mesh = square()
    return as_it_is(
        {
            "tile": spread(seed, 8, 6, mesh=mesh, by=[Shard(0), Shard(1)]),
            "hybrid": spread(seed, 8, 6, mesh=mesh, by=[Replicate(), Shard(0)]),
            "twice": spread(seed, 9, 6, mesh=mesh, by=[Shard(0), Shard(0)]),
            "columns": spread(seed, 6, 6, mesh=mesh["tensor"], by=[Shard(1)]),
        }
    )


def moving_average(seed: int) -> Any:
    """Return a model, and the shards of the average of its parameters beside it."""
    model, optimizer = trained(seed)
    average = {name: each.detach().clone() * 0.5 for name, each in model.named_parameters()}
    state = {"model": model, "optimizer": optimizer, "ema": average}
    return state, lambda: (everything(model, optimizer), whole(average))


def tensor_parallel(seed: int) -> Any:
    """Return a model in tensor parallel and FSDP2, as AppState, and its weights once more."""
    mesh, model = square(), plain(seed)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if not seed:
        train(model, optimizer)
    copies = {"copies": dict(get_state_dict(model, optimizer)[0])}
    state = {"app": AppState(model, optimizer), **copies}
    return state, lambda: (everything(model, optimizer), whole(copies))


def fsdp1(seed: int) -> Any:
    """Return FSDP1's sharded state_dicts, of ShardedTensors, and give them back by hand."""
    model = FullyShardedDataParallel(plain(seed), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 3 - seed)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        own = model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    state = {"model": own, "optim": moments}

    def after() -> Any:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(state["model"])
            given = FullyShardedDataParallel.optim_state_dict_to_load(
                model, optimizer, state["optim"]
            )
            optimizer.load_state_dict(given)
        return everything(model, optimizer)

    return state, after


def sharded_tensors(seed: int) -> Any:
    """Return ShardedTensors by themselves; the last rank may have no shard."""
    ranks: Any = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
    spec = ChunkShardingSpec(dim=0, placements=ranks)
    made = {}
    for rows in (7, 4):
        made[f"{rows} rows"] = tensor = sharded_tensor.zeros(spec, rows, 3)
        for shard in tensor.local_shards():
            at, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.copy_(values(seed, rows, 3).narrow(0, at, size))
    return as_it_is({"by hand": made})


def some_ranks(seed: int) -> Any:
    """Return DTensors that only the first two ranks have a part of."""
    some = DeviceMesh("cpu", [0, 1])
    tensor = spread(seed, 5, 2, mesh=some) if dist.get_rank() < 2 else None
    state = {} if tensor is None else {"part": tensor}
    return {"stage": state, "all": values(seed, 2)}, lambda: whole(
        {"all": state.get("all"), **({} if tensor is None else {"part": tensor.to_local()})}
    )


class Holder:
    """An object of the script whose state has DTensors."""

    def __init__(self, seed: int) -> None:
        self.tensor = spread(seed, 6, 2)
        self.number = 1 - seed

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"tensor": self.tensor, "list": [self.tensor * 2], "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.tensor = state["tensor"]
        self.twice = state["list"][0]
        self.number = state["number"]


def objects(seed: int) -> Any:
    """Return DTensors in what an object's ``state_dict`` returns, and in a module's buffers."""
    holder, module = Holder(seed), nn.Module()
    module.register_buffer("buffer", spread(seed, 4, 2))
    state = {"holder": holder, "module": module}
    return state, lambda: (whole(holder.state_dict()), whole(module.state_dict()))


RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (
        app,
        state_dicts,
        flat_optimizer,
        dtensors,
        containers,
        mesh_of_two_dimensions,
        moving_average,
        tensor_parallel,
        fsdp1,
        sharded_tensors,
        objects,
    )
}


def well(said: list[Any]) -> list[Any]:
    """Return what the ranks returned; the first that raised tells what."""
    raised = [one for one in said if isinstance(one, Raised)]
    raised.sort(key=lambda one: one.kind == "PeerLost")
    assert not raised, raised[0].text
    return said


def save_all(ctx: Any) -> Any:
    """Save every recipe; return what it has."""
    had = {}
    for step, (name, recipe) in enumerate(RECIPES.items()):
        state, compared = recipe(0)
        ctx.checkpoint.save(state, step, block=step % 2 == 0)
        had[name] = compared()
    ctx.checkpoint.wait()
    return had


def load_all(ctx: Any) -> Any:
    """Load every recipe into other values; return what came."""
    came = {}
    for step, (name, recipe) in enumerate(RECIPES.items()):
        state, compared = recipe(1)
        ctx.checkpoint.load(state, which=f"step-{step:08d}.r0")
        came[name] = compared()
    return came


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "loads"),
    [(2, 3), *(pytest.param(*sizes, marks=pytest.mark.trial) for sizes in ((3, 2), (4, 2)))],
)
def test_all_recipes(tmp_path: Path, saves: int, loads: int) -> None:
    """Bit for bit, on as many ranks as saved, and on another number of them."""
    had = well(in_group(save_all, saves, tmp_path))
    for size in (saves, loads):
        came = well(in_group(load_all, size, tmp_path))
        for name in RECIPES:
            assert all(rank[name] == had[0][name] for rank in came), f"{name} on {size} ranks"


WITH_MODULES = (moving_average, objects)
"""Recipes with modules and optimizers in the state; dcp takes these by their own state_dict."""


def both_ways(ctx: Any) -> Any:
    """Save by one and load by the other: ``dcp`` and ``ctx.checkpoint``."""
    told = {}
    for step, (name, recipe) in enumerate(RECIPES.items()):
        if recipe in WITH_MODULES:
            continue
        state, compared = recipe(0)
        ctx.checkpoint.save(state, 2 * step)
        other, seen = recipe(1)
        dcp.load(other, checkpoint_id=ctx.checkpoint.latest().place)
        path = ctx.checkpoint.stage_path(2 * step + 1)
        dcp.save(recipe(0)[0], checkpoint_id=path)
        ctx.checkpoint.commit(path, 2 * step + 1)
        third, too = recipe(1)
        ctx.checkpoint.load(third)
        told[name] = (compared(), seen(), too())
    return told


@pytest.mark.trial
@pytest.mark.slow
def test_dcp_reads_and_writes_the_same(tmp_path: Path) -> None:
    """What ``save`` has written ``dcp.load`` reads, and ``load`` what ``dcp.save`` has written."""
    for rank in well(in_group(both_ways, 2, tmp_path)):
        for name, (had, by_dcp, by_elaunch) in rank.items():
            assert had == by_dcp == by_elaunch, name


def of_some_ranks(ctx: Any) -> Any:
    """Save DTensors that only two of three ranks have a part of; load them back."""
    state, compared = some_ranks(0)
    ctx.checkpoint.save(state, 1)
    other, seen = some_ranks(1)
    ctx.checkpoint.load(other)
    return compared() == seen()


@pytest.mark.ranks
def test_dtensors_of_some_ranks(tmp_path: Path) -> None:
    """As stages of a pipeline have them."""
    assert in_group(of_some_ranks, 3, tmp_path) == [True] * 3


def refused(ctx: Any) -> Any:
    """Try to save what would come back wrong; then save what can be."""

    def tried(state: dict[str, Any]) -> str:
        try:
            ctx.checkpoint.save(state, 1)
        except Exception as error:
            return str(error)
        return "was saved"

    tensor = spread(0, 8, 2)
    told = [
        tried({"k": DTensor.from_local(values(0, 4), line(), [Partial()])}),
        tried({"k": (tensor, 1)}),
        tried({"k": [(tensor, 1)]}),
        tried({"k": elaunch.PerRank({"in": tensor})}),
        tried({"k": tensor.to("meta")}),
    ]
    ctx.checkpoint.save({"k": tensor}, 1)
    return told


@pytest.mark.ranks
def test_what_would_come_back_wrong(tmp_path: Path) -> None:
    """Is refused by its key, with what to do instead."""
    said = in_group(refused, 2, tmp_path)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    partial, in_tuple, in_list, own, meta = said[0]
    assert "k cannot be saved: it is a DTensor with a Partial placement" in partial
    assert "k is a tuple with sharded tensors in it" in in_tuple
    assert "k is a list with sharded tensors in it" in in_list
    assert "k.rank-00000.in is sharded over the ranks" in own
    assert "k cannot be saved: it has no data (device meta)" in meta
