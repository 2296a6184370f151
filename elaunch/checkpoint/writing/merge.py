"""The union of what the ranks of one checkpoint give: user metadata and lists of files. Pure.

==============================  ====================================================================
several ranks give              result
==============================  ====================================================================
dicts under one key             merged, key by key, however deep
equal values                    the value
values that are not equal       conflict: the key, each value, the ranks that gave it
one path, equal content         one file; the lowest rank keeps it in its list
one path, different content     conflict: the path and the ranks
a file where others have files  conflict: both paths and their ranks
below it
==============================  ====================================================================

The rules are those of Determined's ``core.CheckpointContext`` (``merge_metadata``,
``merge_resources``). A conflict is a SaveError that lists all of them, up to ten.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from elaunch.errors import SaveError

_MOST = 10
_WIDTH = 80

# A file as it is merged: anything that has a path and can be compared without its rank.
Content = tuple[int, str]  # size in bytes, checksum
_T = TypeVar("_T")


def merge_metadata(parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of the ranks' metadata (rank → metadata); SaveError for a conflict."""
    conflicts: list[str] = []
    merged = _merge({rank: parts[rank] for rank in sorted(parts)}, "", conflicts)
    _refuse("the ranks' metadata contradict each other", conflicts)
    return merged


def merge_files(parts: Mapping[int, Mapping[str, Content]]) -> dict[str, int]:
    """Return path → the rank that keeps it; SaveError for a conflict.

    ``parts``: rank → path → what it holds.
    """
    holders: dict[str, dict[int, Content]] = {}
    for rank in sorted(parts):
        for path, content in parts[rank].items():
            holders.setdefault(path, {})[rank] = content
    conflicts = [
        f"{path}: {_apart(ranks)}"
        for path, ranks in sorted(holders.items())
        if len(set(ranks.values())) > 1
    ]
    conflicts += [
        f"{above} is a file of {_ranks(holders[above])} and a directory of {_ranks(ranks)} ({path})"
        for path, ranks in sorted(holders.items())
        for above in map(str, PurePosixPath(path).parents)
        if above in holders
    ]
    _refuse("the ranks' files contradict each other", conflicts)
    return {path: min(ranks) for path, ranks in holders.items()}


def _merge(values: Mapping[int, Mapping[str, Any]], above: str, into: list[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for value in values.values() for key in value):
        given = {rank: value[key] for rank, value in values.items() if key in value}
        name = f"{above}{key}"
        if all(isinstance(value, Mapping) for value in given.values()):
            merged[key] = _merge(given, f"{name}.", into)
            continue
        groups = _equal(given)
        merged[key] = groups[0][0]
        if len(groups) > 1:
            told = ", ".join(f"{_short(value)} ({_ranks(ranks)})" for value, ranks in groups)
            into.append(f"{name} is {told}")
    return merged


def _equal(given: Mapping[int, _T]) -> list[tuple[_T, list[int]]]:
    """Return the distinct values, each with the ranks that gave it."""
    groups: list[tuple[_T, list[int]]] = []
    for rank, value in given.items():
        for other, ranks in groups:
            if _same(value, other):
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    return groups


def _same(one: object, other: object) -> bool:
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    # NaN is not equal to itself, but it is the same in every rank's metadata.
    return one == other or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _apart(ranks: Mapping[int, Content]) -> str:
    told = [f"{size} bytes ({_ranks(group)})" for (size, _), group in _equal(ranks)]
    return f"different content: {', '.join(told)}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) > _MOST:
        numbers[_MOST - 1 :] = [f"… {len(numbers) - _MOST + 1} more"]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _refuse(what: str, conflicts: list[str]) -> None:
    if not conflicts:
        return
    more = f"; and {len(conflicts) - _MOST} more" if len(conflicts) > _MOST else ""
    raise SaveError(f"not committed: {what}: {'; '.join(conflicts[:_MOST])}{more}")
