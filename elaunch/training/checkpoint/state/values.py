"""Values that are no tensors, packed: one archive each, made again only when the value changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.state.flatten import Captured
from elaunch.training.checkpoint.together.guard import guarded

_PLAIN: Final = (int, float, str, bool, type(None))


class Values:
    """The archives of the plain values of the last save, by key."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, bytes]] = {}

    def pack(self, captured: Captured) -> dict[str, bytes]:
        """Return the archive of each value; raise CheckpointError that names one it cannot pack."""
        leaves = captured.leaves.items()
        return {key: self._pack(key, leaf.value) for key, leaf in leaves if not leaf.is_tensor}

    def _pack(self, key: str, value: Any) -> bytes:
        said = _said(value)
        known = self._known.get(key)
        if said is not None and known is not None and known[0] == said:
            return known[1]
        packed, problem = guarded(lambda: archives.pack(value), "torch.save")
        if packed is None:
            raise CheckpointError(
                f"{key}, a {type(value).__name__}, cannot be pickled: {problem}"
            ) from problem
        if said is not None:
            self._known[key] = (said, packed)
        return packed


def _said(value: Any) -> str | None:
    """Return what stands for a plain value, None for any other: that may change inside."""
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if type(value) is tuple and all(type(member) in _PLAIN for member in value):
        return f"tuple {value!r}"
    return None


def slots_for(packed: Mapping[str, bytes], last: Mapping[str, int]) -> dict[str, int]:
    """Return the room for each archive: what it had last, as long as that will do."""
    return {
        key: archives.slot_for(len(archive), last.get(key, 0)) for key, archive in packed.items()
    }
