"""What a save remembers, what it copies, and what it leaves alone."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elaunch
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.training.checkpoint.dcp import plan
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.models import bits, plain, train


def counted_plans() -> list[int]:
    """Count how often this process plans from now on, in the list that is returned."""
    made: list[int] = []
    make = plan.make

    def counting(*args: Any) -> Any:
        made.append(1)
        return make(*args)

    plan.make = counting
    return made


def exchanges(ctx: Any) -> int:
    """Return how often the ranks wait for each other in a load from the disk."""
    state, calls = {"model": plain()}, []
    ctx.checkpoint.save(state, 1)
    joined = ctx.distributed._joined

    def counting(*args: Any) -> Any:
        calls.append(args[0])
        return joined(*args)

    ctx.distributed._joined = counting
    ctx.checkpoint.load(state)
    return len(calls)


@pytest.mark.ranks
def test_how_often_a_load_waits_for_all_ranks(tmp_path: Path) -> None:
    """Each time for the slowest of them, and of thousands one is slow."""
    assert in_group(exchanges, 2, tmp_path) == [8, 8]


def cached(ctx: Any) -> Any:
    """Save states of changing values, then of changing shape; load the last of each."""
    made = counted_plans()
    rank = ctx.distributed.rank
    model = plain()
    state: dict[str, Any] = {"model": model, "step": 0, "text": "x", "own": elaunch.PerRank("")}
    told = []

    def saved(step: int, block: bool, value: int = 0) -> None:
        with torch.no_grad():
            model[0].weight.fill_(step)
        state["step"] = value
        ctx.checkpoint.save(state, step, block=block)
        ctx.checkpoint.wait()
        target = {"model": plain(1), "step": 0, "text": "", "own": elaunch.PerRank("")}
        target |= {key: 0 for key in state if key.startswith("more")}
        ctx.checkpoint.load(target)
        assert target["model"][0].weight.unique().tolist() == [step]
        assert (target["step"], target["text"]) == (value, state["text"])
        assert target["own"].value == state["own"].value
        told.append(len(made))

    saved(1, True)
    saved(2, False, 2**40)
    state["text"] = "longer " * 50
    saved(3, True)
    state["own"].value = "only one rank's is longer" * 300 * rank
    saved(4, False)
    saved(5, True)
    state["text"], state["own"].value = "", ""
    saved(6, False)
    if rank == 1:
        model.register_parameter("3", nn.Parameter(torch.zeros(2)))
        del model._parameters["3"]
    state["more"] = 5
    saved(7, True)
    del state["more"]
    saved(8, False)
    state["model"] = model = plain(3)
    saved(9, True)
    return told


@pytest.mark.ranks
def test_plans_are_kept_while_the_state_keeps_its_shape(tmp_path: Path) -> None:
    """Values may grow and shrink; new keys need a new plan, and the old one is still known."""
    said = in_group(cached, 2, tmp_path, agent=True)
    assert said[0] == said[1] == [1, 1, 1, 1, 1, 1, 2, 2, 2], said


def sent_bytes(ctx: Any) -> Any:
    """Save, and load, a state of many keys; return the bytes that this rank sends each time."""
    distributed, rank, sent = ctx.distributed, ctx.distributed.rank, [0]
    allgather = distributed.allgather

    def counting(obj: Any, timeout: float | None = None) -> Any:
        sent[0] += len(pickle.dumps(obj))
        return allgather(obj, timeout)

    def total(work: Callable[[], Any]) -> int:
        sent[0] = 0
        work()
        return sent[0]

    distributed.allgather = counting
    values = {f"layers.{number}.bias": number for number in range(3000)}
    tensors = {f"layers.{number}.weight": torch.full((2,), number) for number in range(3000)}
    state = {"values": values, "tensors": tensors}
    stage = {key: one for number, (key, one) in enumerate(tensors.items()) if number % 2 == rank}
    staged = {"values": values, "stage": stage}
    for step, one in ((1, state), (2, staged)):
        ctx.checkpoint.save(one, step)
    newest = ctx.checkpoint.latest()
    return [
        total(lambda: ctx.checkpoint.load(staged, which=newest.uuid)),
        total(lambda: ctx.checkpoint.save(state, 3)),
        total(lambda: ctx.checkpoint.save(staged, 4)),
        total(lambda: ctx.checkpoint.check_same(state)),
    ]


@pytest.mark.trial
def test_ranks_send_few_bytes_for_many_keys(tmp_path: Path) -> None:
    """Also where they have different ones, as with pipeline stages."""
    said = in_group(sent_bytes, 2, tmp_path)
    assert not isinstance(said[1], Raised), said[1]
    assert max(said[1]) < 8000, said


def fresh_optimizer(ctx: Any, kind: str) -> Any:
    """Save before the first step, load it; train both, and one that was never saved."""
    made = {
        "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        "sgd": lambda model: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, dampening=0.5
        ),
        "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }[kind]
    models = [plain(seed) for seed in (0, 0, 1)]
    _, saved, loaded = models
    optimizers = [made(model) for model in models]
    ctx.checkpoint.save({"model": saved, "optimizer": optimizers[1]}, 0)
    assert not optimizers[1].state and saved[0].weight.grad is None
    train(loaded, optimizers[2], 1)
    ctx.checkpoint.load({"model": loaded, "optimizer": optimizers[2]})
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer)
    results = [
        bits([m.state_dict(), o.state_dict()]) for m, o in zip(models, optimizers, strict=True)
    ]
    return results[0] == results[1] == results[2]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["adam", "sgd", "plain"])
def test_a_save_before_the_first_step_makes_none(tmp_path: Path, kind: str) -> None:
    """torch would call ``step()`` to have something to save, and Adam would count it."""
    assert in_group(fresh_optimizer, 1, tmp_path, kind) == [True]


class Shared(nn.Module):
    """Has a tied, a frozen and an unused parameter, and a buffer that is not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scratch", torch.rand(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Use all but one."""
        return self.second(self.frozen(self.first(inputs)))


def shared_parameters(ctx: Any) -> Any:
    """Save and load it."""
    model, other = Shared(0), Shared(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fresh = torch.optim.Adam(other.parameters(), lr=0.02)
    train(model, optimizer)
    scratch = other.scratch.clone()
    ctx.checkpoint.save({"model": model, "optimizer": optimizer}, 3)
    ctx.checkpoint.load({"model": other, "optimizer": fresh})
    assert other.second.weight is other.first.weight and bits(other.scratch) == bits(scratch)
    assert not other.frozen.weight.requires_grad
    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
    assert len(fresh.state) == 1, "neither the unused nor the frozen one has a state"
    return bits(other.state_dict()) == bits(model.state_dict())


@pytest.mark.ranks
def test_tied_frozen_and_unused_parameters(tmp_path: Path) -> None:
    """They come back as they were: tied, frozen, and without a state."""
    assert in_group(shared_parameters, 2, tmp_path) == [True, True]


def busy(ctx: Any) -> Any:
    """Save while a save is in flight."""
    saver = ctx.checkpoint._session.together(None).saver
    begin = saver.begin
    ctx.checkpoint.save({"x": 1}, 1, block=False)
    saver.begin = lambda wait, timeout=None: begin(wait, timeout) and ctx.distributed.rank == 0
    skipped = ctx.checkpoint.save({"x": 2}, 2, block=False, when_busy="skip")
    told = [skipped.skipped, skipped.done(), skipped.result()]
    saver.begin = begin
    third = ctx.checkpoint.save({"x": 3}, 3, block=False, when_busy="wait")
    told.append(third.skipped)
    told.append(ctx.checkpoint.save({"x": 4}, 4).step)
    told.append(ctx.checkpoint.wait().step)
    try:
        ctx.checkpoint.save({"x": 5}, 5, block=False, when_busy="sometimes")
    except elaunch.ContextError as error:
        told.append("sometimes" in str(error))
    return told, sorted(found.step for found in ctx.checkpoint.list())


@pytest.mark.ranks
def test_at_most_one_is_in_flight(tmp_path: Path) -> None:
    """If one rank is busy all skip, or all wait; a blocking save comes after."""
    said = in_group(busy, 2, tmp_path, agent=True)
    assert said[0] == said[1] == ([True, True, None, False, 4, 4, True], [1, 3, 4]), said


def full_disk(ctx: Any, block: bool) -> Any:
    """Save to a disk that is full for one rank's shard, then to one that is not."""
    storage = ctx.checkpoint._session.storage
    write = storage.write_shard
    storage.write_shard = lambda stage, part, images: full_for_rank_1(write, stage, part, images)
    told = []
    try:
        ctx.checkpoint.save({"x": torch.zeros(3)}, 1, block=block)
        ctx.checkpoint.wait()
    except elaunch.SaveError as error:
        told.append("No space left" in str(error) or "no space left" in str(error))
    return told, ctx.checkpoint.save({"x": torch.zeros(3)}, 2).step, len(ctx.checkpoint.list())


def full_for_rank_1(write: Any, stage: Any, part: Any, images: Any) -> bytes:
    """Write a shard, but for that of rank 1 in the first step."""
    if part.rank == 1 and stage.step == 1:
        raise OSError(28, os.strerror(28), "__1_0.distcp")
    return bytes(write(stage, part, images))


@pytest.mark.ranks
@pytest.mark.parametrize("block", [True, False], ids=["block", "memory"])
def test_a_full_disk_fails_the_save_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: bool
) -> None:
    """All ranks get the error; the next save works."""
    write = PosixStorage.write_shard

    def full(self: PosixStorage, *given: Any) -> bytes:
        return full_for_rank_1(lambda *more: write(self, *more), *given)

    monkeypatch.setattr(PosixStorage, "write_shard", full)  # in the agent
    said = in_group(full_disk, 2, tmp_path, block, agent=not block)
    assert not isinstance(said[0], Raised), said[0]
    assert said[0] == said[1] == ([True], 2, 1), said
