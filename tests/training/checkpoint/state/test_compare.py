"""Digests of what has to be the same on all ranks: how many are sent, and what they find."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elaunch.training.checkpoint.state.compare import LENGTH, ComparedKeys, differing, digest

WORLD, KEYS = 64, 1000


def digests(keys: tuple[str, ...], other: Mapping[str, bytes]) -> bytes:
    """Return the digests of a rank's keys, which are those of their names but for ``other``."""
    return b"".join(digest(other.get(key, key.encode())) for key in keys)


def layers(stage: int) -> tuple[str, ...]:
    """Return the keys of a pipeline stage."""
    return tuple(f"model.layers.{stage}.{number}" for number in range(KEYS))


SHAPES = {
    "all the same": [layers(0)] * WORLD,
    "eight stages": [(*layers(rank % 8), "step", "lr") for rank in range(WORLD)],
    "another order": [layers(0)[:: 1 - 2 * (rank % 2)] for rank in range(WORLD)],
    "own keys": [(f"expert.{rank}", "step") for rank in range(WORLD)],
}
"""The keys of each rank."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_sends_one_digest_of_what_the_same_ranks_have(shape: str) -> None:
    """One of each stage and one of what all have, of 1,000 keys; nothing for keys of its own."""
    lists = SHAPES[shape]
    compared = ComparedKeys.made(lists)
    sent = [compared.summed(rank, digests(keys, {})) for rank, keys in enumerate(lists)]
    assert {len(one) // LENGTH for one in sent} == {2 if shape == "eight stages" else 1}
    assert compared.are_equal(sent)
    key = lists[9][-1]  # on rank 17, too, which is in the same stage
    changed = digests(lists[17], {key: b"another"})
    sent[17] = compared.summed(17, changed)
    assert not compared.are_equal(sent)
    everyone = [digests(keys, {}) for keys in lists]
    everyone[17] = changed
    found = compared.differing(everyone)
    assert list(found) == [key]
    assert found[key][digest(b"another")] == [17]


def test_keys_of_one_rank_alone_are_not_compared() -> None:
    """Nothing is sent for them, and none of them is found to differ."""
    compared = ComparedKeys.made([("a",), ("b",), ("c",)])
    assert [compared.summed(rank, digest(b"x")) for rank in range(3)] == [b""] * 3
    assert compared.are_equal([b""] * 3)


def test_differing_with_other_keys_on_each_rank() -> None:
    """Only keys that several ranks have are compared."""
    a, b = bytes(8), b"1" * 8
    assert differing([("x", "y")] * 2, [a + b, a + b]) == {}
    assert differing([("x", "y")] * 2, [a + b, a + a]) == {"y": {b: [0], a: [1]}}
    lists = [("x",), ("y", "x"), ("z",)]
    assert differing(lists, [a, b + a, b]) == {}
    assert differing(lists, [a, b + b, b]) == {"x": {a: [0], b: [1]}}
