"""Reading a file where anything may be: only a regular one is opened, and no opening waits."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegularError(OSError):
    """A directory, a FIFO, a socket or a device is there; ``strerror`` says which of them."""


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading; ``flags`` as for ``os.open``, beside the usual ones.

    A FIFO that nobody writes to would make its reader wait for ever, and a device may never end.
    Raises OSError, NotRegularError for what is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    what = "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"
    raise NotRegularError(errno.EINVAL, what, str(path))
