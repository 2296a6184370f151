"""Pieces of tensors from a ``.distcp`` file into tensors that are there.

torch's load planner says which box of which saved piece goes into which box of which tensor. Where
a piece is an archive as ``archives.template`` describes it, its elements are read from their place
in the file: straight into the tensor if they lie there as they lie in the file, else through a
buffer of the rows that are wanted. Any other archive is left to torch.load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp.sources import Source
from elaunch.training.checkpoint.state import tensors
from elaunch.training.checkpoint.together import guarded
from elaunch.training.unpickling import Names, PickleRefused


@dataclass(frozen=True)
class ArchiveExtent:
    """Where an archive lies: in which file, from which byte, how many."""

    file: str
    at: int
    size: int


@dataclass(frozen=True)
class Reads:
    """The reads of a rank: boxes of tensors as the planner says, values by key; in which files.

    ``wanted`` are the tensors that are filled, by key.
    """

    metadata: Metadata
    planner: DefaultLoadPlanner
    items: Sequence[ReadItem]
    values: Sequence[str]
    files: frozenset[str]
    wanted: Mapping[str, torch.Tensor]


def plan(metadata: Metadata, wanted: Mapping[str, torch.Tensor], values: Sequence[str]) -> Reads:
    """Return what has to be read to fill the tensors ``wanted``; keys and sizes fit."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(wanted), metadata, False)
    local = planner.create_local_plan()
    items = planner.finish_plan(planner.create_global_plan([local])[0]).items
    wants = [item.storage_index for item in items] + [MetadataIndex(key) for key in values]
    files = frozenset(extent_of(metadata, index).file for index in wants)
    return Reads(metadata, planner, items, values, files, wanted)


def extent_of(metadata: Metadata, index: MetadataIndex) -> ArchiveExtent:
    """Return where a piece is; CheckpointError if ``.metadata`` does not say, or in a way that is
    not known here."""
    found = metadata.storage_data.get(index)
    if found is None:
        raise CheckpointError(f".metadata does not say where {index.fqn} is")
    if getattr(found, "transform_descriptors", None):
        raise CheckpointError(
            f"{index.fqn} is stored through {found.transform_descriptors}, which only "
            "torch.distributed.checkpoint.load with that extension reads"
        )
    return ArchiveExtent(found.relative_path, found.offset, found.length)


def read_value(source: Source, metadata: Metadata, key: str, also: Names) -> Any:
    """Return a value; ``also`` are classes and functions that it may name (archives.unpack).

    Raises CheckpointError that names key and file if it names others, or is damaged.
    """
    extent = extent_of(metadata, MetadataIndex(key))
    archive = source.read(extent.file, extent.at, extent.size)
    value, problem = guarded(lambda: archives.unpack(archive, also), "torch.load")
    if (refused := _refused(problem)) is not None:
        raise CheckpointError(
            f"{source.place}: {extent.file} holds {key} as objects that are not loaded without "
            f"being trusted: {refused}. If you trust who wrote it, name it to "
            "torch.serialization.add_safe_globals, or have a value of that class at "
            f"{key} in the state that is loaded into"
        )
    if problem is not None:
        raise _damaged(source, extent, key, problem)
    return value


def _refused(problem: BaseException | None) -> PickleRefused | None:
    """Return what refused a value, which torch or guarded() may have wrapped."""
    while problem is not None and not isinstance(problem, PickleRefused):
        problem = problem.__cause__ or problem.__context__
    return problem


def read_tensors(source: Source, reads: Reads) -> None:
    """Fill the tensors; raise CheckpointError that names key and file if a piece is damaged."""
    for item in sorted(reads.items, key=lambda item: _order(reads.metadata, item)):
        target = reads.planner.resolve_tensor(item).detach()
        _read(source, reads.metadata, item, target)
        reads.planner.commit_tensor(item, target)


def _order(metadata: Metadata, item: ReadItem) -> tuple[str, int]:
    extent = extent_of(metadata, item.storage_index)
    return (extent.file, extent.at)


def _read(source: Source, metadata: Metadata, item: ReadItem, target: torch.Tensor) -> None:
    key = item.storage_index.fqn
    described = metadata.state_dict_metadata[key]
    assert isinstance(described, TensorStorageMetadata)
    extent = extent_of(metadata, item.storage_index)
    shape = tuple(_chunk(described, item.storage_index).sizes)
    form = archives.template(described.properties.dtype, shape)
    known = form.size == extent.size and form.prefix == bytes(
        source.read(extent.file, extent.at, len(form.prefix))
    )
    if known:
        elements = ArchiveExtent(extent.file, extent.at + len(form.prefix), form.hole)
        _read_box(source, elements, (described.properties.dtype, shape), item, target)
        return
    archive = source.read(extent.file, extent.at, extent.size)
    tensor, problem = guarded(lambda: archives.unpack_tensor(archive), "torch.load")
    if problem is None and tensor is not None and tuple(tensor.shape) != shape:
        problem = CheckpointError(f"it has size {tuple(tensor.shape)}, .metadata says {shape}")
    if problem is not None or tensor is None:
        raise _damaged(source, extent, key, problem)
    target.copy_(tensors.narrowed(tensor, item.storage_offsets, item.lengths))


def _chunk(described: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    hint, chunks = index.index, described.chunks
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
        return chunks[hint]
    for chunk in chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    raise CheckpointError(f".metadata has no piece of {index.fqn} at {index.offset}")


def _read_box(
    source: Source,
    elements: ArchiveExtent,
    saved: tuple[torch.dtype, tuple[int, ...]],
    item: ReadItem,
    target: torch.Tensor,
) -> None:
    """Read the rows that the box touches; all of them go into ``target`` if they are the box."""
    dtype, shape = saved
    if not target.numel():
        return
    first, count = (item.storage_offsets[0], item.lengths[0]) if shape else (0, 1)
    row = math.prod(shape[1:]) * dtype.itemsize
    at, size = elements.at + first * row, count * row
    whole_rows = tuple(item.lengths[1:]) == shape[1:]
    direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
    if direct and whole_rows and not (target.is_conj() or target.is_neg()):
        source.read_into(elements.file, at, tensors.memory_of(target))
        return
    buffer = torch.empty(size, dtype=torch.uint8)
    source.read_into(elements.file, at, tensors.memory_of(buffer))
    rows = buffer.view(dtype).view((count, *shape[1:]) if shape else ())
    box = [0, *item.storage_offsets[1:]] if shape else []
    target.copy_(tensors.narrowed(rows, box, item.lengths))


def _damaged(source: Source, extent: ArchiveExtent, key: str, problem: object) -> CheckpointError:
    return CheckpointError(
        f"{source.place}: {extent.file} is damaged: {key}, {extent.size} bytes at {extent.at}, "
        f"cannot be read: {problem}"
    )
