"""The list of what a checkpoint holds: the ``.metadata`` of torch.distributed.checkpoint.

``.metadata`` is a pickle. It may name the classes that torch.distributed.checkpoint describes
tensors with, types and layouts of tensors, and paths; a file that names anything else is refused.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from elaunch.errors import CheckpointError
from elaunch.training import unpickling
from elaunch.training.checkpoint.state.perrank import parse_rank_name

KeyPath = tuple[str | int, ...]
FILE = ".metadata"
_LONGEST: Final = 10_000_000
"""Items of a list that stands in a state, each with a key of its own."""


def read(content: bytes | memoryview, place: object) -> Metadata:
    """Return what is in a ``.metadata`` file; raise CheckpointError if it is damaged."""
    try:
        metadata = unpickling.load_listed(content, _find)
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        EOFError,
        ImportError,
        AttributeError,
        IndexError,
        KeyError,
        RuntimeError,
        MemoryError,
    ) as error:
        raise CheckpointError(
            f"{place}/{FILE} is damaged: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise CheckpointError(f"{place}/{FILE} does not say where the tensors are")
    return metadata


def _find(module: str, name: str) -> Any:
    """Return what ``.metadata`` may name; raises PickleRefused for anything else."""
    if name in unpickling.CHECKPOINT.get(module, "").split():
        return unpickling.reach(module, name)
    if (kind := unpickling.torch_kind(module, name)) is not None:
        return kind
    raise unpickling.PickleRefused(
        f"it names {ascii(f'{module}.{name}')[1:-1][:200]}, which is no class "
        "of torch.distributed.checkpoint's own"
    )


def key_of(path: Iterable[Any]) -> str:
    """Return the key of what stands at ``path`` in a state."""
    return ".".join(map(str, path))


@dataclass
class Stored:
    """The keys of a checkpoint, for a load into ``world_size_now`` ranks.

    ``claimed`` are those that some value of the state took though it has no such leaf itself.
    """

    metadata: Metadata
    world_size_now: int
    claimed: set[str] = field(default_factory=set)
    keys: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Take all keys."""
        self.keys = frozenset(self.metadata.state_dict_metadata)

    def below(self, path: KeyPath) -> list[tuple[str, KeyPath]]:
        """Return each key at or below ``path``, and the rest of its path."""
        prefix = key_of(path)
        return [
            (key, self._rest(key, prefix))
            for key in self.metadata.state_dict_metadata
            if key == prefix or key.startswith(f"{prefix}.")
        ]

    def _rest(self, key: str, prefix: str) -> KeyPath:
        whole: KeyPath = (self.metadata.planner_data or {}).get(key, ())
        for length in range(1, len(whole) + 1):
            if key_of(whole[:length]) == prefix:
                return tuple(whole[length:])
        rest = key[len(prefix) + 1 :]
        return (rest,) if rest else ()

    def names_below(self, path: KeyPath) -> frozenset[str]:
        """Return the names that stand directly below ``path``."""
        return frozenset(str(rest[0]) for _, rest in self.below(path) if rest)

    def has_names_below(self, path: KeyPath) -> bool:
        """Tell whether names, and not the numbers of a list, stand directly below ``path``."""
        known = self.metadata.planner_data or {}
        return any(
            isinstance(rest[0], str) for key, rest in self.below(path) if rest and key in known
        )

    def ranks_below(self, path: KeyPath) -> list[int]:
        """Return the ranks that have saved a value of their own under ``path``."""
        own = self.below(path)
        self.claimed |= {key for key, _ in own}
        names = {str(rest[0]).partition(".")[0] for _, rest in own if rest}
        return sorted(rank for rank in map(parse_rank_name, names) if rank is not None)

    def build(self, path: KeyPath, own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return ``{"": value}`` of what is saved below ``path``, empty if there is nothing.

        Values are to be filled in. Tensors are those of ``own`` that fit, by key, else new ones.
        """
        held: dict[str, Any] = {}
        for key, rest in self.below(path):
            self.claimed.add(key)
            plant(held, ("", *rest), self._placeholder(key, own.get(key)))
        return held

    def _placeholder(self, key: str, own: torch.Tensor | None) -> Any:
        described = self.metadata.state_dict_metadata[key]
        if not isinstance(described, TensorStorageMetadata):
            return None
        if own is not None and own.size() == described.size:
            return own
        return torch.empty(described.size, dtype=described.properties.dtype)

    def is_tensor(self, key: str) -> bool:
        """Tell whether a key is that of a tensor."""
        return isinstance(self.metadata.state_dict_metadata[key], TensorStorageMetadata)

    def size_of(self, key: str) -> torch.Size:
        """Return the size of the whole tensor of a key."""
        described = self.metadata.state_dict_metadata[key]
        assert isinstance(described, TensorStorageMetadata)
        return described.size


def plant(held: Any, path: KeyPath, value: Any) -> None:
    """Put ``value`` where ``path`` leads, making dicts for names and lists for numbers."""
    for part, following in itertools.pairwise(path):
        made: Any = [] if isinstance(following, int) else {}
        if isinstance(part, int):
            _reach(held, part)
            held[part] = made if held[part] is None else held[part]
        else:
            held.setdefault(part, made)
        held = held[part]
    if isinstance(path[-1], int):
        _reach(held, path[-1])
    held[path[-1]] = value


def _reach(held: list[Any], index: int) -> None:
    if not 0 <= index < _LONGEST:
        raise CheckpointError(f"{FILE} has an item {index} of a list")
    held.extend([None] * (index + 1 - len(held)))
