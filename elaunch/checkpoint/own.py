"""Verification of elaunch's own layout (the documents are in ``layout``).

In this order: COMMIT is there, metadata.json fits the run and the directory's name, every rank has
a manifest, the manifests have COMMIT's digest, every file has its size and its checksum. Sizes
come before checksums, so that most damage is found without reading much.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.files import (
    inside,
    open_regular,
    parse_json,
    read_json,
    regular_size,
    sha256_of,
    whole_number,
)
from elaunch.errors import CheckpointError

FORMAT = "elaunch"


def verify(path: Path, run_id: str | None) -> None:
    """Raise CheckpointError unless the checkpoint is committed, whole and of this run.

    ``run_id`` None accepts every run's checkpoints.
    """
    names = os.listdir(path)
    if layout.COMMIT not in names:
        raise CheckpointError(f"not committed: {layout.COMMIT} is missing")
    commit = _document(read_json(path / layout.COMMIT), layout.COMMIT)
    metadata = _document(read_json(path / layout.METADATA), layout.METADATA)
    _check_identity(path, metadata, run_id)
    manifests = _read_manifests(path, names)
    _check_ranks(manifests, whole_number(metadata, "world_size", layout.METADATA))
    if commit.get("digest") != layout.digest(manifests):
        raise CheckpointError(f"the manifests do not have the digest in {layout.COMMIT}")
    files = [file for name, content in manifests.items() for file in _files(path, name, content)]
    for file, size, _checksum in files:
        _check_size(path, file, size)
    for file, _size, checksum in files:
        if f"{layout.CHECKSUM}:{sha256_of(file)}" != checksum:
            raise CheckpointError(f"bad checksum: {file.relative_to(path)}")


def _document(document: dict[str, Any], name: str) -> dict[str, Any]:
    schema = document.get("schema")
    if schema != layout.SCHEMA:
        raise CheckpointError(f"{name} has schema {schema!r}, this elaunch reads {layout.SCHEMA}")
    return document


def _check_identity(path: Path, metadata: dict[str, Any], run_id: str | None) -> None:
    owner = metadata.get("run_id")
    if run_id is not None and owner != run_id:
        raise CheckpointError(f"belongs to run {owner}")
    found = tuple(whole_number(metadata, key, layout.METADATA) for key in ("step", "round"))
    if found != layout.parse_step_name(path.name):
        step, round_ = found
        raise CheckpointError(f"{layout.METADATA} says step {step} of round {round_}")


def _read_manifests(path: Path, names: list[str]) -> dict[str, bytes]:
    manifests = {}
    for name in sorted(names):
        if layout.parse_manifest_name(name) is None:
            continue
        with open_regular(path / name) as file:
            manifests[name] = file.read()
    return manifests


def _check_ranks(manifests: dict[str, bytes], world_size: int) -> None:
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


def _files(path: Path, name: str, content: bytes) -> list[tuple[Path, int, str]]:
    manifest = _document(parse_json(content, name), name)
    if manifest.get("rank") != layout.parse_manifest_name(name):
        raise CheckpointError(f"{name} says it is of rank {manifest.get('rank')!r}")
    entries = manifest.get("files")
    if not isinstance(entries, list):
        raise CheckpointError(f"{name} has no list of files")
    return [_file(path, name, entry) for entry in entries]


def _file(path: Path, name: str, entry: object) -> tuple[Path, int, str]:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{name}: {entry!r} describes no file")
    file = inside(path, entry.get("path"), name)
    checksum = entry.get("checksum")
    if not isinstance(checksum, str) or not checksum.startswith(f"{layout.CHECKSUM}:"):
        raise CheckpointError(f"{name}: {entry.get('path')} has the unknown checksum {checksum!r}")
    return file, whole_number(entry, "size", name), checksum


def _check_size(path: Path, file: Path, wanted: int) -> None:
    size = regular_size(file)
    if size != wanted:
        word = "truncated" if size < wanted else "changed"
        relative = file.relative_to(path)
        raise CheckpointError(f"{word}: {relative} has {size} bytes, its manifest wants {wanted}")
