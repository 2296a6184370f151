"""The order in which a step's gradients are summed: the same for every number of ranks.

Floating point sums depend on their order. So the micro-batches of a step, its leaves, are those of
a binary tree whose shape follows from their number alone; a node is the half-open range of its
leaves, and its value is that of its left half plus that of its right half.

Rank r of W computes the leaves ``M * r // W`` to ``M * (r + 1) // W``. It sums up what lies whole
in its share: the largest such nodes, from left to right (:func:`maximal_nodes`). The rest of the
sums, above these nodes, is done by whoever has received them (:func:`combine`).

A node's left half is the larger one, so that its right half is a single leaf as often as possible:
a leaf is added to what is there without a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Subtree(NamedTuple):
    """The leaves from ``first`` to before ``end``."""

    first: int
    end: int

    @property
    def halves(self) -> tuple[Subtree, Subtree]:
        """The two nodes below; only a node of two leaves or more has them."""
        middle = (self.first + self.end + 1) // 2
        return Subtree(self.first, middle), Subtree(middle, self.end)

    @property
    def is_leaf(self) -> bool:
        """Whether it is one micro-batch."""
        return self.end - self.first == 1


class LeafSum(NamedTuple):
    """The place of one leaf's gradient in this rank's sums.

    Attributes:
        leaf: its number in the step.
        slot: the buffer that it is added to; -1 for none, where it is computed to be compared.
        begins: whether it is the first in the buffer, and replaces what is there.
        merges: the buffers to be summed up afterwards, in this order: each from its number into the
            one below.
    """

    leaf: int
    slot: int
    begins: bool
    merges: tuple[int, ...]


@dataclass(frozen=True)
class RankPart:
    """The part of a step that one rank computes.

    Attributes:
        nodes: its largest nodes; buffer i holds the value of ``nodes[i]`` in the end.
        sums: what to do with each of its leaves, in their order.
        slots: how many buffers that takes; at least one, which receives the result.
    """

    nodes: tuple[Subtree, ...]
    sums: tuple[LeafSum, ...]
    slots: int


def leaves_of(count: int, rank: int, size: int) -> range:
    """Return the leaves of one rank among ``count``."""
    return range(count * rank // size, count * (rank + 1) // size)


def maximal_nodes(node: Subtree, leaves: range) -> list[Subtree]:
    """Return the largest nodes, ``node`` and below, that lie in ``leaves``, from left to right."""
    if leaves.stop <= node.first or node.end <= leaves.start:
        return []
    if leaves.start <= node.first and node.end <= leaves.stop:
        return [node]
    left, right = node.halves
    return maximal_nodes(left, leaves) + maximal_nodes(right, leaves)


@cache
def share(count: int, rank: int, size: int) -> RankPart:
    """Return what rank ``rank`` of ``size`` does in a step of ``count`` micro-batches."""
    nodes = maximal_nodes(Subtree(0, count), leaves_of(count, rank, size))
    sums: list[LeafSum] = []
    for slot, node in enumerate(nodes):
        _add(node, slot, sums)
    return RankPart(tuple(nodes), tuple(sums), max((one.slot + 1 for one in sums), default=1))


def _add(node: Subtree, slot: int, sums: list[LeafSum]) -> None:
    """Append what computes ``node`` into the buffer ``slot``."""
    if node.is_leaf:
        sums.append(LeafSum(node.first, slot, True, ()))
        return
    left, right = node.halves
    _add(left, slot, sums)
    if right.is_leaf:
        sums.append(LeafSum(right.first, slot, False, ()))
        return
    _add(right, slot + 1, sums)
    last = sums[-1]
    sums[-1] = last._replace(merges=(*last.merges, slot + 1))


def combine(
    node: Subtree, known: Mapping[Subtree, Value], add: Callable[[Subtree, Value, Value], Value]
) -> Value:
    """Return the value of ``node`` by those of nodes below it, which together have all its leaves.

    ``add`` gets the node, and the values of its left and its right half.
    """
    if node in known:
        return known[node]
    left, right = node.halves
    return add(node, combine(left, known, add), combine(right, known, add))
