"""Readers lock a checkpoint, so that no process deletes it meanwhile.

A reader holds a shared ``flock`` on the checkpoint's ``COMMIT``; it goes with the process, however
that ends. A process that deletes asks for the exclusive one and does not wait. On a URL, and on
file systems that have no locks, no reader is seen. NFS locks by byte ranges, where an exclusive
lock needs a file that is open for writing: a process that may not write there deletes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.records import Location


@contextlib.contextmanager
def reading(place: Location) -> Iterator[None]:
    """Keep the checkpoint at ``place`` from being deleted while the block lasts.

    Raises OSError if it is gone.
    """
    if isinstance(place, str):
        yield
        return
    descriptor = os.open(place / layout.COMMIT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        locked = _lock(descriptor, fcntl.LOCK_SH)
        # A deleter has renamed it by then; it may have gone before it was locked.
        if not locked or not os.path.lexists(place / layout.COMMIT):
            raise FileNotFoundError(errno.ENOENT, "it is being deleted", str(place))
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(place: Location) -> Iterator[bool]:
    """Tell whether no process reads the checkpoint at ``place``; then none begins in the block."""
    if isinstance(place, str):
        yield True
        return
    try:
        descriptor = _open_to_claim(place / layout.COMMIT)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _open_to_claim(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _lock(descriptor: int, kind: int) -> bool:
    """Take a lock without waiting; False if others have it. No locks at all count as taken."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.EBADF  # there are locks, for processes that may write
    return True
