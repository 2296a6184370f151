"""The documents of a commit, ``metadata.json`` and COMMIT, made from the ranks' manifests.

``assemble`` refuses what cannot be committed: ranks without a manifest, manifests of different
checkpoints or runs, no ``steps_completed``, conflicts. ``describe`` reads
``metadata.json`` back. Nothing here touches a file, so a commit is the same on every storage, and
on every node where each node has its own directory.

The ranks' user metadata and lists of files become one:

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
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, TypeVar

from elaunch import __version__, text
from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import (
    FileEntry,
    Manifest,
    check_metadata,
    decode,
    dump,
    encode,
)
from elaunch.checkpoint.records import Committed, Location, Stage
from elaunch.checkpoint.storage.files import shown, whole_number
from elaunch.errors import CheckpointError, SaveError

_MOST = 10
_WIDTH = 80

# A file as it is merged: anything that has a path and can be compared without its rank.
Content = tuple[int, str]  # size in bytes, checksum
_T = TypeVar("_T")


def merge_metadata(of_ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of the ranks' metadata (rank → metadata); SaveError for a conflict."""
    conflicts: list[str] = []
    merged = _merge({rank: of_ranks[rank] for rank in sorted(of_ranks)}, "", conflicts)
    _refuse("the ranks' metadata contradict each other", conflicts)
    return merged


def merge_files(of_ranks: Mapping[int, Mapping[str, Content]]) -> dict[str, int]:
    """Return path → the rank that keeps it; SaveError for a conflict.

    ``of_ranks``: rank → path → its content.
    """
    holders: dict[str, dict[int, Content]] = {}
    for rank in sorted(of_ranks):
        for path, content in of_ranks[rank].items():
            holders.setdefault(path, {})[rank] = content
    conflicts = [
        f"{path}: {_apart(ranks)}"
        for path, ranks in sorted(holders.items())
        if len(set(ranks.values())) > 1
    ]
    conflicts += [
        f"{above} is a file of {text.ranks(holders[above])} and a directory of "
        f"{text.ranks(ranks)} ({path})"
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
            values_given = ", ".join(
                f"{text.shortened(json.dumps(value), _WIDTH)} ({text.ranks(ranks)})"
                for value, ranks in groups
            )
            into.append(f"{name} is {values_given}")
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
    sizes = [f"{size} bytes ({text.ranks(group)})" for (size, _), group in _equal(ranks)]
    return f"different content: {', '.join(sizes)}"


def _refuse(what: str, conflicts: list[str]) -> None:
    if not conflicts:
        return
    more = f"; and {len(conflicts) - _MOST} more" if len(conflicts) > _MOST else ""
    raise SaveError(f"not committed: {what}: {'; '.join(conflicts[:_MOST])}{more}")


_LAST = 253_402_300_800  # seconds since 1970 until the year 10000


@dataclass(frozen=True)
class Documents:
    """The documents that a commit writes.

    ``manifests`` are the bytes by rank, those of ``rewritten`` ranks differ from what was there:
    a file that several ranks listed is left to the lowest of them. ``listed`` is rank → the files
    in its manifest, ``kept`` those that are left to it.
    """

    manifests: Mapping[int, bytes]
    rewritten: frozenset[int]
    listed: Mapping[int, tuple[FileEntry, ...]]
    kept: Mapping[int, tuple[FileEntry, ...]]
    hosts: Mapping[int, str]
    metadata: bytes
    commit: bytes


def is_complete(contents: Mapping[int, bytes]) -> bool:
    """Tell whether the manifests of all ranks are there; CheckpointError if one is damaged."""
    if not contents:
        return False
    first = decode(contents[min(contents)], min(contents))
    return len(contents) == first.header.world_size == max(contents) + 1


def is_foreign(contents: Mapping[int, bytes], run_id: str | None) -> bool:
    """Tell whether one of these manifests is of another run; CheckpointError if it is damaged."""
    if run_id is None:
        return False
    return any(decode(content, rank).header.run_id != run_id for rank, content in contents.items())


def assemble(
    stage: Stage, contents: Mapping[int, bytes], extra: Mapping[str, Any], now: float
) -> Documents:
    """Return what a commit of the stage writes; ``contents`` are the manifests by rank.

    ``extra`` goes into ``metadata.json``; ``now``, seconds since 1970, is its ``committed`` unless
    ``extra`` has one. With one ``extra`` that has it, the result is the same on every node. Raises
    SaveError, or CheckpointError for a manifest that is damaged.
    """
    read = {rank: decode(contents[rank], rank) for rank in sorted(contents)}
    world_size, run_id = _check_ranks(stage, read)
    metadata = merge_metadata({rank: manifest.header.metadata for rank, manifest in read.items()})
    _check_steps(stage, metadata)
    owners = merge_files(
        {rank: {f.path: (f.size, f.checksum) for f in m.files} for rank, m in read.items()}
    )
    several = {f.path for rank, m in read.items() for f in m.files if owners[f.path] != rank}
    # Whose copy of a file that several ranks had lies there, and its time, is not known.
    kept = {
        rank: tuple(
            replace(file, mtime_ns=None) if file.path in several else file
            for file in manifest.files
            if owners[file.path] == rank
        )
        for rank, manifest in read.items()
    }
    rewritten = frozenset(rank for rank in read if len(kept[rank]) < len(read[rank].files))
    manifests = {
        rank: encode(stage, read[rank].header, kept[rank]) if rank in rewritten else content
        for rank, content in contents.items()
    }
    hosts = {rank: manifest.header.host for rank, manifest in read.items()}
    document = {
        **_measured(extra, now),
        "schema": layout.SCHEMA,
        "step": stage.step,
        "round": stage.round,
        "run_id": run_id,
        "uuid": stage.uuid,
        "world_size": world_size,
        "metadata": metadata,
        "hosts": list(dict.fromkeys(hosts[rank] for rank in sorted(hosts))),
        "size": sum(file.size for files in kept.values() for file in files),
        "files": sum(map(len, kept.values())),
    }
    keep = read[min(read)].header.keep
    described = dump(document if keep is None else {**document, "keep": keep})
    total = layout.digest({layout.manifest_name(r): content for r, content in manifests.items()})
    commit = {"schema": layout.SCHEMA, "digest": total, "metadata": layout.checksum(described)}
    listed = {rank: manifest.files for rank, manifest in read.items()}
    return Documents(manifests, rewritten, listed, kept, hosts, described, dump(commit))


def _measured(extra: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return what the caller knows about the save, with defaults for the rest."""
    check_metadata(extra, "extra")
    versions = {"elaunch": __version__, "python": platform.python_version()}
    document = {"started": now, "committed": now, "durations": {}, "metrics": {}, **extra}
    return {**document, "versions": {**versions, **extra.get("versions", {})}}


def _check_ranks(stage: Stage, read: Mapping[int, Manifest]) -> tuple[int, str]:
    """Return (world size, run id) that all manifests agree on; all ranks must be there."""
    if not read:
        raise SaveError(f"not committed: no rank has written its shard of {stage.final}")
    first = next(iter(read.values()))
    for rank, manifest in read.items():
        if manifest.stage != stage:
            raise SaveError(
                f"not committed: rank {rank} has written {manifest.stage.name}, not {stage.name}"
            )
        for what in ("world_size", "run_id"):
            here, there = getattr(manifest.header, what), getattr(first.header, what)
            if here != there:
                raise SaveError(
                    f"not committed: {what} is {there!r} for rank {first.header.rank}"
                    f" and {here!r} for rank {rank}"
                )
    world_size = first.header.world_size
    if surplus := [rank for rank in read if rank >= world_size]:
        raise SaveError(f"not committed: rank {surplus[0]} of a world of {world_size} has written")
    absent = (str(rank) for rank in range(world_size) if rank not in read)
    if missing := list(islice(absent, _MOST)):
        rest = world_size - len(read) - len(missing)
        more = f" and {rest} more" if rest else ""
        raise SaveError(
            f"not committed: parts are missing, of rank {', '.join(missing)}{more}"
            f" (world size {world_size})"
        )
    return world_size, first.header.run_id


def _check_steps(stage: Stage, metadata: Mapping[str, Any]) -> None:
    key = layout.STEPS_COMPLETED
    if key not in metadata:
        raise SaveError(f"not committed: the metadata have no {key!r}, which every checkpoint has")
    if metadata[key] != stage.step or isinstance(metadata[key], bool):
        raise SaveError(
            f"not committed: the metadata's {key!r} is {shown(metadata[key])},"
            f" the step is {stage.step}"
        )


def describe(place: Location, name: str, document: dict[str, Any]) -> Committed:
    """Return the committed checkpoint whose ``metadata.json`` this is; else CheckpointError."""
    step, round_, world_size = (
        whole_number(document, key, layout.METADATA) for key in ("step", "round", "world_size")
    )
    found: dict[str, Any] = {}
    kinds: tuple[tuple[str, Any], ...] = (("metadata", {}), ("metrics", {}), ("uuid", ""))
    for key, default in (*kinds, ("run_id", ""), ("size", 0), ("committed", 0.0)):
        value = document.get(key, default)
        if not isinstance(value, int | float if isinstance(default, float) else type(default)):
            raise CheckpointError(f"{layout.METADATA}: {key} is {shown(value)}")
        found[key] = value
    _check_amounts(found)
    found["metrics"] = {k: v for k, v in found["metrics"].items() if isinstance(v, int | float)}
    return Committed(name, place, step, round_, world_size=world_size, document=document, **found)


def _check_amounts(found: Mapping[str, Any]) -> None:
    """Raise CheckpointError for amounts that cannot be shown or compared."""
    for key, end in (("size", 2**63), ("committed", _LAST)):
        if not 0 <= found[key] < end:
            raise CheckpointError(f"{layout.METADATA}: {key} is {shown(found[key])}")


def choose(newest_first: Iterable[Committed], name_or_uuid: str, place: Location) -> Committed:
    """Return the one of this name or uuid; CheckpointError lists what is there."""
    passed = []
    for committed in newest_first:
        if name_or_uuid in (committed.name, committed.uuid):
            return committed
        passed.append(committed.name)
    newest = ", ".join(passed[:10])
    there = f"there are {len(passed)}, the newest: {newest}" if passed else "there is none at all"
    raise CheckpointError(f"{place} has no checkpoint {name_or_uuid!r}; {there}")


def in_the_way(place: Location, name: str) -> SaveError:
    """Return the error about a save whose name a committed checkpoint has: what to do about it.

    A later start of a run begins at round 0 again, and so may come to an earlier name.
    """
    return SaveError(
        f"not committed: {name} is there already, and a committed checkpoint is never replaced."
        " Save each step once. If an earlier start of this run has saved it: go on from the newest"
        " checkpoint, as load() does, or remove what is newer than the one that you go back to:"
        f" elaunch checkpoints rm {place} {name}"
    )


def check_sizes(documents: Documents, sizes: Mapping[str, int]) -> None:
    """Raise SaveError unless the files that count have, by ``sizes``, what their manifests list."""
    for rank, files in documents.kept.items():
        for file in files:
            if sizes.get(file.path) != file.size:
                raise SaveError(
                    f"not committed: {file.path}, which has {file.size} bytes in rank {rank}'s"
                    f" manifest, has {sizes.get(file.path, 'gone')}"
                )
