"""save_ddp and load_ddp: one file for all ranks. Ranks are threads around a real TCPStore."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.errors import CheckpointError, ContextError, SaveError
from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.training.checkpoint.state.perrank import PerRank
from tests.training.checkpoint.ddprig import Ranks


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
