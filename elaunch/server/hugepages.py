"""Have what the server imports lie in huge pages, so that a worker is forked and ended sooner.

A fork copies an entry for each page of the server's own memory, and the kernel takes as many apart
when the worker ends: 36,000 with torch imported, 72 of them for memory in huge pages (Linux: 2 MB).
A worker that writes to such memory gets a copy of 4 kB, as without.

To make a huge page of memory that is in use copies it. So the memory is got before the import, is
made of huge pages while next to nothing is in it (MADV_COLLAPSE, Linux 6.1), and is given back to
the allocators, from which the import takes it: malloc's heap, and the arenas of Python's objects.
Where the kernel cannot, or the administrator has turned huge pages off, nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, Final

TORCH: Final = (80 << 20, 46 << 20)
"""Bytes of malloc's heap and of Python's objects that ``import torch`` takes, of torch 2.13."""
LATER: Final = (28 << 20, 46 << 20)
"""The same of ``torch._dynamo`` and ``torch.distributed.checkpoint``."""

SETTINGS: Final = "/sys/kernel/mm/transparent_hugepage"
COLLAPSE: Final = 25  # MADV_COLLAPSE, asm-generic/mman-common.h
HUGE: Final = 2 << 20
BLOCK: Final = 120_000
"""Bytes that malloc takes from its heap: from 128 kB on it has a mapping made for each block."""
OBJECT: Final = 512
"""Bytes of the longest object that lies in an arena."""
AT_ONCE: Final = 992
"""Objects between two looks: half of an arena of 1 MB."""

_kept: list[bytes] = []


def reserve(heap: int, objects: int, meanwhile: Callable[[], None] | None = None) -> None:
    """Have ``heap`` bytes for malloc and ``objects`` bytes for Python's objects in huge pages.

    ``meanwhile`` is called between two of them.
    """
    libc = ctypes.CDLL(None)
    if _is_possible(libc):
        with contextlib.suppress(MemoryError):  # the import says so with its own name
            _reserve_heap(libc, heap, meanwhile)
            _reserve_objects(libc, objects, meanwhile)


def _is_possible(libc: Any) -> bool:
    """Return whether this kernel has MADV_COLLAPSE, and may use huge pages of this size."""
    with (
        contextlib.suppress(OSError),
        open(f"{SETTINGS}/enabled") as enabled,
        open(f"{SETTINGS}/hpage_pmd_size") as size,
    ):
        usable = "[never]" not in enabled.read() and int(size.read()) == HUGE
        return usable and libc.madvise(None, 0, COLLAPSE) == 0
    return False


def _reserve_heap(libc: Any, size: int, meanwhile: Callable[[], None] | None) -> None:
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    old = libc.sbrk(0)
    blocks = [libc.malloc(BLOCK) for _ in range(size // BLOCK)]
    for at in range(-(-old // HUGE) * HUGE, libc.sbrk(0) - HUGE, HUGE):
        _collapse(libc, at)
        if meanwhile is not None:
            meanwhile()
    # The last stays: it is at the heap's end, which malloc else gives back to the kernel.
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))


def _reserve_objects(libc: Any, size: int, meanwhile: Callable[[], None] | None) -> None:
    """Get arenas, which the kernel puts below each other, and collapse each two of 1 MB.

    One object in each stays: Python gives an arena back in which nothing is.
    """
    objects: list[bytes] = []
    for _ in range(size // OBJECT // AT_ONCE):
        objects += [bytes(OBJECT - b"".__sizeof__()) for _ in range(AT_ONCE)]
        at = id(objects[-1]) // HUGE * HUGE
        _collapse(libc, at)
        _collapse(libc, at + HUGE)  # its lower end may have come just now
        if meanwhile is not None:
            meanwhile()
    _kept.extend(objects[::AT_ONCE])


def _collapse(libc: Any, at: int) -> None:
    """Have a huge page at ``at``, where all of it is this process's own memory."""
    libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE), COLLAPSE)
