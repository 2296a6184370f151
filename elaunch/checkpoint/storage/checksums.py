"""The checksums of a checkpoint's files, as manifests have them.

===============  ===============================================================================
text             of
===============  ===============================================================================
``crc32c:…``     each MiB of the file by itself, in eight hexadecimal digits, one after the other:
                 processors have an instruction for it, and a part of a file can be checked
``sha256:<hex>`` the whole file; files get it where google-crc32c is not there in C, which alone
                 is fast, and documents always
===============  ===============================================================================

They find accidents. Nothing is authenticated by them: a writer of files can write manifests too.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Final, Protocol

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.files import open_regular

CRC32C: Final = "crc32c"
BLOCK: Final = 1 << 20
"""Bytes that have a CRC of their own."""
DIGITS: Final = 8
_WORTHWHILE: Final = 1 << 16
"""Bytes; smaller pieces are copied, which takes less than having them read where they are."""

Extend = Callable[[int, memoryview | bytes], int]
"""Returns the CRC of what has come with more bytes after it."""

log = logging.getLogger("elaunch")


class Checksum(Protocol):
    """The checksum of bytes that come one after the other."""

    def update(self, data: memoryview | bytes) -> None:
        """Take the bytes that come next."""

    def text(self) -> str:
        """Return the checksum of what has come."""


class _Blocks:
    """The CRC-32C of each block."""

    def __init__(self, extend: Extend) -> None:
        self._extend = extend
        self._whole: list[str] = []
        self._crc = self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Take the bytes that come next."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            piece = view[: BLOCK - self._size]
            self._crc = self._extend(self._crc, piece)
            self._size += piece.nbytes
            if self._size == BLOCK:
                self._whole.append(f"{self._crc:08x}")
                self._crc = self._size = 0
            view = view[piece.nbytes :]

    def text(self) -> str:
        """Return the checksum of what has come."""
        last = f"{self._crc:08x}" if self._size else ""
        return f"{CRC32C}:{''.join(self._whole)}{last}"


class _Whole:
    """The SHA-256 of everything."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()
        self.update = self._total.update

    def text(self) -> str:
        """Return the checksum of what has come."""
        return f"{layout.CHECKSUM}:{self._total.hexdigest()}"


class _Unchecked:
    """A checksum that cannot be computed here: it equals the expected one."""

    def __init__(self, expected: str) -> None:
        self._expected = expected

    def update(self, data: memoryview | bytes) -> None:
        """Take no notice of it."""

    def text(self) -> str:
        """Return what is expected."""
        return self._expected


@cache
def crc32c() -> Extend | None:
    """Return what extends a CRC-32C by some bytes; None where that would be slow."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", RuntimeWarning
            )  # that it is slow: see the warning below
            import google_crc32c
    except ImportError:
        why = "is not installed"
    else:
        if google_crc32c.implementation == "c":
            return partial(_extend, google_crc32c.extend)
        why = "has no C extension here"
    log.warning(
        "google-crc32c %s: new checkpoints get SHA-256 checksums, which take longer, and CRC-32C "
        "checksums are not compared; install a wheel of google-crc32c for this machine",
        why,
    )
    return None


def _extend(extend: Callable[[int, Any], int], crc: int, data: memoryview | bytes) -> int:
    """Return a CRC with more bytes; google-crc32c takes no memoryview, but a ctypes array."""
    if isinstance(data, bytes):
        return extend(crc, data)
    if data.readonly or data.nbytes < _WORTHWHILE:
        return extend(crc, bytes(data))
    return extend(crc, (ctypes.c_char * data.nbytes).from_buffer(data))


def begin(like: str = "") -> Checksum:
    """Return a checksum of the algorithm of ``like``, a checksum; without it that of new files.

    Where ``like`` cannot be computed in reasonable time, all content has it.
    """
    if like and not like.startswith(f"{CRC32C}:"):
        return _Whole()
    extend = crc32c()
    if extend is not None:
        return _Blocks(extend)
    return _Unchecked(like) if like else _Whole()


def is_known(text: str) -> bool:
    """Return whether a text begins as a checksum of one of the algorithms does."""
    return text.startswith((f"{CRC32C}:", f"{layout.CHECKSUM}:"))


def add_all(
    total: Checksum, file: IO[bytes], progress: Callable[[int], object] | None = None
) -> None:
    """Add the rest of a file to a checksum; ``progress`` gets the size of each piece."""
    while piece := file.read(BLOCK):
        total.update(piece)
        if progress is not None:
            progress(len(piece))


def checksum_of(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """Return the checksum of a file; ``progress`` gets the size of each piece."""
    return _read(path, begin(), progress)


def differs(path: Path, checksum: str, progress: Callable[[int], object] | None = None) -> bool:
    """Return whether a file's content has another checksum, as far as it can be computed here."""
    return _read(path, begin(checksum), progress) != checksum


def _read(path: Path, total: Checksum, progress: Callable[[int], object] | None) -> str:
    with open_regular(path) as file:
        add_all(total, file, progress)
    return total.text()
