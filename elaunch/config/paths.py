"""Paths as a user gives them: made absolute, and looked at without surprises.

The ``Path`` methods raise what ``stat`` raises for a directory that may not be entered or a name of
more than 255 bytes; here that is the end of a sentence that begins with the path.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path
from typing import Final

PIPE_S: Final = 30.0
"""Seconds within which a pipe must have been written to its end."""


def absolute(raw: str, start: Path) -> Path:
    """Return the absolute path of a text, which may begin with ``~`` or ``~user``."""
    return Path(os.path.abspath(os.path.join(start, os.path.expanduser(raw))))


def problem(path: Path) -> str:
    """Return why there is nothing at a path, as the end of a sentence; "" where there is."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except PermissionError:
        return "cannot be looked at: this user may not enter its directory"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return ""


def open_to_read(path: Path) -> int:
    """Return a descriptor that does not block, so that a pipe which nobody writes to is no trap.

    Raises:
        ValueError: the end of a sentence that begins with the path.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError("does not exist") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def read_text(path: Path, limit: int) -> str:
    """Return the text of a small file, or of a pipe, as of a shell's ``<(command)``.

    Args:
        path: what is read; a device or a pipe that never ends is left in time.
        limit: the largest size in bytes.

    Raises:
        ValueError: the end of a sentence that begins with the path.
    """
    descriptor = open_to_read(path)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise ValueError("cannot be read: it is a directory")
        return _read(descriptor, limit).decode()
    except UnicodeDecodeError:
        raise ValueError("is not a text file in UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _read(descriptor: int, limit: int) -> bytes:
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    until = time.monotonic() + PIPE_S
    found = b""
    while len(found) <= limit:
        if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
            raise ValueError(f"is a pipe that was not written to its end within {PIPE_S:g} s")
        chunk = os.read(descriptor, limit + 1 - len(found))
        if not chunk:
            return found
        found += chunk
    raise ValueError(f"is larger than {limit} bytes")
