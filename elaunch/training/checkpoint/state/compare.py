"""The comparison, by digests, of what has to be the same on all ranks.

torch.distributed.checkpoint keeps one rank's value of a key that several ranks have, and reports
nothing. So each save compares: values by their pickles, and by ``==`` where those differ (two equal
sets can have different pickles); tensors by type, shape and some dozens of elements spread over
them, so that it costs next to nothing; of sharded tensors the copies that several ranks have of
one shard (HSDP, ``Replicate()``), under a key with its place (``key_of_piece``). Only where two of
these digests differ a rank sends one for each key (``ComparedKeys``):

==========================  ======================================================================
a rank has                  and sends
==========================  ======================================================================
the keys that all have      one digest of all
some that others lack, too  one for the keys of each set of ranks that has them: with pipeline
                            stages one for the stage, one for what all stages have
keys of its own             nothing for them
==========================  ======================================================================

``check_same`` compares every bit of what data parallel ranks should have in common: plain tensors
(parameters, optimizer states, tensors of the state), pieces of sharded tensors that several ranks
hold, and values. Not compared are buffers of modules, which DDP makes equal only at the next
forward, and what is marked by ``elaunch.PerRank``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from elaunch import text
from elaunch.errors import CheckpointError, SaveError
from elaunch.training import unpickling
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.state import tensors
from elaunch.training.checkpoint.state.flatten import BUFFER, OWN, FlatState, Values, flatten
from elaunch.training.checkpoint.together import agree, guarded, together
from elaunch.training.distributed import DistributedContext

WHAT: Final = "check_same"
COMPARING: Final = "comparing the ranks' values"


def check_same(
    distributed: DistributedContext, state: Mapping[str, Any], timeout: float | None
) -> None:
    """Raise CheckpointError, on all ranks, unless all have the same state.

    ALL ranks call it together. The error names the ranks that differ from most, and the first key.
    """
    with together(distributed, WHAT, timeout, CheckpointError, everyone=True) as step:
        digests = dict(_digests(flatten(state, distributed.rank)))
        step.sent = digest(repr(sorted(digests.items())).encode())
    if len(set(step.received)) == 1:
        return
    everyone = agree(distributed, WHAT, None, digests, timeout)
    for key in dict.fromkeys(key for held in everyone for key in held):
        own = {rank: held[key] for rank, held in enumerate(everyone) if key in held}
        most = Counter(own.values()).most_common(1)[0][0]
        if strange := [rank for rank, one in own.items() if one != most]:
            raise CheckpointError(
                f"{WHAT}: {text.ranks(strange)} of {len(everyone)}: {key.split(chr(0))[0]} is not "
                f"what {'the others have' if len(own) > 2 * len(strange) else 'rank 0 has'}"
            )


def _digests(flat: FlatState) -> Iterator[tuple[str, bytes]]:
    leaves = flat.leaves
    for key, packed in Values().pack(flat).items():
        if leaves[key].share != OWN:
            yield key, hashlib.sha256(packed).digest()
    planner = flat.planner()
    for item in planner.create_local_plan().items:
        key = item.index.fqn
        if item.type == WriteItemType.BYTE_IO or leaves[key].share in (BUFFER, OWN):
            continue
        data = planner.resolve_data(item)
        kind = f"{data.dtype} {tuple(data.shape)}".encode()
        content = tensors.memory_of(data)
        offset = "" if item.type == WriteItemType.TENSOR else f"\0{item.index.offset}"
        yield f"{key}{offset}", hashlib.sha256(kind + hashlib.sha256(content).digest()).digest()


LENGTH: Final = 8
"""Bytes of a digest."""
ALONE: Final = ""
"""The key of a piece that no other rank has, so that ranks with other pieces have equal lists."""


def key_of_piece(key: str, places: Iterable[Sequence[int] | None]) -> str:
    """Return the key of what a rank has of a sharded tensor: ``places`` are its pieces' offsets."""
    return f"{key}\0{[tuple(place or ()) for place in places]}"


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
    def made(cls, lists: Sequence[tuple[str, ...]]) -> ComparedKeys:
        """Return those of ranks with these lists."""
        numbers = {keys: number for number, keys in enumerate(dict.fromkeys(lists))}
        return cls(tuple(numbers), tuple(numbers[keys] for keys in lists))

    def of(self, rank: int) -> tuple[str, ...]:
        """Return the keys of a rank."""
        return self.lists[self.of_rank[rank]]

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
                if key != ALONE and sum(ranks[number] for number in having[key]) > 1:
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
    return {key: groups for key, groups in seen.items() if len(groups) > 1 and key != ALONE}


_SAMPLE: Final = 64
_WIDE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types as wide as others: not every type can be indexed."""
_SHOWN: Final = 60
"""Characters of a value in an error."""


def sampled(values: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return a digest of each tensor's type, shape and of a sample of its elements."""
    samples = {key: _sample_of_pieces(value) for key, value in values.items()}
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for key, sample in samples.items():
        alike.setdefault((sample.device, sample.dtype), []).append(key)
    found = {}
    for keys in alike.values():
        # One copy for all of a device's samples, since each would wait for the device.
        host = torch.cat([samples[key] for key in keys]).cpu()
        memory, at = tensors.memory_of(host), 0
        for key in keys:
            end = at + samples[key].numel() * host.element_size()
            kind = f"{values[key].dtype} {tuple(values[key].shape)}".encode()
            found[key] = digest(kind, memory[at:end])
            at = end
    return found


def _sample_of_pieces(tensor: torch.Tensor) -> torch.Tensor:
    samples = [_sample(piece) for piece in tensors.pieces(tensor)]
    return samples[0] if len(samples) == 1 else torch.cat(samples or [torch.empty(0)])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements as integers, evenly spread up to the last one; a view if it can be.

    At least ``_SAMPLE`` of them where there are as many, and never twice that.
    """
    value = tensor.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    value = value.view(_WIDE.get(value.element_size(), value.dtype))
    number = value.numel()
    step = max(1, number // _SAMPLE)
    first = (number - 1) % step
    if value.is_contiguous():
        at = value.storage_offset() + first
        return value.as_strided((-(-(number - first) // step),), (step,), at)
    indices = torch.arange(first, value.numel(), step, device=value.device)
    return value[torch.unravel_index(indices, value.shape)]


def settle(
    distributed: DistributedContext,
    suspects: Mapping[str, dict[bytes, list[int]]],
    packed: Mapping[str, bytes],
    timeout: float | None,
    own_values: Iterable[object],
) -> None:
    """Raise SaveError on all ranks if the values under ``suspects`` differ. ALL ranks call it.

    ``own_values``: of this rank's state; values of their classes are compared.
    """
    own = {key: packed[key] for key in suspects if key in packed}
    everyone = agree(distributed, COMPARING, None, own, timeout)
    with together(distributed, COMPARING, timeout, everyone=True) as step:
        step.sent = _problems(suspects, everyone, unpickling.named_by(own_values))
    if problems := max(step.received, key=len):
        sharded = all(map(_is_piece, suspects))
        raise SaveError(
            f"{'; '.join(problems[:8])}{'; …' if len(problems) > 8 else ''}: a checkpoint keeps "
            f"one value for all ranks; {_EQUAL_FIRST if sharded else _MARK}"
        )


_MARK: Final = "put elaunch.PerRank(…) around what each rank has of its own"
_EQUAL_FIRST: Final = (
    "make the copies equal first, as by a broadcast of one of them, or save each rank's by itself, "
    "as elaunch.PerRank(value.to_local())"
)


def _is_piece(key: str) -> bool:
    return "\0" in key


def _problems(
    suspects: Mapping[str, dict[bytes, list[int]]],
    everyone: Sequence[Mapping[str, bytes]],
    also: unpickling.Names,
) -> list[str]:
    """Return in words which of the values under ``suspects`` differ between the ranks."""
    problems = []
    for key, groups in suspects.items():
        holders = [rank for rank, held in enumerate(everyone) if key in held]
        values = [_unpacked(everyone[rank][key], also) for rank in holders]
        if not values:
            ranks = "; ".join(text.ranks(group) for group in groups.values())
            if _is_piece(key):
                name = key.partition("\0")[0]
                problems.append(f"{name} is sharded, and the copies of a shard differ ({ranks})")
                continue
            problems.append(f"{key} is a tensor that differs between the ranks ({ranks})")
        elif not all(_equal(value, values[0]) for value in values):
            held = text.on_ranks(
                zip(holders, (text.shortened(repr(v), _SHOWN) for v in values), strict=True)
            )
            problems.append(f"{key} is {', '.join(held[:4])}")
    return problems


def _unpacked(archive: bytes, also: unpickling.Names) -> Any:
    value, problem = guarded(lambda: archives.unpack(archive, also), "reading a value back")
    return value if problem is None else problem


def _equal(one: Any, other: Any) -> bool:
    """Compare two values; what cannot be compared (arrays in a list) counts as different."""
    try:
        same = one == other
        return bool(same if isinstance(same, bool) else same.all())
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
