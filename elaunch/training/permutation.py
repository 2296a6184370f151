"""A shuffle of 0 … n-1 that is computed, not stored: any part of it costs only that part.

Position p of the order is found by a keyed bijection of a rectangle of ``rows * columns >= n``
cells. p is split into a row and a column, and in each of ROUNDS rounds one of the two is turned by
a keyed hash of the other, row and column by turns (a generalized Feistel network). A result beyond
n - 1 is put through again until it is below (cycle walking): less than one in ``sqrt(n)`` is.

The order is part of what a checkpoint relies on. It is a function of (n, seed, epoch) alone: of no
world size, no version of torch and no device. Whoever changes it must change VERSION too; a test
holds the order fast.

``rows`` is even: with two odd sides every round would be an even permutation, so half of all orders
could never come. Twelve rounds are what makes all orders of 5 and 6 elements equally frequent;
eight are not enough.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
ROUNDS = 12
LARGEST = 1 << 60
"""More elements than this have no order here: sides are to stay below 2^31."""

_WORD = 0xFFFFFFFF
_FACTOR = 0x45D9F3B  # odd and below 2^31: its product with a word does not overflow 64 bits


@dataclass(frozen=True)
class Permutation:
    """The order of 0 … ``length - 1`` for a seed and an epoch; memory does not grow with length."""

    length: int
    seed: int
    epoch: int

    def __call__(self, positions: Tensor) -> Tensor:
        """Return what stands at ``positions``: int64 of any one-dimensional shape, on the CPU."""
        rows = math.isqrt(max(self.length - 1, 0)) + 1
        rows += rows & 1
        sides = (rows, -(-self.length // rows))
        keys = self._keys()
        found = _turn(positions, sides, keys)
        while (beyond := found >= self.length).any():
            found[beyond] = _turn(found[beyond], sides, keys)
        return found

    def _keys(self) -> list[tuple[int, int]]:
        words = hashlib.shake_256(f"elaunch {self.seed} {self.epoch}".encode()).digest(8 * ROUNDS)
        numbers = [int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def _turn(cells: Tensor, sides: tuple[int, int], keys: list[tuple[int, int]]) -> Tensor:
    """Put each cell through all rounds; in place where it can, since this is the whole cost."""
    row = cells.div(sides[1], rounding_mode="floor")
    column = cells - row * sides[1]
    for number, key in enumerate(keys):
        source, target, side = (
            (column, row, sides[0]) if number % 2 == 0 else (row, column, sides[1])
        )
        target += _hash(source, key, side)
        target -= (target >= side) * side
    return row.mul_(sides[1]).add_(column)


def _hash(values: Tensor, key: tuple[int, int], side: int) -> Tensor:
    """Return for each value a number in 0 … ``side - 1``, by a 32-bit integer hash."""
    word = values ^ key[0]
    word ^= word >> 16
    word.mul_(_FACTOR).bitwise_and_(_WORD).bitwise_xor_(word >> 16).bitwise_xor_(key[1])
    word.mul_(_FACTOR).bitwise_and_(_WORD).bitwise_xor_(word >> 16)
    return word.mul_(side).bitwise_right_shift_(32)
