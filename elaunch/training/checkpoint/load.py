"""``load``: a checkpoint into the objects of a state, on any number of ranks.

======================  ==========================================================================
step                    what the ranks send each other
======================  ==========================================================================
choose                  (elaunch.training.checkpoint.restore) which checkpoint
look                    whether each could read ``.metadata``; where it is not in memory, all open
                        the directory
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
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from elaunch.checkpoint.storage.storage import Committed
from elaunch.errors import CheckpointError, DamageError
from elaunch.training import unpickling
from elaunch.training.checkpoint import restore as restoring
from elaunch.training.checkpoint.dcp import image, sources, verify
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp import read as reading
from elaunch.training.checkpoint.dcp.metadata import Stored
from elaunch.training.checkpoint.dcp.sources import Source
from elaunch.training.checkpoint.dcp.verify import Verifier
from elaunch.training.checkpoint.parts import CallContext
from elaunch.training.checkpoint.prepare import check_group
from elaunch.training.checkpoint.state import flatten, tensors
from elaunch.training.checkpoint.state.flatten import Captured
from elaunch.training.checkpoint.together.agree import agree
from elaunch.training.checkpoint.together.guard import guarded

WHAT: Final = "load"
_NUMBERED: Final = re.compile(r"\.state\.[0-9]+\.[a-z_]+$")
_TOLD: Final = 12
"""Keys of one kind that an error names."""


@dataclass(frozen=True)
class _Fit:
    """How a rank's state and the checkpoint fit: keys in words, and what it takes of them."""

    missing: tuple[str, ...]
    differs: tuple[str, ...]
    taken: bytes


def load(
    parts: CallContext, wanted: restoring.Wanted, state: Mapping[str, Any], strict: bool = True
) -> Committed | None:
    """Load a checkpoint into ``state``; ALL ranks call it together.

    Args:
        parts: what the context works with.
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

    def use(there: CallContext, found: Committed) -> None:
        with contextlib.ExitStack() as stack:
            source = Source(found.place)
            stack.callback(source.close)
            loading = _Loading(there, found, source, stack, wanted.timeout)
            metadata = loading.look()
            captured, reads = loading.compare(state, metadata, strict)
            loading.read(captured, reads)
            loading.restore(captured)

    return restoring.read(parts, wanted, strict, use)


class _Loading:
    """One load, step by step; every step ends with one allgather."""

    def __init__(
        self,
        parts: CallContext,
        found: Committed,
        source: Source,
        stack: contextlib.ExitStack,
        timeout: float | None,
    ) -> None:
        self._parts = parts
        self._found = found
        self._source = source
        self._stack = stack
        self._timeout = timeout

    def look(self) -> Metadata:
        """Return what ``.metadata`` says."""
        # Most of what a rank reads lies in the shard that it has saved itself.
        self._fetch([stored.FILE], None, [image.data_file(self._parts.rank)])

        def work() -> bytes | memoryview:
            check_group(self._parts.distributed, WHAT)
            return self._source.whole(stored.FILE)

        content, problem = guarded(work, WHAT)
        metadata = None
        if content is not None:
            metadata, problem = guarded(lambda: stored.read(content, self._found.place), WHAT)
        self._refuse_damage(self._damage_of(content), problem)
        assert metadata is not None
        return metadata

    def compare(
        self, state: Mapping[str, Any], metadata: Metadata, strict: bool
    ) -> tuple[Captured, reading.Reads]:
        """Return the leaves to be loaded, and where they are."""
        own = Stored(metadata, self._parts.distributed.size)
        captured, problem = guarded(lambda: flatten.capture(state, self._parts.rank, own), WHAT)
        fit, taken = None, frozenset[str]()
        if captured is not None:
            taken = frozenset(captured.leaves) | own.claimed
            fit = _fit(captured, own, taken)
        fits: list[_Fit] = self._agree(problem, fit)
        self._check(fits, taken, own, strict)
        assert captured is not None
        for key in [key for key in captured.leaves if key not in own.keys]:
            del captured.leaves[key]
        leaves = captured.leaves.values()
        values = [leaf.key for leaf in leaves if not leaf.is_tensor]
        wanted = {leaf.key: _target(leaf) for leaf in leaves if leaf.is_tensor}
        reads, problem = guarded(lambda: reading.plan(metadata, wanted, values), WHAT)
        self._verify(self._fetch([] if reads is None else reads.files, problem))
        assert reads is not None
        for leaf in leaves:
            if leaf.is_tensor and wanted[leaf.key] is not leaf.value:
                leaf.holder[leaf.name] = wanted[leaf.key]
        return captured, reads

    def read(self, captured: Captured, reads: reading.Reads) -> None:
        """Fill tensors, and put values where they belong."""

        def work() -> None:
            reading.read_tensors(self._source, reads)
            also = unpickling.named_by(
                [*captured.own_values, *(captured.leaves[k].value for k in reads.values)]
            )
            for key in reads.values:
                leaf = captured.leaves[key]
                leaf.holder[leaf.name] = reading.read_value(self._source, reads.metadata, key, also)

        with torch.no_grad():
            problem = guarded(work, WHAT)[1]
        verifier, damage = self._source.verifier, ""
        if verifier is not None:
            told, unread = guarded(verifier.damage, WHAT)
            damage, problem = told or "", problem or unread
        self._refuse_damage(damage, problem)

    def restore(self, captured: Captured) -> None:
        """Give the objects what was loaded for them."""

        def work() -> None:
            for call in captured.restores:
                call()

        self._agree(guarded(work, WHAT)[1])

    def _fetch(
        self, names: Iterable[str], problem: Exception | None, more: Iterable[str] = ()
    ) -> list[frozenset[str]]:
        """Have files in memory, or the directory open: on all ranks where one needs it.

        Returns what each rank will read from files. ``problem`` is this rank's, from before;
        ``more`` are files that will be wanted, maybe.
        """
        wanted = [name for name in names if self._source.lacks([name])]
        if problem is None:
            asked = [*wanted, *more]
            self._source.hold(sources.recall(self._parts, self._found, asked, self._timeout))
        lacking = frozenset(name for name in wanted if self._source.lacks([name]))
        everyone: list[frozenset[str]] = self._agree(problem, lacking)
        if any(everyone) and self._source.path is None:
            opened = restoring.opened(self._parts, self._found, self._timeout, WHAT)
            self._source.path = self._stack.enter_context(opened)
        return everyone

    @property
    def _is_sealed(self) -> bool:
        """Whether there are checksums that nobody has compared yet; a copy of a URL's is whole."""
        return not (restoring.is_foreign(self._found) or isinstance(self._parts.storage.place, str))

    def _verify(self, everyone: Sequence[frozenset[str]]) -> None:
        """Have this rank check its share of the files, while they are read."""
        distributed, path = self._parts.distributed, self._source.path
        verifier, problem = None, None
        if path is not None and self._is_sealed:
            nodes = distributed.allgather(distributed.cross_rank) if self._parts.local else None
            names = _share(everyone, self._parts.rank, nodes)
            verifier, problem = guarded(lambda: _verifier(path, names), WHAT)
        self._source.verifier = verifier
        self._refuse_damage(_told_by(problem), problem)

    def _damage_of(self, content: bytes | memoryview | None) -> str:
        """Return what is wrong with ``.metadata`` as it was read; "" if nothing is known."""
        path = self._source.path
        if content is None or path is None or not self._is_sealed:
            return ""
        damage, problem = guarded(lambda: verify.damage_of(path, stored.FILE, content, 0), WHAT)
        return damage or _told_by(problem)

    def _refuse_damage(self, damage: str, problem: BaseException | None) -> None:
        """Raise, on all ranks, DamageError if one has found damage; else what a rank ran into."""
        own = f"{damage} ({problem})" if damage and problem is not None else damage
        told: list[str] = self._agree(None, own)
        if found := next(filter(None, told), ""):
            raise DamageError(found) from problem
        self._agree(problem)

    def _check(
        self, fits: Sequence[_Fit], taken: frozenset[str], own: Stored, strict: bool
    ) -> None:
        """Raise CheckpointError on all ranks, the same, unless state and checkpoint fit."""
        everyone = [taken]
        if len({fit.taken for fit in fits}) > 1:
            everyone = self._parts.distributed.allgather(taken, self._timeout)
        unexpected = sorted(own.keys.difference(*everyone)) if strict else []
        missing = _by_rank([fit.missing for fit in fits]) if strict else []
        told = [
            _listed("missing in the checkpoint", missing),
            _listed("in the checkpoint only", unexpected),
            _listed("not the same", _by_rank([fit.differs for fit in fits])),
        ]
        if any(told):
            raise CheckpointError(
                f"{WHAT}: {self._found.place} and the state do not fit: "
                f"{'; '.join(filter(None, told))}{_hint(unexpected)}. With strict=False what is "
                "missing there stays as it is here, and what is only there is left out"
            )

    def _agree(self, problem: BaseException | None, payload: Any = None) -> list[Any]:
        what = f"{WHAT} {self._found.name}"
        distributed = self._parts.distributed
        return agree(distributed, what, problem, payload, self._timeout, CheckpointError)


def _share(
    everyone: Sequence[frozenset[str]], rank: int, nodes: Sequence[int] | None
) -> frozenset[str]:
    """Return the files that a rank checks, of those that it reads: each is checked by one rank.

    ``everyone``: what each rank reads; ``nodes``: each rank's, where each has files of its own.
    """
    share = set()
    for name in everyone[rank]:
        readers = [
            other
            for other, names in enumerate(everyone)
            if name in names and (nodes is None or nodes[other] == nodes[rank])
        ]
        if readers[(sources.writer_of(name) or 0) % len(readers)] == rank:
            share.add(name)
    return frozenset(share)


def _told_by(problem: BaseException | None) -> str:
    """Return why manifests are damaged; "" if they cannot be read just now, or are not."""
    return str(problem) if isinstance(problem, CheckpointError) else ""


def _verifier(path: Path, names: frozenset[str]) -> Verifier | None:
    writers = {name: sources.writer_of(name) or 0 for name in names}
    expected = verify.checksums(path, names, writers)
    return Verifier(path, expected) if expected else None


def _fit(captured: Captured, own: Stored, taken: frozenset[str]) -> _Fit:
    missing = [key for key in captured.leaves if key not in own.keys]
    differs = []
    for key, leaf in captured.leaves.items():
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
    return _Fit((*missing, *captured.missing), tuple(differs), hashlib.sha256(keys).digest())


def _target(leaf: flatten.Leaf) -> torch.Tensor:
    """Return the tensor to load into: a new one where elements share memory, as if expanded."""
    tensor: torch.Tensor = leaf.value
    if tensors.is_sharded(tensor) or not _overlaps(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _overlaps(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in sizes)


def _by_rank(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return what the ranks report, once where all report the same, else with the ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, said in enumerate(lists):
        for one in said:
            ranks.setdefault(one, []).append(rank)
    everyone = len(lists)
    return [
        one if len(who) == everyone else f"{one} on rank {', '.join(map(str, who))}"
        for one, who in sorted(ranks.items())
    ]


def _listed(title: str, keys: Sequence[str]) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - _TOLD} more" if len(keys) > _TOLD else ""
    return f"{title}: {', '.join(keys[:_TOLD])}{more}"


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
