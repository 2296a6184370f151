"""Files and directories as a user gives them: made absolute, looked at and read without surprises.

The ``Path`` methods raise what ``stat`` raises for a directory that may not be entered or a name of
more than 255 bytes; here that is the end of a sentence that begins with the path. Files that a
rendezvous needs are checked for what they are:

=========================  ==============================================================
file                       must be
=========================  ==============================================================
secret, password           a file that only its owner may read and write, not empty
cacert, cert               PEM with a certificate in it
key                        PEM with a private key in it
=========================  ==============================================================

Errors are ``ValueError``; a file's content is never part of one.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path
from typing import Final

from elaunch.config import values

PIPE_S: Final = 30.0
"""Seconds within which a pipe must have been written to its end."""
NOTHING_THERE: Final = "does not exist"
_LARGEST_SECRET: Final = 64 * 1024
_CERTIFICATE: Final = b"CERTIFICATE-----"
_PRIVATE_KEY: Final = b"PRIVATE KEY-----"


def absolute(raw: str, start: Path) -> Path:
    """Return the absolute path of a text, which may begin with ``~`` or ``~user``."""
    return Path(os.path.abspath(os.path.join(start, os.path.expanduser(raw))))


def problem(path: Path) -> str:
    """Return why there is nothing at a path, as the end of a sentence; "" where there is."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return NOTHING_THERE
    except PermissionError:
        return "cannot be looked at: this user may not enter its directory"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return ""


def near_file(path: Path) -> str:
    """Return a "did you mean" with the most similar name in the path's directory."""
    try:
        return values.did_you_mean(path.name, os.listdir(path.parent))
    except (FileNotFoundError, NotADirectoryError):
        return f": there is no directory {str(path.parent)!r}"
    except OSError:
        return ""


def open_to_read(path: Path) -> int:
    """Return a descriptor that does not block, so that a pipe which nobody writes to is no trap.

    Raises:
        ValueError: the end of a sentence that begins with the path.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(NOTHING_THERE) from None
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


def secret(path: Path) -> bytes:
    """Return what is in a file that only its owner may read, without the newline at its end."""
    found = _read_file(path, private=True).rstrip(b"\r\n")
    if not found:
        raise ValueError("is empty")
    return found


def password(path: Path) -> str:
    """Return a password from a file that only its owner may read."""
    try:
        return secret(path).decode()
    except UnicodeDecodeError:
        raise ValueError("is not a text in UTF-8") from None


def certificate(path: Path) -> Path:
    """Return the path of a PEM file after a look for a certificate in it."""
    _look_for(_CERTIFICATE, "certificate", path)
    return path


def private_key(path: Path) -> Path:
    """Return the path of a PEM file after a look for a private key in it."""
    _look_for(_PRIVATE_KEY, "private key", path)
    return path


def _look_for(mark: bytes, what: str, path: Path) -> None:
    found = _read_file(path, private=False)
    if mark in found:
        return
    if b"-----BEGIN" not in found:
        raise ValueError("is not a file in PEM format (it has no -----BEGIN line)")
    raise ValueError(f"has no {what} in it")


def _read_file(path: Path, private: bool) -> bytes:
    descriptor = open_to_read(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a file")
        mode = stat.S_IMODE(status.st_mode)
        if private and status.st_uid not in (0, os.geteuid()):
            raise ValueError(
                f"belongs to user {status.st_uid}, who may read and write it; "
                f"do 'chown {os.geteuid()} {path}'"
            )
        if private and mode & 0o066:
            raise ValueError(
                f"has mode {mode:04o}: others than its owner may read or write it; "
                f"do 'chmod 600 {path}'"
            )
        found = os.read(descriptor, _LARGEST_SECRET + 1)
    finally:
        os.close(descriptor)
    if private and len(found) > _LARGEST_SECRET:
        raise ValueError(f"is larger than {_LARGEST_SECRET} bytes, so it is hardly a secret")
    return found
