"""What save_ddp takes, what it refuses, and what has to be the same on all ranks."""

from __future__ import annotations

import datetime
import enum
import functools
import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.errors import CheckpointError, SaveError
from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.training.checkpoint.ddp import plainstate
from elaunch.training.checkpoint.state.perrank import PerRank
from tests.training.checkpoint.ddprig import Ranks


def lists(rank: int, start: float) -> dict[Any, Any]:
    """Return a state with everything in lists; ``start`` is in all of it."""
    models = [nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2, affine=False)]
    for tensor in models[0].parameters():
        nn.init.constant_(tensor, start)
    nn.init.constant_(models[2].running_mean, start)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=start, momentum=0.9)
    return {
        "models": models,
        "optimizers": [optimizer],
        "schedulers": [[torch.optim.lr_scheduler.StepLR(optimizer, 3)]],
        "own": [PerRank(start + rank), {"deep": PerRank({"r": rank, "start": start})}],
        "tensors": [torch.full((2,), start), {"of": torch.tensor(start)}],
        7: [start, {"plain": start}],
    }


def test_lists_of_objects_come_back(ranks: Ranks) -> None:
    """Modules with and without parameters, optimizers, schedulers, PerRank; in one plain file."""

    def work(checkpoint: CheckpointContext, rank: int) -> Any:
        checkpoint.save_ddp(lists(rank, 2.0), 1)
        state = lists(rank, 0.5)
        checkpoint.load_ddp(state)
        linear, _, norm = state["models"]
        return (
            linear.bias.tolist(),
            norm.running_mean.tolist(),
            state["optimizers"][0].param_groups[0]["lr"],
            state["schedulers"][0][0].base_lrs,
            state["own"][0].value,
            state["own"][1]["deep"].value,
            state["tensors"][0].tolist(),
            state["tensors"][1]["of"].item(),
            state[7],
        )

    for rank, found in enumerate(ranks.run(2, work).all()):
        own = {"r": rank, "start": 2.0}
        rest = ([2.0, 2.0], 2.0, [2.0, {"plain": 2.0}])
        assert found == ([2.0, 2.0], [2.0, 2.0], 2.0, [2.0], 2.0 + rank, own, *rest)
    (path,) = ranks.place.glob("step-*/state.pt")
    plain = torch.load(path, weights_only=True)
    assert plain["own"][0] == {"elaunch.per_rank": [2.0, 3.0]}
    assert plain["models"][1] == {}


class Colour(enum.Enum):
    """What torch.load does not know."""

    RED = 1


class Holding:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """Return the state; what raises is called."""
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state: Any) -> None:
        """Take it, unless it raises."""
        self.state_dict()


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a": {"b": frozenset([1])}}, "a.b, a frozenset"),
        ({"a": [1, deque([1])]}, "a.1, a deque"),
        ({"a": datetime.datetime(2026, 1, 1)}, "a, a datetime"),
        ({"a": Path("/x"), "b": 1}, "a, a PosixPath"),
        ({"a": (1, range(3))}, "a.1, a range"),
        ({"a": PerRank({"b": Colour.RED})}, "a.b, a Colour"),
        ({"a": Holding({"best": slice(1)})}, "a.best, a slice"),
        ({"a": {Colour.RED: 1}}, "a, a dict"),
        ({"a": lambda: 1}, "a, a function"),
    ],
)
def test_what_would_not_be_loaded_is_refused(state: dict[str, Any], key: str) -> None:
    """With its key and what to do, and without torch's page of explanations."""
    with pytest.raises(CheckpointError) as refused:
        plainstate.make(state, writes=True)
    text = str(refused.value)
    assert text.startswith(f"{key}, could not be loaded again: ")
    assert "float(x)" in text and "add_safe_globals" in text
    assert "\n" not in text and "\x1b" not in text and len(text) < 500


def nested() -> torch.Tensor:
    """Return a nested tensor."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def with_buffer(value: torch.Tensor) -> nn.Module:
    """Return a module with a buffer."""
    module = nn.Linear(2, 2)
    module.register_buffer("b", value)
    return module


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (lambda: {"a": nested()}, "a cannot be saved: it is a nested tensor"),
        (lambda: {"a": [{"b": nested()}]}, "a.0.b cannot be saved: it is a nested tensor"),
        (lambda: {"a": with_buffer(nested())}, "a.b cannot be saved: it is a nested tensor"),
        (lambda: {"a": Holding({"b": [nested()]})}, "a.b.0 cannot be saved: it is a nested"),
        (lambda: {"a": PerRank(nested())}, "a cannot be saved: it is a nested tensor"),
        (lambda: {"a": nn.Linear(2, 2, device="meta")}, "a.weight cannot be saved: it has no data"),
        (lambda: {"a": with_buffer(torch.ones(2, device="meta"))}, "a.b cannot be saved: it has"),
        (lambda: {"a": nn.LazyLinear(2)}, "a.weight cannot be saved: it has no size yet"),
    ],
)
def test_tensors_that_no_load_takes_are_refused(
    state: Callable[[], dict[str, Any]], told: str
) -> None:
    """Wherever they stand; quantised ones are not among them."""
    with pytest.raises(CheckpointError) as refused:
        plainstate.make(state(), writes=True)
    assert str(refused.value).startswith(told)
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    assert plainstate.make({"a": quantised}, writes=True).content["a"] is quantised


def test_a_class_that_is_trusted_is_saved() -> None:
    """As torch.load will trust it."""
    with torch.serialization.safe_globals([Colour, getattr]):
        made = plainstate.make({"a": Colour.RED, "b": OrderedDict(c=1)}, writes=True)
    assert made.content == {"a": Colour.RED, "b": {"c": 1}}


def test_numpys_scalars_are_refused() -> None:
    """A best loss by numpy is the usual case."""
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float64(0.5), numpy.int64(3), numpy.arange(3.0)):
        with pytest.raises(CheckpointError, match=r"^loss, a .*refuses numpy\."):
            plainstate.make({"loss": value}, writes=True)


@pytest.mark.slow
def test_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check pickles what is no tensor; of a model's state a few bytes go through it."""
    written = []
    save = torch.save

    def noted(value: Any, file: Any) -> None:
        save(value, file)
        written.append(file.tell())

    monkeypatch.setattr(torch, "save", noted)
    model = nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.zeros(1, 500)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    made = plainstate.make({"m": model, "o": optimizer, "t": [torch.zeros(10**6)]}, writes=True)
    assert made.size > 4 * 10**6 and sum(written) < 5000
    kept = made.content["m"]["weight"]
    assert kept.data_ptr() == model.weight.data_ptr()
    gc.collect()


def test_reasons_are_short() -> None:
    """A line, whatever torch says."""
    assert plainstate.reason(ValueError("one\n  two")) == "one two"
    assert len(plainstate.reason(ValueError("x" * 999))) <= 201


def raising(error: Exception) -> Callable[[], Any]:
    """Return what raises."""

    def call() -> Any:
        raise error

    return call


def test_an_error_of_one_rank_is_one_of_all(ranks: Ranks) -> None:
    """In a state_dict, a load_state_dict, the state itself; after it the next call works."""

    def states(rank: int) -> list[Any]:
        broken = Holding(raising(KeyError("mine"))) if rank == 0 else Holding({})
        own = {"e": 1, **({"p": PerRank(1)} if rank == 0 else {})}
        return [
            {"a": broken},
            own,
            {"a": (lambda: 1) if rank else 1},
            {"a": torch.eye(2).to_sparse()},
            {"a": (nn.Linear(1, 1),)},
            {"a": PerRank(PerRank(1))},
            [1],
            None,
            nn.Linear(1, 1) if rank else {},
        ]

    def work(checkpoint: CheckpointContext, rank: int) -> list[str]:
        told = []
        for state in states(rank):
            with pytest.raises(SaveError) as refused:
                checkpoint.save_ddp(state, 1)
            told.append(str(refused.value))
        checkpoint.save_ddp({"a": Holding({})}, 1)
        calls = [
            functools.partial(checkpoint.load_ddp, state)
            for state in (states(rank)[0], states(rank)[-1])
        ]
        for call in calls:
            with pytest.raises(CheckpointError) as unloaded:
                call()
            told.append(str(unloaded.value))
        checkpoint.load_ddp({"a": Holding({})})
        return told

    one, other = ranks.run(2, work).all()
    assert one == other
    no_dict = "the state is a dict with names as keys"
    wanted = [
        "rank 0 on host",
        "p is a PerRank on rank 0, missing on rank 1",
        "rank 1 on host",
        "a cannot be saved: it is sparse",
        "a is a tuple with modules or optimizers in it: make it a list",
        "a is a PerRank in a PerRank",
        f'{no_dict}, as in {{"model": model, "step": step}}; this is list',
        "this is NoneType",
        "rank 1 on host",
        "KeyError: 'mine'",
        "this is Linear",
    ]
    for text, part in zip(one, wanted, strict=True):
        assert part in text


def test_what_differs_between_the_ranks_is_refused(ranks: Ranks) -> None:
    """Values, keys, kinds, what schedulers and others have; not tensors, and not equal sets."""

    def states(rank: int) -> list[tuple[Any, str]]:
        other = torch.tensor(1) if rank else 1
        return [
            ({"more": {"e": rank}}, "more.e is 0 on rank 0, 1 on rank 1"),
            ({"l": [rank, 2]}, "l is [0, 2] on rank 0, [1, 2] on rank 1"),
            ({"e": 1, f"r{rank}": 2}, "r0 is a value on rank 0, missing on rank 1"),
            ({"e": {} if rank else {"f": 1}}, "e.f is a value on rank 0, missing on rank 1"),
            ({"e": other}, "e is a value on rank 0, a tensor on rank 1"),
            ({"s": Holding({"at": rank})}, "s.at is 0 on rank 0, 1 on rank 1"),
        ]

    def work(checkpoint: CheckpointContext, rank: int) -> None:
        for state, part in states(rank):
            with pytest.raises(SaveError) as refused:
                checkpoint.save_ddp(state, 1)
            assert part in str(refused.value) and "elaunch.PerRank(…)" in str(refused.value)
        words = [f"{number}" for number in range(20)]
        alike = {
            "set": set(words if rank else reversed(words)),
            "nan": float("nan"),
            "model": nn.Linear(2, 2),
            "tensor": torch.tensor(rank),
            "own": PerRank(rank),
        }
        checkpoint.save_ddp(alike, 1)

    ranks.run(2, work).all()
