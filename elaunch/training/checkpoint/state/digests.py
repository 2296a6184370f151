"""Digests of what has to be the same on all ranks: one for many keys, then one for each.

==========================  ======================================================================
a rank has                  and sends
==========================  ======================================================================
the keys that all have      one digest of all
some that others lack, too  one for the keys of each set of ranks that has them: with pipeline
                            stages one for the stage, one for what all stages have
keys of its own             nothing for them
==========================  ======================================================================
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

LENGTH: Final = 8
"""Bytes of a digest."""


def digest(*parts: Any) -> bytes:
    """Return the digest of some bytes."""
    total = hashlib.blake2b(digest_size=LENGTH)
    for part in parts:
        total.update(part)
    return total.digest()


def split(joined: bytes) -> list[bytes]:
    """Return the digests that were joined."""
    return [joined[at : at + LENGTH] for at in range(0, len(joined), LENGTH)]


@dataclass(frozen=True)
class ComparedKeys:
    """The keys that have to be equal on all ranks that have them.

    Attributes:
        lists: the different lists of keys.
        of_rank: for each rank, which of the lists it has.
    """

    lists: tuple[tuple[str, ...], ...]
    of_rank: tuple[int, ...]

    @classmethod
    def of(cls, lists: Sequence[tuple[str, ...]]) -> ComparedKeys:
        """Return those of ranks with these lists."""
        numbers = {keys: number for number, keys in enumerate(dict.fromkeys(lists))}
        return cls(tuple(numbers), tuple(numbers[keys] for keys in lists))

    @cached_property
    def _groups(self) -> list[dict[frozenset[int], list[int]]]:
        """For each list: which lists have the same keys → their places in it, by key.

        Keys that only one rank has are left out.
        """
        having: dict[str, set[int]] = {}
        for number, keys in enumerate(self.lists):
            for key in keys:
                having.setdefault(key, set()).add(number)
        ranks = Counter(self.of_rank)
        found: list[dict[frozenset[int], list[int]]] = [{} for _ in self.lists]
        for keys, groups in zip(self.lists, found, strict=True):
            for key, place in sorted((key, place) for place, key in enumerate(keys)):
                if sum(ranks[number] for number in having[key]) > 1:
                    groups.setdefault(frozenset(having[key]), []).append(place)
        return found

    def summed(self, rank: int, digests: bytes) -> bytes:
        """Return one digest for each group of keys that the same ranks have, joined.

        ``digests`` are those of this rank's keys, joined.
        """
        groups, each = self._groups[self.of_rank[rank]], split(digests)
        return b"".join(digest(*(each[at] for at in places)) for places in groups.values())

    def are_equal(self, summed: Sequence[bytes]) -> bool:
        """Tell from what :meth:`summed` is on each rank whether all keys are the same."""
        seen: dict[frozenset[int], bytes] = {}
        return all(
            seen.setdefault(group, one) == one
            for number, joined in zip(self.of_rank, summed, strict=True)
            for group, one in zip(self._groups[number], split(joined), strict=True)
        )

    def differing(self, digests: Sequence[bytes]) -> dict[str, dict[bytes, list[int]]]:
        """Return the keys that are not the same on all ranks: :func:`differing`."""
        return differing([self.lists[number] for number in self.of_rank], digests)


def differing(
    lists: Sequence[Sequence[str]], digests: Sequence[bytes]
) -> dict[str, dict[bytes, list[int]]]:
    """Return the keys whose digests are not the same on all ranks, with the ranks of each digest.

    ``lists`` has the keys of each rank; ``digests`` theirs, joined.
    """
    seen: dict[str, dict[bytes, list[int]]] = {}
    for rank, (keys, joined) in enumerate(zip(lists, digests, strict=True)):
        for key, one in zip(keys, split(joined), strict=True):
            seen.setdefault(key, {}).setdefault(one, []).append(rank)
    return {key: groups for key, groups in seen.items() if len(groups) > 1}
