"""Pages of memory: have them in place before they are needed, and let go of them."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Sequence
from typing import Final

SLICE: Final = 64 << 20
"""Bytes that are touched in one call, in which no other thread of Python runs."""
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14


def touch(mapping: mmap.mmap) -> None:
    """Have the pages of ``mapping`` in place, so that no copy into it waits for them."""
    size = len(mapping)
    for at in range(0, size, SLICE):
        length = min(SLICE, size - at)
        try:
            mapping.madvise(POPULATE_WRITE, at, length)
        except (OSError, ValueError):  # an older kernel
            view = memoryview(mapping)
            pages = view[at : at + length : mmap.PAGESIZE]
            pages[:] = pages.tobytes()


def unmap(views: Sequence[memoryview]) -> None:
    """End views and the mappings that they are of, beside the caller: that takes a while.

    A mapping that somebody still has a part of goes with that part.
    """
    mappings = {id(view.obj): view.obj for view in views if isinstance(view.obj, mmap.mmap)}
    for view in views:
        release(view)

    def close() -> None:
        for mapping in mappings.values():
            with contextlib.suppress(BufferError):
                mapping.close()

    if mappings:
        threading.Thread(target=close, name="unmap", daemon=True).start()


def release(view: memoryview) -> None:
    """End a view of memory, unless somebody still has a part of it."""
    try:
        view.release()
    except BufferError:
        return
