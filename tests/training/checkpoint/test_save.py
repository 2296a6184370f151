"""``save`` and ``load``: each kind of state comes back bit for bit, sharded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from elaunch.checkpoint.formats import dcp as dcp_reader
from elaunch.checkpoint.records import Committed
from tests.training.checkpoint.groups import in_group
from tests.training.checkpoint.models import bits, network, plain, train

Ways = pytest.mark.parametrize("block", [True, False], ids=["block", "memory"])


def save(ctx: Any, state: dict[str, Any], step: int, block: bool) -> Any:
    """Save, and wait for the commit."""
    handle = ctx.checkpoint.save(state, step, block=block)
    return handle.committed if block else ctx.checkpoint.wait()


# ── data parallel ────────────────────────────────────────────────────────────────────────────────


def ddp_work(ctx: Any, block: bool) -> Any:
    """Save a DDP model and Adam, load into bare ones."""
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 30])
    train(model, optimizer)
    scheduler.step()
    model.module[1].running_mean.add_(ctx.distributed.rank)  # as between two forwards
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3}
    committed = save(ctx, state, 3, block)
    other = network(1)
    fresh = torch.optim.Adam(other.parameters(), lr=0.5)
    fresh.param_groups[0]["params"][0].grad = torch.ones_like(other[0].weight)
    later = torch.optim.lr_scheduler.MultiStepLR(fresh, milestones=[7])
    target = {"model": other, "optimizer": fresh, "scheduler": later, "step": 0}
    found = ctx.checkpoint.load(target)
    assert found.name == committed.name and target["step"] == 3
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
    assert bits(later.state_dict()) == bits(scheduler.state_dict())
    assert later.milestones == scheduler.milestones and other[0].weight.grad is not None
    ctx.checkpoint.check_same({"model": other, "optimizer": fresh})
    expected = bits(model.module.state_dict())
    assert bits({**other.state_dict(), "1.running_mean": 0}) == {**expected, "1.running_mean": 0}
    return bits(model.module[1].running_mean), bits(other[1].running_mean)


@Ways
def test_data_parallel(tmp_path: Path, block: bool) -> None:
    """A fresh Adam has every moment, step and rate; buffers are rank 0's, as DDP would have it."""
    (rank_0, loaded_0), (rank_1, loaded_1) = in_group(ddp_work, 2, tmp_path, block)
    assert loaded_0 == loaded_1 == rank_0 != rank_1
    keys = dcp.FileSystemReader(newest(tmp_path)).read_metadata().state_dict_metadata
    assert "model.0.weight" in keys and not [key for key in keys if "module" in key]
    sizes = [path.stat().st_size for path in newest(tmp_path).glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 2 * min(sizes), "the ranks share the work"


def newest(directory: Path) -> Path:
    """Return the directory of the newest checkpoint."""
    return max((directory / "checkpoints").glob("step-*"))


# ── sharded ──────────────────────────────────────────────────────────────────────────────────────


def fsdp_model(kind: str, seed: int) -> nn.Module:
    """Return a model in the given kind of sharding over all ranks."""
    model = plain(seed)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "flat":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return all of a sharded model and optimizer as bytes."""
    whole = StateDictOptions(full_state_dict=True)
    return bits(get_state_dict(model, optimizer, options=whole))


def sharded_save(ctx: Any, kind: str, step: int, block: bool) -> Any:
    """Train and save; return all of it."""
    model = fsdp_model(kind, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    save(ctx, {"model": model, "optimizer": optimizer, "step": step}, step, block)
    return full(model, optimizer)


def sharded_load(ctx: Any, kind: str, step: int) -> Any:
    """Load into other shards, save those again, return all of it."""
    model = fsdp_model(kind, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    ctx.checkpoint.load(state)
    assert state["step"] == step - 1
    state["step"] = step
    ctx.checkpoint.save(state, step)
    return full(model, optimizer)


@pytest.mark.trial
@pytest.mark.slow
def test_reshard(tmp_path: Path) -> None:
    """FSDP2 from three ranks to two, to four: parameters and moments are the same bits."""
    three = in_group(sharded_save, 3, tmp_path, "fsdp2", 1, False)
    two = in_group(sharded_load, 2, tmp_path, "fsdp2", 2)
    four = in_group(sharded_load, 4, tmp_path, "fsdp2", 3)
    assert three[0] == two[0] == two[1] == four[0] == four[3]
    assert isinstance(three[0], list) and "exp_avg" in three[0][1]["state"]["0.weight"]
    assert len(list(newest(tmp_path).glob("*.distcp"))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp1", "flat"])
def test_fsdp1(tmp_path: Path, kind: str) -> None:
    """FSDP1, with and without the original parameters."""
    saved = in_group(sharded_save, 2, tmp_path, kind, 1, True)
    loaded = in_group(sharded_load, 2, tmp_path, kind, 2)
    assert saved[0] == loaded[0] and isinstance(saved[0], list)


def parallel_model(seed: int) -> nn.Module:
    """Return a model in tensor parallel and FSDP2 on a mesh as wide as there are ranks."""
    size = dist.get_world_size()
    model = plain(seed)
    if size == 1:
        return model
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], styles)
    if size > 2:
        fully_shard(model, mesh=mesh["data"])
    return model


def tensor_parallel(ctx: Any, step: int, block: bool) -> Any:
    """Load what is there, else train; save; return all of it."""
    model = parallel_model(step)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    if step > 1:
        ctx.checkpoint.load(state)
    else:
        train(model, optimizer)
    save(ctx, state, step, block)
    return full(model, optimizer)


@pytest.mark.slow
def test_tensor_parallel(tmp_path: Path) -> None:
    """A 2x2 mesh to two ranks, to one: the same bits."""
    four = in_group(tensor_parallel, 4, tmp_path, 1, True)
    two = in_group(tensor_parallel, 2, tmp_path, 2, False)
    one = in_group(tensor_parallel, 1, tmp_path, 3, True)
    assert four[0] == two[0] == one[0] and isinstance(one[0], list)


# ── tensors and values of all kinds ──────────────────────────────────────────────────────────────


def odd_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of all types and shapes that a checkpoint holds."""
    torch.manual_seed(5)
    base = torch.randn(6, 10)
    dtypes = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
    dtypes += [
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.uint64,
    ]
    made = {str(dtype): base.mul(50).abs().to(dtype) for dtype in dtypes}
    return made | {
        "zero dim": torch.tensor(3.5),
        "zero dim int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 4),
        "empty columns": torch.empty(4, 0),
        "transposed": base.t(),
        "stepped": base[::2, 1::3],
        "expanded": base[:1].expand(5, 10),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "large": torch.randn(700, 9).t(),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "grad": torch.randn(3, requires_grad=True),
        "one": base[1:3],
        "same storage": base,
        "with.dots": torch.arange(3),
    }


def blanks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same kinds with other content."""
    made = {}
    for name, tensor in tensors.items():
        other = torch.zeros_like(tensor) if name != "expanded" else torch.zeros(1, 10).expand(5, 10)
        made[name] = other
    made["stepped"] = torch.zeros(6, 10)[::2, 1::3]
    return made


def odd_work(ctx: Any, block: bool) -> Any:
    """Save and load all kinds of tensors, and values."""
    tensors = odd_tensors()
    values: dict[str, Any] = {
        "int": 12,
        "float": float("nan"),
        "none": None,
        "text": "é\0",
        "tuple": (1, (2, "x")),
        "list": [1, [2, [3]]],
        "mixed": [{"a": torch.ones(2)}, [torch.zeros(1), 5]],
        "array": np.arange(6.0).reshape(2, 3),
        "by number": {1: "one", 2: {"x": (3,)}},
        "empty": {},
        "nothing": [],
        "set": {"a", "b", "c"},
        "deep": {"er": {"still": 1}},
        "grown": {"loss": {"epoch 1": 0.5}},
        "history": [{"loss": 0.5}, {"loss": torch.ones(2)}],
    }
    state = {"tensors": tensors, "values": values}
    save(ctx, state, 1, block)
    zeros = blanks(tensors)
    kept = zeros["stepped"]
    fresh: dict[str, Any] = dict.fromkeys(values, 0) | {
        "mixed": [{"a": torch.zeros(2)}, [torch.ones(1), 0]],
        "by number": {1: "?", 7: "!"},
        "empty": {},
        "deep": {"er": {"still": 0}},
        "grown": {},
        "history": [],
    }
    target = {"tensors": zeros, "values": fresh}
    ctx.checkpoint.load(target)
    assert zeros["stepped"] is kept, "in place"
    loaded = {name: bits(tensor) for name, tensor in zeros.items()}
    for name, tensor in tensors.items():
        assert loaded[name] == bits(tensor), name
    assert fresh.pop("array").tolist() == values.pop("array").tolist()
    assert str(fresh.pop("float")) == str(values.pop("float"))
    assert bits(fresh) == bits(values)
    assert isinstance(fresh["tuple"], tuple) and isinstance(fresh["tuple"][1], tuple)
    return True


@Ways
def test_all_kinds_of_tensors_and_values(tmp_path: Path, block: bool) -> None:
    """Types, shapes, strides, tensors in one storage; values with their own types."""
    assert in_group(odd_work, 2, tmp_path, block) == [True, True]


# ── what torch's own tools make of it ────────────────────────────────────────────────────────────


@pytest.mark.ranks
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_torchs_own_tools(tmp_path: Path, flatten: bool) -> None:
    """Plain dcp.load reads it, dcp_to_torch too; a directory of dcp.save is loaded."""
    foreign = tmp_path / "step_5"
    assert in_group(foreign_work, 2, tmp_path, str(foreign), flatten) == [True, True]
    dcp_to_torch_save(newest(tmp_path), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["step"] == 3 and set(whole["model"]) == set(network().state_dict())
    assert whole["optimizer"]["param_groups"][0]["lr"] == 0.01


def foreign_work(ctx: Any, directory: str, flatten: bool) -> Any:
    """Read with dcp.load what save wrote, and load what dcp.save wrote."""
    model, other = network(), network(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fresh = torch.optim.Adam(other.parameters(), lr=0.02)
    train(model, optimizer)
    found = ctx.checkpoint.save({"model": model, "optimizer": optimizer, "step": 3}, 3).committed
    weights, moments = get_state_dict(other, fresh)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=found.place)
    assert state["step"] == 3 and bits(weights) == bits(get_state_dict(model, optimizer)[0])
    assert bits(moments) == bits(get_optimizer_state_dict(model, optimizer))
    dcp_reader.verify(found.place)

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": moments, "step": 5}, checkpoint_id=directory)
    foreign = Committed("step_5", Path(directory), 5, 0, "", {}, 0)
    third = network(2)
    new = torch.optim.Adam(third.parameters(), lr=0.7)
    ctx.checkpoint.latest()
    ctx.checkpoint._session.known.newest = None
    ctx.checkpoint._session.known.resumed = foreign
    target = {"model": third, "optimizer": new, "step": 0}
    assert ctx.checkpoint.load(target).name == "step_5"
    assert bits(third.state_dict()) == bits(model.state_dict()) and target["step"] == 5
    assert bits(new.state_dict()) == bits(optimizer.state_dict())
    return True
