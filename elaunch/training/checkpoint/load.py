"""``load``: a checkpoint into the objects of a state, on any number of ranks.

======================  ==========================================================================
step                    what the ranks send each other
======================  ==========================================================================
choose                  (elaunch.training.checkpoint.restore) which checkpoint
look                    ``.metadata``, which rank 0 reads; where it is not in memory, all open the
                        directory
flatten, compare        missing keys, sizes, what each would take: an error names them for all
                        ranks. Nothing was changed up to here
read                    whether each could read its share
restore                 whether each object took what it was given
======================  ==========================================================================

Tensors are filled in place, so after an error in the last two steps they have some of the
checkpoint's values.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from elaunch.checkpoint.storage.storage import Committed
from elaunch.errors import CheckpointError
from elaunch.text import listed, ranks
from elaunch.training import unpickling
from elaunch.training.checkpoint import restore as restoring
from elaunch.training.checkpoint.callcontext import CallContext
from elaunch.training.checkpoint.dcp import image, plan, sources
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp import read as reading
from elaunch.training.checkpoint.dcp.metadata import Stored
from elaunch.training.checkpoint.dcp.sources import MemoryDamage, Source
from elaunch.training.checkpoint.state import flatten, savedfile, tensors
from elaunch.training.checkpoint.state.flatten import FlatState
from elaunch.training.checkpoint.together import Joint, agree, together

WHAT: Final = "load"
_NUMBERED: Final = re.compile(r"\.state\.[0-9]+\.[a-z_]+$")
_MOST_NAMED: Final = 12
"""Keys of one kind that an error names."""

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class _Fit:
    """How a rank's state and the checkpoint fit: keys in words, and a digest of those it takes.

    Without ``strict`` nothing is missing.
    """

    missing: tuple[str, ...]
    differs: tuple[str, ...]
    taken: bytes


def load(
    call: CallContext, wanted: restoring.Wanted, state: Mapping[str, Any], strict: bool = True
) -> Committed | None:
    """Load a checkpoint into ``state``; ALL ranks call it together.

    Args:
        call: the call's context.
        wanted: which checkpoint.
        state: see elaunch.training.checkpoint.state.flatten. Modules, optimizers and tensors are
            loaded into; other values are replaced in their dict or list.
        strict: refuse keys that the checkpoint lacks, and keys that only it has. Without it the
            first stay as they are and the second are left out.

    Returns:
        What was loaded; None if there is nothing.

    Raises:
        CheckpointError: on all ranks; names keys, files, ranks.
    """

    call.known.loads |= wanted.which is None

    def use(there: CallContext, found: Committed) -> None:
        try:
            load_from(there, found, recalls=True)
        except MemoryDamage as damage:
            log.warning("%s is read from the files, not from memory: %s", found.name, damage)
            load_from(there, found, recalls=False)

    def load_from(there: CallContext, found: Committed, recalls: bool) -> None:
        with contextlib.ExitStack() as stack:
            loading = _Loading(there, found, stack, wanted.timeout, recalls=recalls)
            content = loading.look()
            if content is None:
                loading.fill(state, strict)
                return
            flat, reads = loading.compare(state, content, strict)
            loading.read(flat, reads)
            loading.restore(flat)

    return restoring.read(call, wanted, strict, use)


class _Loading:
    """One load, step by step; every step ends with one allgather."""

    def __init__(
        self,
        call: CallContext,
        found: Committed,
        stack: contextlib.ExitStack,
        timeout: float | None,
        *,
        recalls: bool,
    ) -> None:
        self._call = call
        self._found = found
        self._stack = stack
        self._timeout = timeout
        self._recalls = recalls
        # At a URL there are some as soon as files are read there.
        has_manifests = isinstance(found.place, Path) and not restoring.is_foreign(found)
        self._source = Source(found.place, Path(found.place) if has_manifests else None)
        stack.callback(self._source.close)

    def look(self) -> bytes | None:
        """Return ``.metadata``, which rank 0 reads for all: it lies in the memory of its agent.

        None where one file of ``torch.save`` has all.

        Another node would fetch a whole shard with it.
        """
        names = [stored.FILE] if self._call.rank == 0 else []
        # With as many ranks as have saved, most of what one reads lies in the shard of its number.
        as_saved = self._found.world_size == self._call.distributed.size
        with self._together(everyone=True) as step:
            more = [image.data_file(self._call.rank)] if as_saved else []
            step.sent = self._recalled(names, more)
        self._open(step)
        with self._together() as step:
            whole = self._source.whole
            if self._call.rank != 0 or not self._is_one_file():
                step.sent = self._source.checked(
                    lambda: b"".join(map(bytes, map(whole, names))), WHAT
                )
        content: bytes | None = step.received[0]
        return content

    def _is_one_file(self) -> bool:
        source = self._source
        is_file = source.path is not None and source.path.is_file()
        return is_file or (source.has_file(savedfile.FILE) and not source.has_file(stored.FILE))

    def fill(self, state: Mapping[str, Any], strict: bool) -> None:
        """Fill a state from one file of ``torch.save``."""
        with (
            restoring.opened(self._call, self._found, self._timeout, WHAT) as place,
            self._together(),
        ):
            savedfile.load(place, state, self._call.rank, strict)

    def compare(
        self, state: Mapping[str, Any], content: bytes, strict: bool
    ) -> tuple[FlatState, reading.Reads]:
        """Return the leaves to be loaded, and where they are; ``content`` is ``.metadata``."""
        with self._together(everyone=True) as step:
            plan.check_group(self._call.distributed, WHAT)
            own = Stored(stored.read(content, self._found.place), self._call.distributed.size)
            flat = flatten.flatten(state, self._call.rank, own)
            taken = frozenset(flat.leaves) | own.claimed
            step.sent = _fit(flat, own, taken, strict)
        self._check(step.received, taken, own, strict)
        with self._together(everyone=True) as step:
            reads = planned(flat, own)
            step.sent = self._recalled(reads.files)
        self._open(step)
        return flat, reads

    def read(self, flat: FlatState, reads: reading.Reads) -> None:
        """Fill tensors, and put values where they belong."""

        with self._together(), torch.no_grad():
            self._source.checked(lambda: fill(self._source, flat, reads), WHAT)

    def restore(self, flat: FlatState) -> None:
        """Give the objects what was loaded for them."""
        with self._together():
            for call in flat.restores:
                call()

    def _recalled(self, names: Iterable[str], more: Iterable[str] = ()) -> bool:
        """Take files from memory that are there; return whether some of ``names`` are not.

        ``more`` are files that will be wanted, maybe.
        """
        wanted = [name for name in names if self._source.lacks([name])]
        if self._recalls:
            asked = [*wanted, *more]
            self._source.hold(sources.recall(self._call, self._found, asked, self._timeout))
        return self._source.lacks(wanted)

    def _open(self, step: Joint) -> None:
        """Have the files open on all ranks, if one of them lacks some in memory."""
        if not any(step.received) or self._source.is_open:
            return
        if restoring.is_at_url(self._call, self._found):
            self._source.read_ranges(restoring.ranges(self._call, self._found, self._timeout, WHAT))
            return
        opened = restoring.opened(self._call, self._found, self._timeout, WHAT)
        self._source.path = self._stack.enter_context(opened)

    def _check(
        self, fits: Sequence[_Fit], taken: frozenset[str], own: Stored, strict: bool
    ) -> None:
        """Raise CheckpointError on all ranks, the same, unless state and checkpoint fit."""
        unexpected = sorted(own.keys - taken) if strict else []
        if len({fit.taken for fit in fits}) > 1:
            keys = sorted(own.keys)  # a bit for each says which of them a rank leaves
            bits = _bits(keys, unexpected)
            lefts = agree(self._call.distributed, WHAT, None, bits, self._timeout)
            left = functools.reduce(operator.and_, lefts)
            unexpected = [key for at, key in enumerate(keys) if left >> at & 1]
        problems = [
            _listed("missing in the checkpoint", _by_rank([fit.missing for fit in fits])),
            _listed("in the checkpoint only", unexpected),
            _listed("not the same", _by_rank([fit.differs for fit in fits])),
        ]
        if any(problems):
            raise CheckpointError(
                f"{WHAT}: {self._found.place} and the state do not fit: "
                f"{'; '.join(filter(None, problems))}{_hint(unexpected)}. With strict=False what "
                "is missing there stays as it is here, and what is only there is left out"
            )

    def _together(self, *, everyone: bool = False) -> contextlib.AbstractContextManager[Joint]:
        about = self._call.distributed, f"{WHAT} {self._found.name}", self._timeout
        return together(*about, CheckpointError, everyone=everyone)


def planned(flat: FlatState, own: Stored) -> reading.Reads:
    """Return how the leaves are read that the checkpoint has; the others are left out."""
    for key in [key for key in flat.leaves if key not in own.keys]:
        del flat.leaves[key]
    leaves = flat.leaves.values()
    values = [leaf.key for leaf in leaves if not leaf.is_tensor]
    wanted = {leaf.key: _target(leaf) for leaf in leaves if leaf.is_tensor}
    return reading.plan(own.metadata, wanted, values)


def fill(source: Source, flat: FlatState, reads: reading.Reads) -> None:
    """Fill tensors, and put values where they belong."""
    for key, target in reads.wanted.items():
        leaf = flat.leaves[key]
        if target is not leaf.value:
            leaf.holder[leaf.name] = target
    reading.read_tensors(source, reads)
    also = unpickling.named_by([*flat.own_values, *(flat.leaves[k].value for k in reads.values)])
    for key in reads.values:
        leaf = flat.leaves[key]
        leaf.holder[leaf.name] = reading.read_value(source, reads.metadata, key, also)


def _bits(keys: Sequence[str], some: Collection[str]) -> int:
    """Return a number that has a bit for each key, set for those of ``some``."""
    held = frozenset(some)
    return int("".join("01"[key in held] for key in reversed(keys)) or "0", 2)


def _fit(flat: FlatState, own: Stored, taken: frozenset[str], strict: bool) -> _Fit:
    missing = [key for key in flat.leaves if key not in own.keys]
    differs = []
    for key, leaf in flat.leaves.items():
        if key not in own.keys:
            continue
        if leaf.is_tensor != own.is_tensor(key):
            kinds = ("a value", "a tensor")
            differs.append(
                f"{key} ({kinds[own.is_tensor(key)]} there, {kinds[leaf.is_tensor]} here)"
            )
        elif leaf.is_tensor and leaf.value.size() != own.size_of(key):
            there, here = tuple(own.size_of(key)), tuple(leaf.value.size())
            differs.append(f"{key} (size {there} there, {here} here)")
    keys = "\0".join(sorted(taken)).encode("utf-8", "surrogatepass")
    return _Fit(
        (*missing, *flat.missing) if strict else (),
        tuple(differs),
        hashlib.sha256(keys).digest(),
    )


def _target(leaf: flatten.Leaf) -> torch.Tensor:
    """Return the tensor to load into: a new one where elements share memory, as if expanded."""
    tensor: torch.Tensor = leaf.value
    if tensors.is_sharded(tensor) or not tensors.overlaps(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _by_rank(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return what the ranks report, once where all report the same, else with the ranks."""
    found: dict[str, list[int]] = {}
    for rank, reported in enumerate(lists):
        for one in reported:
            found.setdefault(one, []).append(rank)
    everyone = len(lists)
    return [
        one if len(who) == everyone else f"{one} on {ranks(who)}"
        for one, who in sorted(found.items())
    ]


def _listed(title: str, keys: Sequence[str]) -> str:
    return f"{title}: {listed(keys, _MOST_NAMED)}" if keys else ""


def _hint(unexpected: Sequence[str]) -> str:
    """Return in words what kind of checkpoint it seems to be."""
    if any(_NUMBERED.search(key) for key in unexpected):
        return (
            " (it seems to hold optimizer.state_dict(), which numbers the parameters: that cannot "
            "be given back to a fresh optimizer)"
        )
    if any(".module." in key for key in unexpected):
        return " (it seems to hold the state_dict() of a wrapper: its keys have 'module.')"
    return ""
