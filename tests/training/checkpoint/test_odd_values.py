"""Odd values: each is saved and comes back with the same bits, or the save names its key."""

from __future__ import annotations

import array
import collections
import enum
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elaunch
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.test_in_step import tried

numpy = pytest.importorskip("numpy")


class Color(enum.Enum):
    """A class of the script's own."""

    RED = 1


class Expanded(nn.Module):
    """Has a buffer whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("few", torch.ones(1).expand(4))
        self.weight = nn.Parameter(torch.ones(2))


def contains_itself(kind: Callable[[], Any]) -> Any:
    """Return a container that has itself in it."""
    made = kind()
    if isinstance(made, dict):
        made["again"] = {"deeper": made}
    else:
        made.append(made)
    return made


def masked() -> Any:
    """Return a tensor that is made of two others."""
    return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "masked array": (lambda: numpy.ma.array([1.0], mask=[1]), "k, a MaskedArray, could not be"),
    "record array": (lambda: numpy.rec.array([(1, 2.0)]), "k, a recarray, could not be loaded"),
    "array": (lambda: array.array("d", [1.0]), "k, a array, could not be loaded again"),
    "function": (lambda: len, "k, a builtin_function_or_method, could not be loaded again"),
    "uint4": (lambda: torch.empty(4, dtype=torch.uint4), "k cannot be saved: torch cannot write"),
    "masked tensor": (masked, "k cannot be saved: it is a MaskedTensor, which has no memory"),
    "dict in itself": (lambda: contains_itself(dict), "k.again.deeper.again… has more than 100"),
    "list in itself": (lambda: contains_itself(list), "k.0.0.0… has more than 100 levels"),
    "deque in itself": (lambda: contains_itself(collections.deque), "k, a deque, contains itself"),
    "read-only dict": (lambda: types.MappingProxyType({"a": 1}), "k.a cannot be replaced in a map"),
    "expanded buffer": (Expanded, "k.few cannot be saved: it is expanded"),
}


def refused(ctx: Any) -> Any:
    """Try to save each; then save what can be."""
    said = {}
    for name, (make, _) in REFUSED.items():
        value = make()
        said[name] = tried(lambda value=value: ctx.checkpoint.save({"k": value}, 1))
    ctx.checkpoint.save({"x": 1}, 2)
    return said, [found.step for found in ctx.checkpoint.list()]


@pytest.mark.ranks
def test_what_could_not_be_loaded_is_refused_by_its_key(tmp_path: Path) -> None:
    said = in_group(refused, 2, tmp_path)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    told, steps = said[0]
    assert steps == [2]
    wrong = {name: told[name] for name, (_, words) in REFUSED.items() if words not in told[name]}
    assert not wrong, wrong


def changing(ctx: Any) -> Any:
    """Save a value, then, under the same key, one of a kind that could not be loaded."""
    save = ctx.checkpoint.save
    save({"k": [numpy.ones(2)]}, 1)
    said = tried(lambda: save({"k": [numpy.ma.array([1.0], mask=[1])]}, 2))
    save({"k": [numpy.ones(3)]}, 3)
    return said, [found.step for found in ctx.checkpoint.list()]


@pytest.mark.ranks
def test_a_value_that_becomes_another_kind(tmp_path: Path) -> None:
    """What was read back once under a key is read back again when it names something else."""
    ((said, steps),) = in_group(changing, 1, tmp_path)
    assert "k, a list, could not be loaded again" in said and "numpy.ma" in said
    assert steps == [1, 3]


def kept(ctx: Any) -> Any:
    """Save expanded, overlapping, small and odd tensors and values, and load them."""
    state: dict[str, Any] = {
        "expanded": torch.tensor([3.0]).expand(4),
        "scalar": torch.tensor(5),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]).conj(),
        "keys": {1: torch.ones(1), 2: torch.zeros(1)},
        "empty": torch.empty(0, 3),
        "enum": {Color.RED: torch.ones(2)},
        "table": numpy.zeros(2, "i4,f8"),
    }
    ctx.checkpoint.save(state, 1)
    into: dict[str, Any] = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
    into["expanded"] = torch.zeros(1).expand(4)
    into["keys"] = {1: torch.zeros(1), 2: torch.ones(1)}
    ctx.checkpoint.load(into)
    same = [torch.equal(into[key], state[key]) for key in ("expanded", "scalar", "complex")]
    same.append(torch.equal(into["float8"].view(torch.uint8), state["float8"].view(torch.uint8)))
    same += [torch.equal(into["keys"][key], state["keys"][key]) for key in (1, 2)]
    same += [torch.equal(into["enum"][Color.RED], torch.ones(2))]
    same += [bool((into["table"] == state["table"]).all())]
    return all(same)


@pytest.mark.ranks
def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    assert in_group(kept, 2, tmp_path) == [True, True]


def own_values(ctx: Any) -> Any:
    """Save a value per rank; or load it on one rank, which needs a word for it."""
    mark = elaunch.PerRank({"at": ctx.distributed.rank})
    if ctx.distributed.size > 1:
        ctx.checkpoint.save({"position": mark}, 1)
        return ""
    mark.value = {"at": 7}
    told = tried(lambda: ctx.checkpoint.load({"position": mark}))
    assert mark.value == {"at": 7}
    mark.on_fewer_ranks = "drop"
    ctx.checkpoint.load({"position": mark})
    assert mark.value == {"at": 0}
    return told


@pytest.mark.ranks
def test_fewer_ranks_say_whose_values_they_would_leave(tmp_path: Path) -> None:
    assert in_group(own_values, 3, tmp_path) == ["", "", ""]
    (told,) = in_group(own_values, 1, tmp_path)
    assert "position: what ranks 1, 2 had of their own is not loaded on 1 rank" in told
    assert 'on_fewer_ranks="drop"' in told
