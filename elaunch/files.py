"""Files and directories where others may write, too: what they put there leads nobody astray.

Only a regular file is opened for reading, and no opening waits. A directory of elaunch's is used
only while it is a real one, and this user's: behind a link there would be somebody's own files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class NotRegularError(OSError):
    """A directory, a FIFO, a socket or a device is there; ``strerror`` says which of them."""


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading; ``flags`` as for ``os.open``, beside the usual ones.

    A FIFO that nobody writes to would make its reader wait for ever, and a device may never end.
    Raises OSError, NotRegularError for what is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno != errno.ELOOP or not flags & os.O_NOFOLLOW:
            raise
        raise NotRegularError(errno.EINVAL, "it is a link", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    what = "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"
    raise NotRegularError(errno.EINVAL, what, str(path))


class NotOwnError(PermissionError):
    """A link, or another user's file or directory, has the name of one of elaunch's."""

    def __init__(self, what: str, path: str | Path) -> None:
        super().__init__(errno.EPERM, what, str(path))


@contextlib.contextmanager
def own_directory(path: Path, make: bool = False) -> Iterator[Path]:
    """Open a directory of elaunch's inside one where others may write; give a path into it.

    That path is the descriptor's: it leads there even if ``path`` becomes a link meanwhile. Raises
    NotOwnError for a link, a file, or another user's, unless he has the directory around it, too.

    Args:
        path: of the directory.
        make: make it, if nothing is there; the directory around it must be there.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except NotADirectoryError:
        if not os.path.lexists(path):
            raise
        what = "it is a symbolic link" if os.path.islink(path) else "it is no directory"
        raise NotOwnError(what, path) from None
    try:
        owner = os.fstat(descriptor).st_uid
        if owner not in (os.geteuid(), os.stat("..", dir_fd=descriptor).st_uid):
            raise NotOwnError(f"it belongs to the user with uid {owner}", path)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
