"""Every number of ranks sums up every number of leaves in one order."""

from __future__ import annotations

import pytest

from elaunch.training.steps.tree import RankPart, Subtree, combine, leaves_of, maximal_nodes, share

COUNTS = range(1, 41)
SIZES = range(1, 12)


def whole(node: Subtree) -> str:
    """Write the sum of a node down as the tree has it."""
    if node.is_leaf:
        return str(node.first)
    left, right = node.halves
    return f"({whole(left)}+{whole(right)})"


def computed(one: RankPart) -> dict[Subtree, str]:
    """Do what a share says, with texts for gradients; return the values of its nodes."""
    slots = [""] * one.slots
    for what in one.sums:
        assert not what.begins or what.slot < one.slots
        held = slots[what.slot]
        slots[what.slot] = str(what.leaf) if what.begins else f"({held}+{what.leaf})"
        for slot in what.merges:
            slots[slot - 1] = f"({slots[slot - 1]}+{slots[slot]})"
    return dict(zip(one.nodes, slots, strict=False))


@pytest.mark.parametrize("size", SIZES)
def test_all_worlds_write_down_the_same_sum(size: int) -> None:
    """What ranks have summed up, put together, is the tree's sum, for every number of leaves."""
    for count in COUNTS:
        known: dict[Subtree, str] = {}
        for rank in range(size):
            one = share(count, rank, size)
            assert [what.leaf for what in one.sums] == list(leaves_of(count, rank, size))
            known |= computed(one)
        total = combine(Subtree(0, count), known, lambda _, left, right: f"({left}+{right})")
        assert total == whole(Subtree(0, count))


def test_the_nodes_of_a_rank_are_the_largest() -> None:
    """No two of them are the halves of one node."""
    for count in COUNTS:
        for size in SIZES:
            for rank in range(size):
                found = maximal_nodes(Subtree(0, count), leaves_of(count, rank, size))
                inner = [Subtree(0, count)]
                while inner:
                    node = inner.pop()
                    if not node.is_leaf:
                        left, right = node.halves
                        assert not (left in found and right in found)
                        inner += [left, right]


def test_few_buffers_are_needed() -> None:
    """The cost that the documents name: 12 micro-batches on 1, 2, 3 and 4 ranks."""
    most = {size: max(share(12, r, size).slots for r in range(size)) for size in (1, 2, 3, 4)}
    assert most == {1: 3, 2: 2, 3: 3, 4: 1}
    sent = {size: max(len(share(12, r, size).nodes) for r in range(size)) for size in (2, 3, 4, 6)}
    assert sent == {2: 1, 3: 3, 4: 1, 6: 2}


def test_ranks_beyond_the_leaves_compute_nothing() -> None:
    """They have a buffer for the result all the same."""
    assert [len(share(2, rank, 5).sums) for rank in range(5)] == [0, 0, 1, 0, 1]
    assert share(2, 0, 5).slots == 1
