"""Which samples a step takes: each of an epoch once, the same for every number of ranks."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaunch.errors import SamplerError
from elaunch.training.sampler import Permutation
from elaunch.training.steps.order import Order, Position, Progress, StepData, seed_all
from elaunch.training.steps.tree import leaves_of


def epoch_of(order: Order) -> list[StepData]:
    """Return the steps of the first epoch."""
    steps = [order.next(Position())]
    while not steps[-1].is_last:
        steps.append(order.next(order.after(steps[-1])))
    return steps


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_each_sample_of_an_epoch_comes_once(
    length: int, micro: int, count: int, size: int, drops: bool
) -> None:
    """In the sampler's order; what is left is dropped or a shorter step."""
    batch = micro * count
    if drops and length < batch:
        return
    order = Order(length, batch, micro, seed=3, drops_last=drops)
    found: list[int] = []
    for step in epoch_of(order):
        parts = [order.indices(step, leaves_of(step.leaves, r, size)) for r in range(size)]
        of_step = list(chain(*chain(*parts)))
        assert len(of_step) == step.size
        found += of_step
    whole = Permutation(length, 3, 0)(torch.arange(length)).tolist()
    assert found == (whole[: length - length % batch] if drops else whole)


def test_an_epoch_ends_with_its_last_step() -> None:
    """And the next one begins at once."""
    order = Order(10, 4, 2, drops_last=False)
    steps = epoch_of(order)
    assert [(s.size, s.leaves, s.is_last) for s in steps] == [
        (4, 2, False),
        (4, 2, False),
        (2, 1, True),
    ]
    after = order.next(order.after(steps[-1]))
    assert (after.number, after.epoch, after.offset) == (4, 1, 0)


def test_a_smaller_step_goes_on_in_mid_epoch() -> None:
    """Where another global batch has left off; what does not suffice any more is dropped."""
    step = Order(100, 10, 5).next(Position(5, 0, 60))
    assert (step.number, step.epoch, step.offset) == (6, 0, 60)
    step = Order(100, 50, 5).next(Position(5, 0, 60))
    assert (step.number, step.epoch, step.offset) == (6, 1, 0)


def test_without_a_dataset_there_is_one_endless_epoch() -> None:
    """A step has its leaves, whatever its number."""
    step = Order(0, 12, 4).next(Position(10**6, 0, 12 * 10**6))
    assert (step.number, step.leaves, step.is_last) == (10**6 + 1, 3, False)


def test_a_position_comes_back() -> None:
    """By numbers, which JSON could hold."""
    order = Order(100, 10, 5, seed=7)
    saved, loaded = Progress(order), Progress(order)
    saved.position = Position(15, 1, 50)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.position == Position()
    loaded.adopt()
    assert loaded.position == Position(15, 1, 50)


@pytest.mark.parametrize("other", [{"seed": 8}, {"shuffle": False}, {"length": 99}])
def test_the_position_in_other_data_is_refused(other: dict[str, Any]) -> None:
    """With what differs."""
    saved = Progress(Order(100, 10, 5, seed=7))
    here = {"length": 100, "global_batch": 10, "micro_batch": 5, "seed": 7, **other}
    loaded = Progress(Order(**here))
    loaded.load_state_dict(saved.state_dict())
    with pytest.raises(SamplerError, match=next(iter(other))):
        loaded.adopt()


def test_seeds_repeat_and_differ() -> None:
    """In all three generators."""

    def drawn(*numbers: int) -> tuple[float, float, float]:
        seed_all(1, "leaf", *numbers)
        return random.random(), numpy.random.random(), float(torch.rand(()))

    assert drawn(2, 3) == drawn(2, 3)
    assert all(a != b for a, b in zip(drawn(2, 3), drawn(2, 4), strict=True))
    assert all(a != b for a, b in zip(drawn(23), drawn(2, 3), strict=True))
