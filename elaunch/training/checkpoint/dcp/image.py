"""The files of a rank's shard: ``__3_0.distcp``, and ``.metadata`` on rank 0.

::

    archive of a piece of a tensor      at a multiple of 64; prefix, elements, suffix
    …
    archive of a value                  the values come last: their lengths change, and move no
    …                                   tensor; each may be longer than it has to, as it was before

So the place of each archive follows from the plan and from the lengths of the values' archives, and
rank 0 can write it in ``.metadata`` for all ranks. ``.metadata`` is pickled again only when one of
these lengths has changed.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from elaunch.checkpoint.storage.storage import Image
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp.plan import Portion, WritePlan
from elaunch.training.checkpoint.state import tensors

VERSION: Final = "1.0.0"
"""Of torch.distributed.checkpoint's format."""
Lengths = Mapping[str, int]
_PADDING: Final = bytes(archives.ALIGNMENT)


@dataclass(frozen=True)
class Content:
    """The content of a rank's file: its plan, the state (known to ``planner``), packed values."""

    plan: WritePlan
    planner: DefaultSavePlanner
    packed: Mapping[str, bytes]
    lengths: Lengths

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Offset and length of each archive in the file, in its order."""
        return [(at, size) for _, at, size in extents(self.plan.portion, self.lengths)]

    @property
    def size(self) -> int:
        """How long the file is, in bytes."""
        return sum(self.places[-1]) if self.places else 0


def data_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def extents(portion: Portion, lengths: Lengths) -> Iterator[tuple[MetadataIndex, int, int]]:
    """Yield for each archive in a rank's file what it is of, and its offset and length."""
    at = 0
    for index, (dtype, shape) in portion.tensors:
        size = archives.template(dtype, shape).size
        yield index, at, size
        at = archives.aligned(at + size)
    for key in portion.values:
        yield MetadataIndex(key), at, lengths[key]
        at = archives.aligned(at + lengths[key])


def metadata_file(
    metadata: Metadata, world: Sequence[Portion], lengths: Sequence[Lengths]
) -> bytes:
    """Return ``.metadata``: what is in each rank's file, and where. Rank 0 writes it."""
    storage = {
        index: SimpleNamespace(
            relative_path=data_file(rank), offset=at, length=size, transform_descriptors=None
        )
        for rank, (portion, own) in enumerate(zip(world, lengths, strict=True))
        for index, at, size in extents(portion, own)
    }
    fields = {"storage_data": storage, "version": VERSION}
    known = {field.name for field in dataclasses.fields(metadata)}  # torch 2.6 has no version
    changes = {name: value for name, value in fields.items() if name in known}
    return pickle.dumps(dataclasses.replace(metadata, **changes))


def images(content: Content, rank: int, metadata: bytes | None) -> list[Image]:
    """Return the files, over the tensors' own memory: they must not change until it is written."""
    pieces: list[memoryview | bytes] = []
    end = 0
    for at, before, tensor, after in _archives(content):
        pieces += [_PADDING[: at - end], before]
        end = at + len(before) + len(after)
        if tensor is not None:
            memory = tensors.memory_of(tensor)
            pieces.append(memory)
            end += len(memory)
        pieces.append(after)
    files = [Image(data_file(rank), [piece for piece in pieces if len(piece)])] if pieces else []
    if metadata is not None:
        files.append(Image(stored.FILE, [metadata]))
    return files


def fill(content: Content, memory: memoryview) -> None:
    """Write the file into ``memory``, at its beginning; on return all of it is there."""
    target = tensors.over(memory)
    copied = []
    for at, before, tensor, after in _archives(content):
        memory[at : at + len(before)] = before
        at += len(before)
        if tensor is not None and tensor.numel():
            at += tensors.copy_into(target, at, tensor)
            copied.append(tensor)
        memory[at : at + len(after)] = after
    tensors.settle(copied)


def _archives(content: Content) -> Iterator[tuple[int, bytes, torch.Tensor | None, bytes]]:
    """Yield each archive's offset, what comes before the elements, the tensor, what comes after."""
    portion = content.plan.portion
    where = iter(content.places)
    pairs = zip(portion.tensors, content.plan.items, strict=True)
    for (_, (dtype, shape)), item in pairs:
        form = archives.template(dtype, shape)
        tensor = content.planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        yield next(where)[0], form.prefix, tensor, form.suffix
    for key in portion.values:
        at, size = next(where)
        yield at, archives.padded(content.packed[key], size), None, b""
