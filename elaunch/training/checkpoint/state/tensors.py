"""Tensors as bytes: which of them a checkpoint can hold, and how they get into memory.

=======================================  =========================================================
tensor                                   in a checkpoint
=======================================  =========================================================
dense, of any dtype with whole bytes     its elements, contiguous, as in ``tensor.contiguous()``
non-contiguous, expanded, conjugated     the same: what one sees, not how it lies in memory
DTensor, ShardedTensor                   this rank's shards
sparse, nested, quantised, on ``meta``,  refused, with what to save in its place
of a lazy module, made of other tensors
(torchao), with elements of less than a
byte; a DTensor with Partial
=======================================  =========================================================

Nothing here initialises CUDA: a tensor on a device is copied by that device's own means.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.dcp import archives

log = logging.getLogger("elaunch")

Memory = memoryview


@dataclass(frozen=True)
class Obstacle:
    """Why a tensor is neither saved nor loaded into.

    Attributes:
        what: the reason, as in "it is a nested tensor".
        instead: what to save in its place, or how to make it a tensor that can be saved.
        remedy: ``instead`` makes it one that can be loaded into, too.
    """

    what: str
    instead: str
    remedy: bool = False


def is_sharded(value: object) -> bool:
    """Tell whether a tensor is one of which each rank has a part: DTensor or ShardedTensor."""
    if type(value) is torch.Tensor:
        return False
    return isinstance(value, DTensor) or hasattr(value, "local_shards")


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what this rank has of a tensor: its shards, or all of it."""
    if isinstance(tensor, DTensor):
        return [tensor.to_local()]
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def refuse(key: str, tensor: torch.Tensor, loading: bool = False) -> None:
    """Raise CheckpointError if a sharded checkpoint cannot hold ``tensor``; says what can be done.

    ``loading``: something is about to be loaded into it.
    """
    if found := obstacle(tensor):
        raise CheckpointError(f"{key} {in_words(found, loading)}")


def in_words(found: Obstacle, loading: bool) -> str:
    """Return what follows a key in the error about its tensor."""
    if not loading:
        return f"cannot be saved: {found.what}; {found.instead}"
    fix = found.instead if found.remedy else "load what was saved in its place"
    return f"cannot be loaded into: {found.what}; {fix}"


def obstacle(tensor: torch.Tensor) -> Obstacle | None:
    """Return why a sharded checkpoint cannot hold ``tensor``; None if it can."""
    if type(tensor) is torch.Tensor and not tensor.is_meta:
        return _odd_kind(tensor)
    if is_lazy(tensor):
        return Obstacle(
            "it has no size yet, since its module is a lazy one",
            "call the module with an input first",
            remedy=True,
        )
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        return Obstacle(
            "it is a DTensor with a Partial placement, so no rank has its values",
            "value.redistribute(placements=…) with Replicate() or Shard() in place of Partial() "
            "gives them",
            remedy=True,
        )
    if _is_without_data(tensor):
        return Obstacle(
            "it has no data (device meta)", "module.to_empty(device=…) gives it some", remedy=True
        )
    return None if is_sharded(tensor) else _odd_kind(tensor)


def _is_without_data(tensor: torch.Tensor) -> bool:
    return any(piece.device.type == "meta" for piece in pieces(tensor) or [tensor])


def _odd_kind(tensor: torch.Tensor) -> Obstacle | None:
    if tensor.is_nested:
        return Obstacle("it is a nested tensor", "save its parts in a list")
    if tensor.layout != torch.strided:
        return Obstacle(
            f"it is sparse ({tensor.layout})",
            "save value.to_dense(), or its indices and values by themselves",
        )
    if tensor.is_quantized:
        return Obstacle(
            f"it is quantised ({tensor.dtype})",
            "save value.int_repr(), scale and zero point by themselves",
        )
    if hasattr(tensor, "__tensor_flatten__"):
        return Obstacle(
            f"it is a {type(tensor).__name__}, made of other tensors",
            "save those by themselves",
        )
    if not _has_memory(tensor):
        return Obstacle(
            f"it is a {type(tensor).__name__}, which has no memory of its own",
            "save the tensors that it is made of by themselves",
        )
    if not _is_writable(tensor.dtype):
        return Obstacle(
            f"torch cannot write {tensor.dtype}", "save value.view(torch.uint8) in its place"
        )
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) is torch.Tensor or not tensor.numel():
        return True
    try:
        return int(tensor.data_ptr()) != 0
    except (RuntimeError, NotImplementedError, TypeError):  # a class that has taken it away
        return False


@lru_cache
def _is_writable(dtype: torch.dtype) -> bool:
    """Tell whether torch.save takes the type, and torch's planner knows how wide it is."""
    try:
        archives.template(dtype, ())
        if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
            torch.iinfo(dtype)
    except (CheckpointError, TypeError):
        return False
    return True


def refuse_in_module(key: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for a module's tensor that no ``load_state_dict`` copies into."""
    if not is_sharded(tensor) and obstacle(tensor) is None and overlaps(tensor):
        raise CheckpointError(
            f"{key} cannot be saved: it is expanded, so its elements share memory, and no module "
            "can load it; register value.clone(), or the buffer with persistent=False"
        )


def overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements share memory, as in an expanded one: it cannot be copied into."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in sizes)


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the bytes of a dense tensor; its own memory where that is contiguous and on the CPU.

    They are valid until the tensor is changed; the view keeps the tensor alive.
    """
    # resolve_*: a conjugated or negated view keeps that in a flag, not in the bytes.
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = dense.numel() * dense.element_size()
    if not size:
        return memoryview(b"")
    # Not by numpy, which need not be there nor knows bfloat16.
    memory = (ctypes.c_ubyte * size).from_address(dense.data_ptr())
    memory.owner = dense  # an address alone keeps nothing alive
    return memoryview(memory).cast("B")


def copy_into(target: torch.Tensor, at: int, tensor: torch.Tensor) -> int:
    """Copy a dense tensor's elements into ``target``, bytes on the CPU; return how many they are.

    From a device the copy may still be under way: call :func:`settle` after the last one.
    """
    source, size = tensor.detach(), int(tensor.nbytes)
    if at + size > target.nbytes:
        raise ValueError(f"{size} bytes at {at} do not fit into {target.nbytes}")
    flagged = source.is_conj() or source.is_neg()
    if source.device.type == "cpu" and source.is_contiguous() and not flagged:
        # Not copy_, which reads what it is about to overwrite: a third slower.
        ctypes.memmove(target.data_ptr() + at, source.data_ptr(), size)
    else:
        memory = target[at : at + size]
        memory.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
    return size


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until the copies from the devices of ``tensors`` are done."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


class Pinning:
    """Page-locks memory that GPUs copy into; closing it, or locking another, lets it go."""

    def __init__(self) -> None:
        self._address = self._size = 0

    def pin(self, memory: torch.Tensor) -> None:
        """Lock ``memory``; where that is refused copies are slower, and right all the same."""
        if (memory.data_ptr(), memory.nbytes) == (self._address, self._size):
            return
        self.close()
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            log.warning("checkpoint memory is not page-locked (CUDA error %s): slower", status)
            return
        self._address, self._size = memory.data_ptr(), memory.nbytes

    def make_way(self, size: int) -> None:
        """Unlock memory that is shorter than ``size``: longer one is about to take its place."""
        if size > self._size:
            self.close()

    def close(self) -> None:
        """Unlock what is locked; to be called before the memory is unmapped."""
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = self._size = 0


def over(memory: Any) -> torch.Tensor:
    """Return a tensor of bytes that lies in a writable buffer."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def narrowed(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    """Return the box of ``tensor`` that begins at ``offsets`` and has ``lengths``; a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if tensor.size(dim) != length:
            tensor = tensor.narrow(dim, offset, length)
    return tensor
