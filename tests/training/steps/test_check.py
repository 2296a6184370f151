"""Which micro-batches are computed twice, and by whom."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from elaunch.errors import BitsDifferError
from elaunch.training.steps.check import BitCheck, drawn
from elaunch.training.steps.order import StepData
from elaunch.training.steps.tree import leaves_of
from tests.training.stepsrig import Rig

LEAVES = 1000


@pytest.mark.parametrize("size", [2, 3, 7, 2000])
def test_one_in_a_hundred_is_computed_by_another_rank(size: int) -> None:
    """The same ones in all worlds, others in each step."""
    step, later = (StepData(number, 0, 0, LEAVES, LEAVES, False) for number in (1, 2))
    alone = drawn(step, 7, 1)
    assert 3 <= len(alone) <= 25 and all(ranks == [0] for ranks in alone.values())
    assert drawn(later, 7, 1) != alone != drawn(step, 8, 1)
    found = drawn(step, 7, size)
    assert found.keys() == alone.keys()
    for leaf, others in found.items():
        (own,) = set(range(size)) - set(others)
        assert leaf in leaves_of(LEAVES, own, size) and len(others) == size - 1


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A rig for one test."""
    made = Rig()
    yield made
    made.close()


def train(rig: Rig, check: bool | str, wrong: int) -> list[int | None]:
    """Train for a step of many leaves; the n-th computation of each leaf has another loss."""
    given: list[int | None] = []
    many = {"dataset": None, "batch": lambda *_: torch.ones(1, 2), "until": 1}
    for step in rig.loop(**many, global_batch=LEAVES, micro_batch=1, check=check):
        for x in step.micro_batches():
            given.append(step.leaf)
            is_wrong = given.count(step.leaf) == wrong
            step.backward(rig.model(x).square().mean() * (1 + 1e-6 * is_wrong))
            step.log(rows=1.0)
        step.apply(rig.optimizer)
        assert step.metrics["rows"] == 1.0
    return given


def test_a_rank_is_named_by_its_number_in_the_job() -> None:
    """It may be the only one that is left."""
    step, weight = StepData(1, 0, 0, LEAVES, LEAVES, False), nn.Parameter(torch.ones(1))
    check = BitCheck(step, 7, [weight], True, 3, None)
    for number in range(4):  # twice, and as often again
        for leaf in check.second():
            loss = (weight * (1 + number)).sum()
            check.compute(leaf, loss, loss.backward)
        found = check.differing() if number % 2 else {}
    assert found and all("rank 3 (host " in who for who in found.values())


def test_a_leaf_is_given_out_twice(rig: Rig) -> None:
    """And counts once."""
    given = train(rig, True, wrong=0)
    again = given[LEAVES:]
    assert given[:LEAVES] == list(range(LEAVES)) and 3 <= len(again) <= 25
    checked = rig.model.weight.detach().clone()
    other = Rig()
    assert train(other, False, wrong=0) == list(range(LEAVES))
    assert torch.equal(other.model.weight, checked)
    other.close()


def test_one_that_differs_is_an_error(rig: Rig) -> None:
    """Before a weight changes; it is computed twice more to see whose bits are wrong."""
    before = rig.model.weight.detach().clone()
    with pytest.raises(BitsDifferError, match=r"step 1: micro-batch \d+ .*, 1 of 4 times; no wei"):
        train(rig, True, wrong=2)
    assert torch.equal(rig.model.weight, before)


def test_a_warning_lets_the_step_go_on(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """With what was computed last."""
    train(rig, "warn", wrong=2)
    assert "1 of 4 times; the step goes on" in caplog.text
    assert rig.reported[0][1]["differing"] >= 3


def test_gradients_of_all_types_are_compared(rig: Rig) -> None:
    """Of no dimension, bf16, and sparse ones."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(3, 2, sparse=True)
            self.factor = nn.Parameter(torch.ones(()))
            self.out = nn.Linear(2, 1).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out((self.rows(x) * self.factor).bfloat16())
            return y.float().square().mean()

    rig.model = Net()  # type: ignore[assignment]
    rig.optimizer = torch.optim.SGD(rig.model.parameters(), lr=0.001)
    many = {"dataset": None, "batch": lambda *_: torch.tensor([0, 2, 2]), "until": 1}
    given = 0
    for step in rig.loop(**many, global_batch=LEAVES, micro_batch=1, check=True):
        for x in step.micro_batches():
            given += 1
            step.backward(rig.model(x))
        step.apply(rig.optimizer)
    assert given > LEAVES
