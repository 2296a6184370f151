"""Files that a rendezvous needs: the nodes' secret, a password, certificates and their key.

=========================  ==============================================================
file                       must be
=========================  ==============================================================
secret, password           a file that only its owner may read and write, not empty
cacert, cert               PEM with a certificate in it
key                        PEM with a private key in it
=========================  ==============================================================

Errors are ``ValueError`` with the end of a sentence that begins with the path. A file's content
is never part of one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from elaunch.config import paths

_LARGEST = 64 * 1024
_CERTIFICATE, _PRIVATE_KEY = b"CERTIFICATE-----", b"PRIVATE KEY-----"


def secret(path: Path) -> bytes:
    """Return what is in a file that only its owner may read, without the newline at its end."""
    found = _read(path, private=True).rstrip(b"\r\n")
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
    found = _read(path, private=False)
    if mark in found:
        return
    if b"-----BEGIN" not in found:
        raise ValueError("is not a file in PEM format (it has no -----BEGIN line)")
    raise ValueError(f"has no {what} in it")


def _read(path: Path, private: bool) -> bytes:
    descriptor = paths.open_to_read(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a file")
        mode = stat.S_IMODE(status.st_mode)
        if private and mode & 0o066:
            raise ValueError(
                f"has mode {mode:04o}: others than its owner may read or write it; "
                f"do 'chmod 600 {path}'"
            )
        found = os.read(descriptor, _LARGEST + 1)
    finally:
        os.close(descriptor)
    if private and len(found) > _LARGEST:
        raise ValueError(f"is larger than {_LARGEST} bytes, so it is hardly a secret")
    return found
