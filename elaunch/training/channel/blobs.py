"""Memory files: how a large object gets to the other ranks of a node without being copied.

The sender writes it once and seals it: nobody can change it any more. Each receiver maps it
privately, so its arrays are writable and a page is copied only when it is written to.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

from elaunch.training.channel.objects import Bytes, Packed

PAGE: Final = mmap.ALLOCATIONGRANULARITY
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_MOST_PARTS: Final = 512
_MOST_BYTES: Final = 1 << 30
"""What one pwritev takes at the most: IOV_MAX parts, and 2 GiB."""


def written(packed: Packed) -> int:
    """Return the descriptor of a sealed memory file that holds ``packed``."""
    fd = room()
    try:
        at = 0
        for parts in _batches(packed.parts):
            at += _write(fd, parts, at)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def room(size: int = 0) -> int:
    """Return the descriptor of a new memory file of ``size`` bytes."""
    fd = os.memfd_create("elaunch-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if size:
        os.ftruncate(fd, size)
    return fd


def mapped(fd: int, offset: int, size: int) -> memoryview:
    """Return ``size`` bytes of the file as private, writable memory; ``fd`` may be closed then.

    ``offset`` is a multiple of PAGE. Not by the mmap module, which would keep a descriptor open
    for every array that a script keeps.
    """
    import ctypes

    if offset + size > os.fstat(fd).st_size:
        raise ValueError(f"a memory file is shorter than {offset + size} bytes")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_int64]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, size, access, mmap.MAP_PRIVATE, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size} bytes: {os.strerror(error)}")
    whole = -(-size // PAGE) * PAGE  # few different sizes: each is a type that ctypes keeps
    memory = (ctypes.c_char * whole).from_address(address)
    weakref.finalize(memory, _unmap, address, size).atexit = False
    return memoryview(memory).cast("B")[:size]


def _unmap(address: int, size: int) -> None:
    import ctypes

    libc: Any = ctypes.CDLL(None)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


def _batches(parts: Iterable[Bytes]) -> Iterator[list[memoryview]]:
    """Yield the parts in pieces that one system call takes."""
    pieces = (
        memoryview(part)[start : start + _MOST_BYTES]
        for part in parts
        for start in range(0, len(part), _MOST_BYTES)
    )
    while batch := list(itertools.islice(pieces, _MOST_PARTS)):
        yield batch


def _write(fd: int, parts: list[memoryview], at: int) -> int:
    total = 0
    while parts:
        done = os.pwritev(fd, parts, at + total)
        total += done
        while parts and done >= len(parts[0]):
            done -= len(parts.pop(0))
        if done:
            parts[0] = parts[0][done:]
    return total
