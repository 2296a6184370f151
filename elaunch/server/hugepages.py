"""Have what the server imports lie in huge pages, so that a worker is forked and ended sooner.

A fork copies an entry for each page of the server's own memory, and the kernel takes as many apart
when the worker ends: 36,000 with torch imported. In huge pages, of 2 MB, the same memory has 72. A
worker that writes to such memory gets a copy of 4 kB, as without.

To make a huge page of memory that is in use copies it. So the memory is got before the import, and
given back to the allocators, from which the import takes it: malloc's heap, of which next to
nothing was touched, and the arenas of Python's objects. The kernel makes huge pages of it before
(MADV_COLLAPSE, Linux 6.1). Where it cannot, or the administrator has turned huge pages off, nothing
is done. A thread that does this beside the import was tried: it took the import more time than it
saved, since the processors have to tell each other of each page that moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

TAKES: Final = {
    ("torch",): (80, 46),
    ("torch.distributed.checkpoint", "torch._dynamo"): (16, 30),
    ("torch._dynamo",): (12, 15),
    ("torch._inductor.compile_fx",): (15, 29),
}
"""Megabytes of malloc's heap and of Python's objects that the first import of these takes, of torch
2.13: what two modules have in common is a row."""

SETTINGS: Final = "/sys/kernel/mm/transparent_hugepage"
COLLAPSE: Final = 25  # MADV_COLLAPSE, asm-generic/mman-common.h
HUGE: Final = 2 << 20
MANY: Final = 16 << 20
BLOCK: Final = 120_000
"""Bytes that malloc takes from its heap: from 128 kB on it has a mapping made for each block."""
OBJECT: Final = 512
"""Bytes of the longest object that lies in an arena."""
ARENA: Final = 1 << 20
AT_ONCE: Final = 992
"""Objects of half an arena."""

_kept: list[bytes] = []


def reserve(modules: Iterable[str], meanwhile: Callable[[], None] | None = None) -> None:
    """Have in huge pages what the import of ``modules`` will take, as far as that is known.

    ``meanwhile`` is called again and again, at most some milliseconds apart where memory is free.
    """
    libc = ctypes.CDLL(None)
    heap, objects = _takes(set(modules))
    if heap and _is_possible(libc):
        with contextlib.suppress(MemoryError):  # the import says so with its own name
            _collapse(libc, _reserve_heap(libc, heap << 20), meanwhile)
            _collapse(libc, _reserve_objects(objects << 20, meanwhile), meanwhile)


def _takes(modules: set[str]) -> tuple[int, int]:
    """Return the megabytes for malloc and for objects of what is not imported yet."""
    there = sys.modules.keys()
    found = [
        size
        for names, size in TAKES.items()
        if not modules.isdisjoint(names) and there.isdisjoint(names)
    ]
    return sum(heap for heap, _ in found), sum(objects for _, objects in found)


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


def _reserve_heap(libc: Any, size: int) -> list[tuple[int, int]]:
    """Have malloc get ``size`` bytes of heap, next to none of it touched; return where it is."""
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    old = libc.sbrk(0)
    blocks = [libc.malloc(BLOCK) for _ in range(size // BLOCK)]
    # The last stays: it is at the heap's end, which malloc else gives back to the kernel.
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
    return [(old, libc.sbrk(0))]


def _reserve_objects(size: int, meanwhile: Callable[[], None] | None) -> list[tuple[int, int]]:
    """Have Python get arenas for ``size`` bytes, which the kernel puts below each other.

    An object or two in each stay: Python gives an arena back in which nothing is. Returns where
    they are, as far as they adjoin.
    """
    objects: list[bytes] = []
    for _ in range(size // OBJECT // AT_ONCE):
        objects += [bytes(OBJECT - b"".__sizeof__()) for _ in range(AT_ONCE)]
        if meanwhile is not None:
            meanwhile()
    kept = objects[::AT_ONCE]
    _kept.extend(kept)
    ranges: list[tuple[int, int]] = []
    for at in sorted({id(one) // ARENA * ARENA for one in kept}):
        if ranges and at <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], at + ARENA
        else:
            ranges.append((at, at + ARENA))
    return ranges


def _collapse(
    libc: Any, ranges: Sequence[tuple[int, int]], meanwhile: Callable[[], None] | None
) -> None:
    """Have huge pages between each two addresses, as far as the kernel has any.

    Some at once: for each call the kernel has all processors write back their lists of pages. It
    ends at memory that is a file's, and the next call goes on behind it.
    """
    for start, end in ranges:
        last = end // HUGE * HUGE
        for at in range(-(-start // HUGE) * HUGE, last, MANY):
            libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(MANY, last - at)), COLLAPSE)
            if meanwhile is not None:
                meanwhile()
