"""The kinds of values in a state: walked through, changed in place, or replaced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.state import tensors
from elaunch.training.checkpoint.state.perrank import PerRank

_DEEPEST: Final = 100
"""Levels of dicts and lists in a state."""
_SHOWN: Final = 4
"""Parts of a path that an error about it shows."""
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)
_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None), dict, list, tuple})
"""Classes that most values are of, and that have no ``state_dict``."""


def members(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield what stands in a dict, list or tuple, by key or index; nothing for what is none."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def parts(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield a value and all that stands in its dicts, lists and tuples, each with its path.

    The value in a PerRank has the path of that. Raises CheckpointError for what is too deep.
    """
    if len(path) > _DEEPEST:
        raise CheckpointError(
            f"{'.'.join(map(str, path[:_SHOWN]))}… has more than {_DEEPEST} levels: a dict or list "
            "that contains itself cannot be saved"
        )
    yield path, value
    if isinstance(value, PerRank):
        yield from parts(value.value, path)
    for key, member in members(value):
        yield from parts(member, (*path, key))


def refuse_no_dict(state: object) -> None:
    """Raise CheckpointError unless a state is a dict whose keys are strings."""
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(
            'the state is a dict with names as keys, as in {"model": model, "step": step}; '
            f"this is {type(state).__name__}"
        )


def refuse_tuple(value: object, name: str) -> None:
    """Raise CheckpointError for a tuple with objects in it, which a load could not change."""
    if isinstance(value, tuple) and holds_objects(value):
        raise CheckpointError(f"{name} is a tuple with modules or optimizers in it: make it a list")


def refuse_hidden_shards(value: object, name: str) -> None:
    """Raise CheckpointError for a value with a sharded tensor in it, which is saved as one pickle.

    One rank's shards would be given to all ranks.
    """
    try:
        found = _holds_shards(value)
    except RecursionError:
        raise CheckpointError(f"{name}, a {type(value).__name__}, contains itself") from None
    if found:
        raise CheckpointError(
            f"{name} is a {type(value).__name__} with sharded tensors in it, and would be saved as "
            "one value: put them into a dict or a list"
        )


def _holds_shards(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return tensors.is_sharded(value)
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    return isinstance(value, _CONTAINERS) and any(map(_holds_shards, value))


def holds_more(value: Mapping[Any, Any] | list[Any]) -> bool:
    """Tell whether a container is walked through, as torch.distributed.checkpoint does it."""
    members = value.values() if isinstance(value, Mapping) else value
    return any(
        isinstance(member, torch.Tensor | PerRank | nn.Module | torch.optim.Optimizer)
        or is_stateful(member)
        or (isinstance(member, Mapping) and (isinstance(value, list) or holds_more(member)))
        or (isinstance(member, list) and holds_more(member))
        for member in members
    )


def is_stateful(value: object) -> bool:
    """Tell whether a value has a ``state_dict`` of its own to be saved and loaded by."""
    kind = type(value)
    # To look whether a class follows a Protocol costs as much as all else that is done with a leaf.
    return kind not in _PLAIN and not isinstance(value, type) and isinstance(value, Stateful)


def is_changed_in_place(value: object) -> bool:
    """Tell whether a load goes into what a value holds, and does not replace it."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return True
    return isinstance(value, Mapping | list) and holds_objects(value)


def refuse_resizing(marked: PerRank, name: str) -> None:
    """Raise CheckpointError where nothing could be done with what ``on_resize`` returns."""
    if marked.on_resize is not None and is_changed_in_place(marked.value):
        raise CheckpointError(
            f"{name} is a PerRank with on_resize around a {type(marked.value).__name__} that is "
            "loaded in place: on_resize is for values; on_more_ranks says what modules and "
            "optimizers get on more ranks"
        )


def holds_objects(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether there is anything in a container that a load changes in place."""
    return any(
        isinstance(part, PerRank | nn.Module | torch.optim.Optimizer) or is_stateful(part)
        for _, part in islice(parts(value), 1, None)
    )
