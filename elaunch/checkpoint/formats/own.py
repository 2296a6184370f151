"""Verification of elaunch's own layout (the documents are in ``layout``).

In this order: COMMIT is there, metadata.json fits the run and the directory's name, every rank has
a manifest, the manifests have COMMIT's digest, every file has its size and its checksum. Sizes
come before checksums, so that most damage is found without reading much; several files are read at
once, each in pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from elaunch.atonce import at_once
from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import FileEntry, entries, schema_checked
from elaunch.checkpoint.storage.checksums import differs
from elaunch.checkpoint.storage.files import (
    JSON_LIMIT,
    inside,
    open_regular,
    parse_json,
    read_limited,
    regular_size,
    shown,
    whole_number,
)
from elaunch.errors import CheckpointError

FORMAT = "elaunch"

MANIFESTS_LIMIT = 2**30  # bytes of all manifests together
_READERS = 4  # files that are read at once


def verify(path: Path, run_id: str | None, content: bool = True, doubted: bool = True) -> None:
    """Raise CheckpointError unless the checkpoint is committed, whole and of this run.

    ``run_id`` None accepts every run's checkpoints. Without ``content`` files of the right size
    count as whole, and none of them is read; where the checkpoint is not ``doubted``, those that
    were not written to since their manifest. Raises OSError for a file that is missing or cannot
    be read.
    """
    check_files(path, chain(*read_documents(path, run_id).values()), content, doubted)


def read_documents(path: Path, run_id: str | None) -> dict[int, tuple[FileEntry, ...]]:
    """Check COMMIT, metadata.json and the manifests; return each rank's files."""
    names = os.listdir(path)
    if layout.COMMIT not in names:
        raise CheckpointError(f"not committed: {layout.COMMIT} is missing")
    contents = {
        name: read_limited(path / name, JSON_LIMIT) for name in (layout.COMMIT, layout.METADATA)
    }
    return check_documents(path.name, {**contents, **read_manifests(path, names)}, run_id)


def check_documents(
    name: str, contents: Mapping[str, bytes], run_id: str | None
) -> dict[int, tuple[FileEntry, ...]]:
    """Check the documents (name → content) of a checkpoint of this name; return ranks' files."""
    commit = commit_document(_content(contents, layout.COMMIT))
    metadata = schema_checked(
        parse_json(_content(contents, layout.METADATA), layout.METADATA), layout.METADATA
    )
    _check_identity(name, metadata, run_id)
    manifests = {
        name: content
        for name, content in contents.items()
        if layout.parse_manifest_name(name) is not None
    }
    _check_ranks(manifests, whole_number(metadata, "world_size", layout.METADATA))
    if commit.get("digest") != layout.digest(manifests):
        raise CheckpointError(f"the manifests do not have the digest in {layout.COMMIT}")
    described = layout.checksum(contents[layout.METADATA])
    if commit.get(layout.METADATA_SUM, described) != described:
        raise CheckpointError(f"{layout.METADATA} does not have the checksum in {layout.COMMIT}")
    return dict(_files(name, content) for name, content in manifests.items())


def check_files(
    path: Path, files: Iterable[FileEntry], content: bool = True, doubted: bool = True
) -> None:
    """Raise CheckpointError unless all files below ``path`` are what their entries say."""
    unique = list(dict.fromkeys(files))
    for file in unique:
        check_size(file, regular_size(inside(path, file.path, "a manifest")))
    if not content:
        return
    read = [file for file in unique if doubted or not _is_unchanged(path, file)]
    at_once([partial(_check_content, path, file) for file in read], _READERS, "verify")


def commit_document(content: bytes) -> dict[str, Any]:
    """Return the content of COMMIT.

    Raises CheckpointError where the key of the checksum of ``metadata.json`` is damaged: nothing
    has a checksum of COMMIT itself, and storage that cannot rename has a COMMIT without that key.
    """
    commit = schema_checked(parse_json(content, layout.COMMIT), layout.COMMIT)
    if layout.METADATA_SUM not in commit:
        for key in commit.keys() - {"digest"}:
            if str(commit[key])[: len(layout.CHECKSUM)] == layout.CHECKSUM:
                raise CheckpointError(
                    f"{layout.COMMIT} is damaged: it has a checksum under the key {shown(key)}"
                )
    return commit


def _content(contents: Mapping[str, bytes], name: str) -> bytes:
    if name not in contents:
        raise CheckpointError(f"missing: {name}")
    return contents[name]


def _check_identity(name: str, metadata: dict[str, Any], run_id: str | None) -> None:
    owner = metadata.get("run_id")
    if run_id is not None and owner != run_id:
        raise foreign(owner)
    found = tuple(whole_number(metadata, key, layout.METADATA) for key in ("step", "round"))
    if found != layout.parse_step_name(name):
        step, round_ = found
        raise CheckpointError(f"{layout.METADATA} says step {step} of round {round_}")


def foreign(owner: object) -> CheckpointError:
    """Return the error about a checkpoint that another run wrote."""
    return CheckpointError(f"belongs to run {shown(owner).strip(chr(39))}")


def read_manifests(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the manifests among ``names``, those of a directory's files: name → content."""
    manifests, room = {}, MANIFESTS_LIMIT
    for name in sorted(names):
        if layout.parse_manifest_name(name) is None:
            continue
        manifests[name] = read_limited(path / name, min(room, JSON_LIMIT))
        room -= len(manifests[name])
    return manifests


def _check_ranks(manifests: Mapping[str, bytes], world_size: int) -> None:
    if world_size < 1:
        raise CheckpointError(f"{layout.METADATA}: world_size is {world_size}")
    # The first gap is at most behind the last manifest: an absurd world size costs nothing.
    for rank in range(min(world_size, len(manifests) + 1)):
        if layout.manifest_name(rank) not in manifests:
            raise CheckpointError(
                f"missing: {layout.manifest_name(rank)} (world size {world_size})"
            )
    if len(manifests) > world_size:
        last = max(manifests)
        raise CheckpointError(f"{last} is there, but the world size is {world_size}")


def _files(name: str, content: bytes) -> tuple[int, tuple[FileEntry, ...]]:
    manifest = schema_checked(parse_json(content, name), name)
    rank = layout.parse_manifest_name(name)
    if rank is None or manifest.get("rank") != rank:
        raise CheckpointError(f"{name} says it is of rank {shown(manifest.get('rank'))}")
    return rank, entries(manifest, name)


def check_size(file: FileEntry, size: int) -> None:
    """Raise CheckpointError unless a file has the size that its manifest has."""
    if size != file.size:
        word = "truncated" if size < file.size else "changed"
        raise CheckpointError(
            f"{word}: {file.path} has {size} bytes, its manifest wants {file.size}"
        )


def _is_unchanged(path: Path, file: FileEntry) -> bool:
    if file.mtime_ns is None:
        return False
    with open_regular(path / file.path) as opened:  # NFS asks its server at an open, not at a stat
        return os.fstat(opened.fileno()).st_mtime_ns == file.mtime_ns


def _check_content(path: Path, file: FileEntry) -> None:
    if differs(path / file.path, file.checksum):
        raise CheckpointError(f"bad checksum: {file.path}")
