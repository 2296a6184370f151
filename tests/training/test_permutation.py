"""The order of an epoch: a bijection, pinned, and as good as a shuffle can be."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaunch.training.permutation import LARGEST, ROUNDS, VERSION, Permutation

BILLION = 10**9
PINNED_TEN = [6, 1, 9, 0, 8, 4, 7, 5, 2, 3]
PINNED_SEED = [3, 8, 1, 9, 7, 6, 2, 5, 0, 4]
PINNED_EPOCH = [4, 6, 9, 7, 2, 1, 3, 0, 5, 8]
PINNED_BILLION = [121648538, 683574085, 650284425, 371222173]


def order(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    """Return a whole order."""
    found: list[int] = Permutation(length, seed, epoch)(torch.arange(length)).tolist()
    return found


def written_out(length: int, seed: int, epoch: int, position: int) -> int:
    """Compute one place of the order from its description, in plain integers."""
    words = hashlib.shake_256(f"elaunch {seed} {epoch}".encode()).digest(8 * ROUNDS)
    key = [int.from_bytes(words[i : i + 4], "little") for i in range(0, len(words), 4)]
    rows = math.isqrt(length - 1) + 1
    rows += rows % 2
    columns = -(-length // rows)

    def drawn(value: int, number: int, side: int) -> int:
        word = value ^ key[2 * number]
        word ^= word >> 16
        word = word * 0x45D9F3B % 2**32
        word = (word ^ (word >> 16)) ^ key[2 * number + 1]
        word = word * 0x45D9F3B % 2**32
        return (word ^ (word >> 16)) * side >> 32

    while True:
        row, column = divmod(position, columns)
        for number in range(0, ROUNDS, 2):
            row = (row + drawn(column, number, rows)) % rows
            column = (column + drawn(row, number + 1, columns)) % columns
        position = row * columns + column
        if position < length:
            return position


@pytest.mark.slow
@given(length=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_each_once(length: int, seed: int, epoch: int) -> None:
    """Any length, seed and epoch give all of 0 … length - 1."""
    assert sorted(order(length, seed, epoch)) == list(range(length))


@pytest.mark.slow
@given(
    length=st.integers(1, LARGEST),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 10**6),
    data=st.data(),
)
def test_is_what_it_is_described_as(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    """No overflow, no rounding up to the largest length; any place without those before it."""
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    found = Permutation(length, seed, epoch)(torch.tensor(places)).tolist()
    assert found == [written_out(length, seed, epoch, place) for place in places]


def test_does_not_change() -> None:
    """Checkpoints rely on it. If this must change, so must VERSION."""
    assert VERSION == 1
    assert order(10) == PINNED_TEN
    assert order(10, seed=1) == PINNED_SEED
    assert order(10, epoch=1) == PINNED_EPOCH
    places = torch.tensor([0, 1, 2, BILLION - 1])
    assert Permutation(BILLION, 42, 7)(places).tolist() == PINNED_BILLION


def is_even(found: Sequence[int]) -> bool:
    """Whether counts are as alike as those of chance are: chi-square."""
    counts = torch.tensor(found, dtype=torch.double)
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    freedom = torch.tensor(len(found) - 1.0)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item() > 0.001


def is_uniform(found: torch.Tensor) -> bool:
    """Whether numbers lie between 0 and 1 as those of chance do: Kolmogorov and Smirnov."""
    count = len(found)
    steps = torch.arange(count + 1) / count
    ordered = found.sort()[0]
    distance = max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())
    return (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance < 1.9495  # p > 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "rounds"),
    [
        (3, 120),
        *(pytest.param(*more, marks=pytest.mark.trial) for more in ((2, 200), (4, 60), (5, 40))),
    ],
)
def test_all_orders_are_equally_frequent(length: int, rounds: int) -> None:
    """The smallest lengths are the hardest for a network of few rounds."""
    count = rounds * math.factorial(length)
    seen = Counter(tuple(order(length, seed)) for seed in range(count))
    found = [seen[one] for one in permutations(range(length))]
    assert is_even(found)


@pytest.mark.slow
@pytest.mark.parametrize("length", [10, 27, 48])
def test_each_element_comes_to_each_place(length: int) -> None:
    """Over the epochs of one seed: chi-square over all pairs of element and place."""
    table = torch.zeros(length, length)
    epochs = 20 * length
    for epoch in range(epochs):
        table[torch.arange(length), torch.tensor(order(length, 3, epoch))] += 1
    expected = epochs / length
    # Rows and columns of the table have fixed sums, so (length - 1)^2 degrees of freedom.
    statistic = ((table - expected) ** 2 / expected).sum().item()
    freedom = (length - 1) ** 2
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1000, 1 << 17, BILLION])
@pytest.mark.parametrize("lag", [1, 2, 8, 31, 256])
def test_neighbours_are_strangers(length: int, lag: int) -> None:
    """What stands ``lag`` places apart is not correlated, and its distance is that of chance."""
    count = min(length, 100_000)
    found = Permutation(length, 5, 0)(torch.arange(count)).double() / length
    one, other = found[:-lag], found[lag:]
    correlation = torch.corrcoef(torch.stack([one, other]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(len(one))
    assert is_uniform((other - one) % 1)


@pytest.mark.parametrize("length", [1 << 20, BILLION, LARGEST])
def test_any_stretch_is_spread_over_the_whole(length: int) -> None:
    """A batch, or what one rank sees, is a fair sample: 64 bins, at the start and in the middle."""
    for start, step in [(0, 1), (length // 2, 1), (3, 8), (0, 1024)]:
        places = torch.arange(1024) * step + start
        found = Permutation(length, 11, 2)(places)
        bins = torch.bincount(found.div(-(-length // 64), rounding_mode="floor"), minlength=64)
        assert is_even(bins.tolist())
        assert is_even(torch.bincount(found % 64, minlength=64).tolist())


def test_epochs_and_seeds_have_nothing_in_common() -> None:
    """As many places agree as by chance: one, give or take one."""
    orders = [order(5000, seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10
