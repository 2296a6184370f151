"""save_ddp and load_ddp: one file for all ranks. Ranks are threads around a real TCPStore."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.errors import CheckpointError, ContextError, SaveError
from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.training.checkpoint.ddp import plainstate
from elaunch.training.checkpoint.ddp import singlefile as filling
from elaunch.training.checkpoint.state.flatten import flatten
from elaunch.training.checkpoint.state.perrank import PerRank
from tests.training.checkpoint.ddprig import Ranks


def filled(saved: dict[str, Any], state: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    """Save the one state, and load it into the other; as the only rank."""
    made = plainstate.make(saved, writes=True)
    content = made.complete([made.summary()])
    filling.fitting(state, content, strict, rank=0, ranks=1)()
    return state


def linear(fill: float, out: int = 2) -> nn.Linear:
    """Return a layer of one value."""
    made = nn.Linear(3, out)
    for parameter in made.parameters():
        nn.init.constant_(parameter, fill)
    return made


def buffer(size: int) -> nn.Module:
    """Return a module with a buffer alone."""
    module = nn.Module()
    module.register_buffer("m", torch.ones(size))
    return module


def nested() -> torch.Tensor:
    """Return a nested tensor."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("saved", "own", "told"),
    [
        (torch.tensor([7.0]), lambda: torch.zeros(3, 2), r"x has size \(3, 2\), and \(1,\) in"),
        (torch.tensor([1.7]), lambda: torch.zeros(1, dtype=torch.int64), "torch.int64, and torch"),
        (torch.tensor([1j]), lambda: torch.zeros(1), "which would be cut off"),
        (5, lambda: torch.zeros(1), "x is a Tensor, and a int in the checkpoint"),
        (linear(1.0), lambda: linear(5.0, 4), r"x.weight has size \(4, 3\), and \(2, 3\)"),
        (buffer(1), lambda: buffer(3), r"x.m has size \(3,\), and \(1,\)"),
        (3, lambda: linear(5.0), "x is a Linear, and a int in the checkpoint"),
        (3, lambda: [linear(5.0)], "x is a list, and a int in the checkpoint"),
        ({"a": 1}, lambda: [linear(5.0)], "x is a list, and a dict"),
        (1, lambda: (linear(5.0),), "x is a tuple"),
        (linear(1.0), lambda: nn.Linear(3, 2, device="meta"), "x.weight cannot be loaded into: it"),
        (buffer(1), lambda: buffer(1).to("meta"), r"x.m cannot be loaded into: it has no data"),
        (torch.ones(2), lambda: torch.ones(2, device="meta"), "x cannot be loaded into: it has no"),
        ([torch.ones(2)], lambda: [torch.ones(2, device="meta")], "x.0 cannot be loaded into"),
        ({"a": linear(1.0)}, lambda: {"a": PerRank(linear(1.0).to("meta"))}, "x.a.weight cannot"),
        (torch.ones(2), lambda: nested(), "x cannot be loaded into: it is a nested tensor; load"),
    ],
)
def test_what_does_not_fit_changes_nothing(saved: Any, own: Callable[[], Any], told: str) -> None:
    """With strict=False neither; what stands before it has not been loaded."""
    first = linear(5.0)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=told):
            filled({"a": linear(1.0), "x": saved}, {"a": first, "x": own()}, strict)
    assert first.bias.tolist() == [5.0, 5.0]


def test_an_optimizer_without_data_is_not_loaded_into() -> None:
    """Nothing that stands before it, either."""
    saved = torch.optim.SGD(linear(1.0).parameters(), lr=1.0)
    test_what_does_not_fit_changes_nothing(
        saved,
        lambda: torch.optim.SGD(linear(1.0).to("meta").parameters(), lr=1.0),
        "x, parameter 0, cannot be loaded into: it has no data",
    )


def test_an_optimizer_with_other_groups_changes_nothing() -> None:
    """torch would tell, after the modules were loaded."""
    two = nn.Sequential(linear(1.0), linear(1.0))
    saved = {"m": two, "o": torch.optim.SGD(two.parameters())}
    own = nn.Sequential(linear(5.0), linear(5.0))
    state = {"m": own, "o": torch.optim.SGD(own[0].parameters())}
    with pytest.raises(CheckpointError, match=r"o has groups of \[2\] parameters.* of \[4\]"):
        filled(saved, state)
    assert own[0].bias.tolist() == [5.0, 5.0]


def test_types_that_hold_as_much_are_converted() -> None:
    """Floats to floats, integers to floats; a conjugated and a scalar one too."""
    saved = {"f": torch.tensor([1.5]), "i": torch.tensor([2]), "c": torch.tensor([1j]).conj()}
    state = {
        "f": torch.zeros(1, dtype=torch.float16),
        "i": nn.Parameter(torch.zeros(1)),
        "c": torch.zeros(1, dtype=torch.complex128),
    }
    held = dict(state)
    filled(saved, state)
    assert [state[key] is held[key] for key in "fic"] == [True] * 3
    assert (state["f"].item(), state["i"].item(), state["c"].item()) == (1.5, 2.0, -1j)


def test_modules_without_strict_take_what_fits() -> None:
    """Keys that the file lacks stay as they are; those that it has more are left out."""
    one, two = nn.Sequential(linear(1.0)), nn.Sequential(linear(5.0), linear(5.0))
    state = {"m": two, "x": 3}
    with pytest.raises(CheckpointError, match=r"missing: x, m\.1\.weight, m\.1\.bias"):
        filled({"m": one}, state)
    filled({"m": one}, state, strict=False)
    assert (two[0].bias.tolist(), two[1].bias.tolist(), state["x"]) == ([1, 1], [5, 5], 3)
    one = nn.Sequential(linear(7.0))
    filled({"m": nn.Sequential(linear(2.0), linear(2.0))}, {"m": one}, strict=False)
    assert one[0].bias.tolist() == [2, 2]
    assert filled({"m": buffer(3)}, {"m": nn.ReLU()}, strict=False)


class Growing(nn.Module):
    """A module that takes a buffer of any size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.ones(size))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.seen = state[f"{prefix}seen"].clone()
        super()._load_from_state_dict(state, prefix, *args)


def test_a_module_that_loads_in_its_own_way_may_change_sizes() -> None:
    """And so may a lazy one: its parameters have no size yet."""
    state = filled({"g": Growing(5)}, {"g": Growing(2)})
    assert state["g"].seen.shape == (5,)
    lazy = nn.LazyLinear(2)
    filled({"l": linear(3.0)}, {"l": lazy})
    assert lazy.bias.tolist() == [3.0, 3.0]


def test_a_file_without_data_changes_nothing() -> None:
    """As somebody's ``torch.save`` of a module on the meta device is one."""
    own = linear(5.0)
    content = {"m": nn.Linear(3, 2, device="meta").state_dict()}
    with pytest.raises(CheckpointError, match=r"m\.weight has no data in the checkpoint"):
        filling.fitting({"m": own}, content, strict=True, rank=0, ranks=1)


def test_dicts_of_plain_values_are_replaced() -> None:
    """Grown, shrunk, and the same object; one with a tensor goes member by member."""
    history: dict[str, float] = {}
    saved = {"history": {"epoch1": 0.5}, "gone": {}, "counts": {1: {"a": 2}}, "list": [{"a": 1}]}
    state = {"history": history, "gone": {"x": 1}, "counts": None, "list": []}
    filled(saved, state)
    assert state == saved and state["history"] is history
    with pytest.raises(CheckpointError, match=r"unexpected: d\.b"):
        filled({"d": {"a": torch.ones(1), "b": 1}}, {"d": {"a": torch.zeros(1)}})
    assert filled({"d": {"a": 1}}, {"d": 0}) == {"d": {"a": 1}}


def test_lists_with_tensors() -> None:
    """Of the same length they are filled, of another one replaced; a list of objects is not."""
    own = [torch.zeros(2), 0]
    state = filled({"l": [torch.ones(2), 3]}, {"l": own})
    assert state["l"] is own and own[1] == 3 and torch.equal(own[0], torch.ones(2))
    assert len(filled({"l": [torch.ones(2)] * 3}, {"l": [torch.ones(2)]})["l"]) == 3
    with pytest.raises(CheckpointError, match=r"unexpected: l\.1"):
        filled({"l": [linear(1.0), linear(1.0)]}, {"l": [linear(1.0)]})


def test_one_ranks_misfit_changes_nothing_on_the_others(ranks: Ranks) -> None:
    """Each compares before any of them loads."""

    def work(checkpoint: CheckpointContext, rank: int) -> list[float]:
        checkpoint.save_ddp({"w": torch.ones(2)}, 1)
        own = torch.zeros(2 + rank)
        with pytest.raises(CheckpointError, match=r"rank 1 on .*w has size \(3,\)"):
            checkpoint.load_ddp({"w": own})
        return list(own.tolist())

    assert ranks.run(2, work).all() == [[0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.slow
def test_per_rank_on_another_number_of_ranks(ranks: Ranks) -> None:
    """on_resize makes one of all; else wrapped, or kept; modules are loaded in place."""

    def positions(every: list[Any]) -> Any:
        return {"pos": sum(one["pos"] for one in every)}

    def state(value: int) -> dict[str, Any]:
        return {
            "sum": PerRank({"pos": value}, on_resize=positions),
            "wrap": PerRank(value),
            "keep": PerRank(value, on_more_ranks="keep"),
            "module": PerRank({"m": linear(float(value))}),
            "kept module": PerRank(linear(float(value)), on_more_ranks="keep"),
            "kept dict": PerRank({"m": linear(float(value)), "n": value}, on_more_ranks="keep"),
            "kept optimizer": PerRank(
                torch.optim.SGD(linear(0.0).parameters(), lr=float(value)), on_more_ranks="keep"
            ),
        }

    def save(checkpoint: CheckpointContext, rank: int) -> None:
        checkpoint.save_ddp(state(rank + 1), 1)

    def load(checkpoint: CheckpointContext, rank: int) -> Any:
        own = state(9)
        module = own["module"].value["m"]
        checkpoint.load_ddp(own)
        assert own["module"].value["m"] is module
        kept = (
            own["keep"].value,
            own["kept module"].value.bias[0].item(),
            own["kept dict"].value["m"].bias[0].item(),
            own["kept dict"].value["n"],
            own["kept optimizer"].value.param_groups[0]["lr"],
        )
        assert len(set(kept)) == 1, kept
        return own["sum"].value["pos"], own["wrap"].value, kept[0], module.bias[0].item()

    ranks.run(2, save).all()
    assert ranks.run(2, load).all() == [(1, 1, 1, 1.0), (2, 2, 2, 2.0)]
    assert ranks.run(3, load).all() == [(3, 1, 1, 1.0), (3, 2, 2, 2.0), (3, 1, 9, 1.0)]
    assert ranks.run(1, load).all() == [(3, 1, 1, 1.0)]


def test_on_resize_is_for_values() -> None:
    """What it returns could not be put in the place of a module."""
    resized = PerRank({"m": linear(1.0)}, on_resize=lambda every: every[0])
    with pytest.raises(CheckpointError, match="a PerRank with on_resize around a dict"):
        plainstate.make({"x": resized}, writes=True)
    with pytest.raises(CheckpointError, match="x is a PerRank with on_resize around a dict"):
        filling.fitting({"x": resized}, {"x": 1}, strict=True, rank=0, ranks=1)
    with pytest.raises(CheckpointError, match="x is a PerRank with on_resize around a dict"):
        flatten({"x": resized}, 0)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of one, for DistributedDataParallel: each thread's ranks meet elsewhere."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(seed: int = 0, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that have made some steps."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all", "broadcast", "sequential"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_what_is_saved_comes_back(ranks: Ranks, mode: Any, wrapped: bool) -> None:
    """Model and optimizer exactly, wrapped by DDP at either end or not; plain values replaced."""

    def save(checkpoint: CheckpointContext, rank: int) -> None:
        model, optimizer = trained()
        state = {
            "model": DistributedDataParallel(model) if wrapped else model,
            "optimizer": optimizer,
            "more": {"epoch": 3, "best": torch.tensor(0.5)},
            "own": PerRank({"seed": rank}),
        }
        checkpoint.save_ddp(state, 10)

    def load(checkpoint: CheckpointContext, rank: int) -> Any:
        model, optimizer = trained(seed=1, steps=rank)
        state: dict[str, Any] = {
            "model": model if wrapped else DistributedDataParallel(model),
            "optimizer": optimizer,
            "more": {"epoch": 0, "best": torch.tensor(0.0)},
            "own": PerRank({"seed": -1}),
        }
        found = checkpoint.load_ddp(state, mode=mode)
        assert found is not None
        return found.step, model, optimizer, state["more"], state["own"].value

    ranks.run(2, save).all()
    (name,) = ranks.place.glob("step-*")
    plain = torch.load(name / "state.pt", weights_only=True)
    wanted, its_optimizer = trained()
    assert same(plain["model"], dict(wanted.state_dict()))
    for rank, found in enumerate(ranks.run(3, load).all()):
        step, model, optimizer, more, own = found
        assert step == 10
        assert same(dict(model.state_dict()), dict(wanted.state_dict()))
        assert same(optimizer.state_dict(), its_optimizer.state_dict())
        assert more == {"epoch": 3, "best": torch.tensor(0.5)}
        assert own == {"seed": rank % 2}


class Opened:
    """Counts who opens state.pt, and how, by the rank's thread; Python's own audit sees it."""

    def __init__(self) -> None:
        self.by: list[tuple[str, int, str]] = []
        self.rank = threading.local()
        self.counting = True
        sys.addaudithook(self._note)  # for good: a hook cannot be taken away

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.counting and event == "open" and str(arguments[0]).endswith("state.pt"):
            writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            doing, rank = getattr(self.rank, "value", ("else", -1))
            self.by.append((doing, rank, "write" if writes else "read"))


@pytest.mark.parametrize(
    ("mode", "readers"),
    [("all", {0, 1, 2, 3}), ("broadcast", {0}), ("sequential", [0, 1, 2, 3])],
)
def test_who_opens_the_file(ranks: Ranks, mode: Any, readers: Any) -> None:
    """One writer; one reader, or all, or all in the order of the ranks."""
    opened = Opened()

    def work(checkpoint: CheckpointContext, rank: int) -> int:
        opened.rank.value = ("save", rank)
        state: dict[str, Any] = {"number": 7}
        checkpoint.save_ddp(state, 1)
        state["number"] = 0
        opened.rank.value = ("load", rank)
        checkpoint.load_ddp(state, mode=mode)
        return int(state["number"])

    assert ranks.run(4, work).all() == [7] * 4
    opened.counting = False
    saving = [(rank, how) for doing, rank, how in opened.by if doing == "save"]
    # The second is elaunch's own, for the checksum.
    assert saving == [(0, "write"), (0, "read")]
    read = [rank for doing, rank, _ in opened.by if doing == "load"]
    assert len(read) == len(readers), opened.by
    assert (read if isinstance(readers, list) else set(read)) == readers


def test_what_does_not_fit_is_told_on_all_ranks(ranks: Ranks) -> None:
    """Missing and unexpected keys together, those of the model too; not with strict=False."""

    def save(checkpoint: CheckpointContext, rank: int) -> None:
        checkpoint.save_ddp({"model": nn.Linear(2, 2), "old": 1}, 1)

    def load(checkpoint: CheckpointContext, rank: int) -> Any:
        model = nn.Sequential(nn.Linear(2, 2)) if rank else nn.Linear(2, 2)
        state: dict[str, Any] = {"model": model, "new": 2}
        with pytest.raises(CheckpointError) as error:
            checkpoint.load_ddp(state)
        plain: dict[str, Any] = {"old": 0, "new": 2}
        checkpoint.load_ddp(plain, strict=False)
        return str(error.value), plain

    ranks.run(2, save).all()
    (one, plain), other = ranks.run(2, load).all()
    assert (one, plain) == other
    assert plain == {"old": 1, "new": 2}
    assert "missing: new; unexpected: old" in one
    assert "missing: new, model.0.weight, model.0.bias; unexpected: old, model.weight" in one
    assert "rank 0 on host" in one and "rank 1 on host" in one


def test_what_cannot_be_saved_or_asked(ranks: Ranks) -> None:
    """No mode like that; another writer's checkpoint; objects that are not loaded unseen."""

    class Odd:
        pass

    globals()["Odd"] = Odd
    Odd.__qualname__ = "Odd"

    def work(checkpoint: CheckpointContext, rank: int) -> list[str]:
        said = []
        empty: dict[str, Any] = {}
        assert checkpoint.load_ddp(empty) is None
        with pytest.raises(ContextError, match="mode='some': one of all, broadcast, sequential"):
            checkpoint.load_ddp(empty, mode="some")  # type: ignore[arg-type]
        with checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
            if rank == 0:
                torch.save({"odd": Odd()}, path / "state.pt")
        with checkpoint.store_path({"steps_completed": 2}, shard=True) as (path, _):
            (path / f"{rank}").write_text("")
        for step in (1, 2):
            with pytest.raises(CheckpointError) as error:
                checkpoint.load_ddp({"odd": 0}, uuid=f"step-0000000{step}.r0")
            said.append(str(error.value))
        with pytest.raises(SaveError, match="is there already"):
            checkpoint.save_ddp({"x": 1}, 2)
        return said

    one, other = ranks.run(2, work).all()
    assert one == other
    assert "not loaded without being trusted: torch.load(weights_only=True) refuses" in one[0]
    assert "Odd; if you trust the file" in one[0] and "\x1b" not in one[0]
    assert "save_ddp() did not write this checkpoint" in one[1]


def test_a_device_that_is_not_there(ranks: Ranks) -> None:
    """What was saved from cuda:0 is loaded where there is none."""
    tagged = torch.arange(4.0)
    location = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: "cuda:0"
    try:
        ranks.run(1, lambda checkpoint, rank: checkpoint.save_ddp({"x": tagged}, 1)).all()
    finally:
        torch.serialization.location_tag = location
    (path,) = ranks.place.glob("step-*/state.pt")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(path, weights_only=True)

    def load(checkpoint: CheckpointContext, rank: int) -> torch.Tensor:
        state = {"x": torch.zeros(4)}
        checkpoint.load_ddp(state)
        return state["x"]

    for found in ranks.run(2, load).all():
        assert torch.equal(found, tagged)


def test_a_model_with_ddps_prefix_is_loaded(ranks: Ranks) -> None:
    """As the demo of torch's documentation saves it."""

    def work(checkpoint: CheckpointContext, rank: int) -> bool:
        model = nn.Linear(2, 2)
        wanted = {key: value.clone() for key, value in model.state_dict().items()}
        prefixed = {f"module.{key}": value for key, value in wanted.items()}
        checkpoint.save_ddp({"model": prefixed}, 1)
        nn.init.zeros_(model.weight)
        checkpoint.load_ddp({"model": model})
        return rank != 0 or same(dict(model.state_dict()), wanted)

    assert ranks.run(2, work).all() == [True, True]


class Holder(nn.Module):
    """A model whose own submodule has the name that DDP gives to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_a_model_that_has_a_module(ranks: Ranks) -> None:
    """What looks like DDP's prefix is its own."""

    def work(checkpoint: CheckpointContext, rank: int) -> bool:
        model, fresh = Holder(), Holder()
        checkpoint.save_ddp({"model": model}, 1)
        checkpoint.load_ddp({"model": DistributedDataParallel(fresh)})
        return rank != 0 or same(dict(fresh.state_dict()), dict(model.state_dict()))

    assert ranks.run(2, work).all() == [True, True]


def test_an_optimizers_state_by_numbers_is_refused(ranks: Ranks) -> None:
    """At the save and at the load, wherever it stands: it would restore nothing."""

    def states() -> list[dict[str, Any]]:
        model = nn.Linear(2, 1)
        raw = torch.optim.SGD(model.parameters(), lr=0.5).state_dict()
        inside = {"model": model, "more": {"all": [raw]}}
        return [{"model": model, "optimizer": raw}, inside, {"own": PerRank(raw)}]

    def work(checkpoint: CheckpointContext, rank: int) -> list[str]:
        told = []
        for state in states():
            with pytest.raises(SaveError) as refused:
                checkpoint.save_ddp(state, 10)
            told.append(str(refused.value))
        good = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(good.parameters(), lr=0.5)
        checkpoint.save_ddp({"model": good, "optimizer": optimizer}, 20)
        for state in states():
            with pytest.raises(CheckpointError) as refused_load:
                checkpoint.load_ddp(state, strict=False)
            told.append(str(refused_load.value))
        return told

    outcome = ranks.run(2, work)
    for told in outcome.all():
        for text, name in zip(told, ("optimizer", "more.all.0", "own") * 2, strict=True):
            assert f"{name} is optimizer.state_dict(), which numbers" in text
            assert "Give the optimizer itself" in text
