"""Objects as bytes and back: pickle, with the buffers of arrays and tensors beside it.

::

    u64 length of the pickle, u64 number of buffers, u64 length of each
    the pickle
    each buffer, at a multiple of 64

Buffers are not copied on the way in (what is written is the array's own memory) nor on the way out
(the array that comes back lies in the memory it was received in). The same goes for large bytes
inside of the pickle on the way in.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from elaunch.errors import CollectiveError
from elaunch.training import unpickling
from elaunch.training.unpickling import Names

LEAST_BUFFER: Final = 4096
"""Bytes from which on a buffer is worth being kept apart from the pickle."""
ALIGNMENT: Final = 64
_HEAD: Final = struct.Struct("<QQ")
_PADDING: Final = bytes(ALIGNMENT)
Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Packed:
    """An object as bytes: ``parts`` one after the other; they may be the object's own memory."""

    size: int
    parts: tuple[Bytes, ...]

    def joined(self) -> bytes:
        """Return the bytes in one piece."""
        return b"".join(self.parts)


class _Pickler(pickle.Pickler):
    """Pickles to a list of parts, without copying large bytes, and tensors as buffers."""

    def __init__(self) -> None:
        self.written: list[Bytes] = []
        self.buffers: list[memoryview] = []
        super().__init__(self, protocol=5, buffer_callback=self._aside)

    def write(self, data: Bytes) -> None:
        """Take the next part of the pickle; the pickler writes large bytes as they are."""
        self.written.append(data)

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild a plain tensor from a buffer; everything else as usual."""
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not getattr(torch, "Tensor", None):
            return NotImplemented
        if not _is_plain(obj, torch):
            return NotImplemented
        memory = _memory_of(obj.contiguous())
        return _tensor, (memory, str(obj.dtype).partition(".")[2], tuple(obj.shape))

    def _aside(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LEAST_BUFFER:
            return True
        self.buffers.append(raw)
        return False


def pack(obj: object) -> Packed:
    """Return ``obj`` as bytes; they stay valid only until ``obj`` is changed.

    Raises whatever pickling the object raises.
    """
    pickler = _Pickler()
    pickler.dump(obj)
    length = sum(map(len, pickler.written))
    sizes = [buffer.nbytes for buffer in pickler.buffers]
    head = _HEAD.pack(length, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    parts: list[Bytes] = [head, *pickler.written]
    size = len(head) + length
    for buffer in pickler.buffers:
        gap = -size % ALIGNMENT
        parts += [_PADDING[:gap], buffer]
        size += gap + buffer.nbytes
    # It refers to itself: without this, what it has seen would live until the next collection.
    pickler.clear_memo()
    pickler.written, pickler.buffers = [], []
    return Packed(size, tuple(parts))


def unpack(data: memoryview, allowed: Names | None = None) -> Any:
    """Return the object that :func:`pack` made ``data`` of; arrays in it keep ``data`` alive.

    ``data`` must be writable and belong to nobody else. Without ``allowed`` the sender is a process
    of this job, and is trusted. Else it may be any process, and what it has sent may name only
    these and what is harmless (elaunch.training.unpickling). Raises whatever unpickling raises.
    """
    length, count = _HEAD.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
    start = _HEAD.size + 8 * count
    end = start + length
    buffers = []
    at = end
    for size in sizes:
        at += -at % ALIGNMENT
        buffers.append(data[at : at + size])
        at += size
    if allowed is None:
        return pickle.loads(data[start:end], buffers=buffers)
    return unpickling.load_careful(data[start:end], allowed, buffers)


def allowed_of(obj: object) -> Names:
    """Return what a sender may name that is not known to be of this job.

    That is what ``obj``, this rank's own, is made of, and elaunch's own records.
    """
    own = {(__name__, _tensor.__name__): _tensor}
    return unpickling.Records({**unpickling.named_by([obj]), **own})


def attempt(what: str | Callable[[], str], work: Callable[[], Any]) -> Any:
    """Return what ``work()`` returns; what it raises becomes the cause of a CollectiveError.

    ``what`` has failed then, in words, or a function that returns them.
    """
    try:
        return work()
    except Exception as error:
        what = what if isinstance(what, str) else what()
        raise CollectiveError(f"{what}: {type(error).__name__}: {error}") from error


def _is_plain(tensor: Any, torch: Any) -> bool:
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _memory_of(tensor: Any) -> pickle.PickleBuffer:
    """Return a contiguous tensor's memory; not by numpy, which need not be there nor knows bf16."""
    import ctypes

    size = tensor.numel() * tensor.element_size()
    if not size:
        return pickle.PickleBuffer(b"")
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    # An address alone keeps nothing alive, and the tensor may have been made for the pickle only.
    memory.owner = tensor
    return pickle.PickleBuffer(memory)


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor that lies in ``buffer``."""
    import torch

    kind = getattr(torch, dtype)
    if not len(buffer):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).reshape(shape)
