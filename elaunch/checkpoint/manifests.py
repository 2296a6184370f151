"""Manifests: what one rank has written of a checkpoint (the document: ``layout``).

==================  ================================================================================
function            does
==================  ================================================================================
``check_path``      refuses a file's name that cannot be a user's
``check_metadata``  refuses what would not come back from JSON as it was
``encode_checked``  makes the bytes of a manifest
``decode``          reads them; refuses a manifest that is damaged
``entries``         reads the list of files only, as verification needs it
==================  ================================================================================

Nothing here touches a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.checkpoint.storage.checksums import is_known
from elaunch.checkpoint.storage.files import inside, parse_json, shown, whole_number
from elaunch.errors import CheckpointError


@dataclass(frozen=True)
class FileEntry:
    """A file of a manifest: ``size`` in bytes, ``checksum`` (elaunch.checkpoint.storage.checksums).

    ``mtime_ns`` is the file's time right after it was written, where that is known.
    """

    path: str
    size: int
    checksum: str
    mtime_ns: int | None = None


@dataclass(frozen=True)
class Manifest:
    """One rank's manifest, read."""

    stage: Stage
    header: ShardHeader
    files: tuple[FileEntry, ...]


def check_path(path: object) -> str:
    """Return a path below a checkpoint's directory that may be a user's; else CheckpointError."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise CheckpointError(f"a checkpoint's file cannot be called {path!r}: that is no path")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"a checkpoint's file cannot be called {path!r}: the name is not valid UTF-8"
        ) from None
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise CheckpointError(
            f"a checkpoint's file cannot be called {path!r}: give a path below the checkpoint's"
            " directory, without ., .. and empty parts"
        )
    own = layout.is_reserved(pure.parts[0]) or pure.name.startswith(layout.TEMPORARY)
    if own:
        raise CheckpointError(
            f"a checkpoint's file cannot be called {path!r}: elaunch itself writes"
            f" {pure.parts[0]}; choose another name, or put it into a directory"
        )
    return path


def check_metadata(metadata: Mapping[str, Any], where: str = "the metadata") -> None:
    """Raise CheckpointError unless it is JSON with string keys, so that it comes back as it was."""
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{where}: the key {key!r} is no string")
        _check_value(value, f"{where}[{key!r}]")


def _check_value(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        check_metadata(value, where)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_value(item, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}: only what JSON has can be metadata"
            " (str, int, float, bool, None, lists and dicts of them)"
        )


def encode_checked(stage: Stage, header: ShardHeader, files: Sequence[FileEntry]) -> bytes:
    """Return the bytes of a rank's manifest; CheckpointError for what cannot be written."""
    check_metadata(header.metadata)
    if not 0 <= header.rank < header.world_size:
        raise CheckpointError(f"rank {header.rank} is not below the world size {header.world_size}")
    paths = [check_path(file.path) for file in files]
    twice = sorted(path for path, count in Counter(paths).items() if count > 1)
    if twice:
        raise CheckpointError(f"rank {header.rank} gives more than one file called {twice[0]!r}")
    return encode(stage, header, files)


def encode(stage: Stage, header: ShardHeader, files: Sequence[FileEntry]) -> bytes:
    """Return the bytes of a manifest whose content was checked before."""
    document = {
        "schema": layout.SCHEMA,
        "rank": header.rank,
        "world_size": header.world_size,
        "step": stage.step,
        "round": stage.round,
        "run_id": header.run_id,
        "uuid": stage.uuid,
        "host": header.host,
        "pid": header.pid,
        "metadata": header.metadata,
        "files": [_described(file) for file in files],
    }
    return dump(document if header.keep is None else {**document, "keep": header.keep})


def dump(document: Mapping[str, Any]) -> bytes:
    """Return a document as its file's bytes."""
    return json.dumps(document, default=dict).encode() + b"\n"


def _described(file: FileEntry) -> dict[str, Any]:
    described = {"path": file.path, "size": file.size, "checksum": file.checksum}
    return described if file.mtime_ns is None else {**described, "mtime_ns": file.mtime_ns}


def decode(content: bytes, rank: int) -> Manifest:
    """Return the manifest in ``content``, the bytes of ``rank``'s; else CheckpointError."""
    name = layout.manifest_name(rank)
    document = schema_checked(parse_json(content, name), name)
    numbers = {
        key: whole_number(document, key, name)
        for key in ("rank", "world_size", "step", "round", "pid")
    }
    words = {key: document.get(key) for key in ("run_id", "uuid", "host")}
    for key, word in words.items():
        if not isinstance(word, str):
            raise CheckpointError(f"{name}: {key} is {shown(word)}, not a string")
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{name}: metadata is {shown(metadata)}, no object")
    keep = document.get("keep")
    if not isinstance(keep, dict | None):
        raise CheckpointError(f"{name}: keep is {shown(keep)}, no object")
    if numbers["rank"] != rank:
        raise CheckpointError(f"{name} says it is of rank {numbers['rank']}")
    header = ShardHeader(
        rank,
        numbers["world_size"],
        str(words["run_id"]),
        metadata,
        str(words["host"]),
        numbers["pid"],
        keep=keep,
    )
    stage = Stage(numbers["step"], numbers["round"], str(words["uuid"]))
    return Manifest(stage, header, entries(document, name))


def entries(document: Mapping[str, Any], name: str) -> tuple[FileEntry, ...]:
    """Return the files of the manifest called ``name``; CheckpointError if it is malformed."""
    files = document.get("files")
    if not isinstance(files, list):
        raise CheckpointError(f"{name} has no list of files")
    return tuple(_entry(file, name) for file in files)


def _entry(file: object, name: str) -> FileEntry:
    if not isinstance(file, dict):
        raise CheckpointError(f"{name}: {shown(file)} describes no file")
    path, checksum, mtime = (file.get(key) for key in ("path", "checksum", "mtime_ns"))
    inside(Path(), path, name)
    if not isinstance(checksum, str) or not is_known(checksum):
        raise CheckpointError(f"{name}: {path} has the unknown checksum {shown(checksum)}")
    known = mtime if isinstance(mtime, int) else None
    return FileEntry(str(path), whole_number(file, "size", name), checksum, known)


def schema_checked(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the document called ``name``; CheckpointError if it is of another schema."""
    schema = document.get("schema")
    if schema != layout.SCHEMA:
        raise CheckpointError(
            f"{name} has schema {shown(schema)}, this elaunch reads {layout.SCHEMA}"
        )
    return document
