"""Checksums of files while they are read, so that a flipped bit does not go unnoticed.

Each rank checks what it reads itself: right after a piece was read, while it lies in the caches of
the processor, its CRC is taken. A checksum is that of a block of a file (elaunch.checkpoint.storage
.checksums): of a block that is read in part the rest is read, too, and no other block. A file with
one checksum for the whole is read as a whole when its first piece is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.checksums import BLOCK, CRC32C, DIGITS, Extend, begin, crc32c
from elaunch.checkpoint.storage.files import read_json
from elaunch.checkpoint.writing import manifests
from elaunch.errors import CheckpointError, DamageError

Read = Callable[[str, int, int], memoryview | bytes]
"""Reads of a file, from an offset, so many bytes; fewer at its end."""
_START: Final = len(CRC32C) + 1

log = logging.getLogger("elaunch")


class Manifests:
    """The checksums of the files of the checkpoint at ``path``, as its manifests have them.

    ``writer_of`` returns the rank in whose manifest a file probably is.
    """

    def __init__(self, path: Path, writer_of: Callable[[str], int | None]) -> None:
        self._path = path
        self._writer_of = writer_of
        self._unread: list[str] | None = None
        self._found: dict[str, str] = {}

    def checksum(self, name: str) -> str:
        """Return the checksum of a file; "" for one that no manifest has.

        Raises DamageError for a manifest that cannot be read, OSError for storage that fails.
        """
        if name in self._found:
            return self._found[name]
        if self._unread is None:
            try:
                names = sorted(os.listdir(self._path))
            except FileNotFoundError:
                # A shard may be in memory before a network file system shows what was committed.
                log.debug("%s is not there yet: what is read is not compared", self._path)
                names = []
            self._unread = [one for one in names if layout.parse_manifest_name(one) is not None]
        likely = layout.manifest_name(self._writer_of(name) or 0)
        for manifest in sorted(self._unread, key=lambda one: one != likely):
            self._unread.remove(manifest)
            try:
                document = read_json(self._path / manifest)
                entries = manifests.entries(document, manifest)
            except CheckpointError as error:
                raise DamageError(str(error)) from None
            self._found.update({entry.path: entry.checksum for entry in entries})
            if name in self._found:
                break
        return self._found.setdefault(name, "")


class Verifier:
    """Checks what is read of some files.

    ``read`` gets what a block lacks; ``damaged`` makes the error about a file whose content is not
    what its manifest says.
    """

    def __init__(
        self, manifests: Manifests, read: Read, damaged: Callable[[str], DamageError]
    ) -> None:
        self._manifests = manifests
        self.read = read
        self._damaged = damaged
        self._found: DamageError | None = None
        self._files: dict[str, _CheckedFile | None] = {}

    def saw(self, name: str, at: int, view: memoryview) -> None:
        """Check what was read from offset ``at`` of a file, as far as whole blocks were.

        Raises what ``damaged`` makes, and as :meth:`Manifests.checksum`.
        """
        if name not in self._files:
            self._files[name] = self._begin(name)
        file = self._files[name]
        if file is not None:
            file.saw(at, view)

    def finish(self) -> None:
        """Check the blocks that were read in part; raises what :meth:`saw` has raised once more."""
        if self._found is not None:  # the reader may have made something else of it
            raise self._found
        for file in self._files.values():
            if file is not None:
                file.finish()

    def damaged(self, name: str) -> DamageError:
        """Return the error about a file, and note it."""
        self._found = self._damaged(name)
        return self._found

    def _begin(self, name: str) -> _CheckedFile | None:
        """Return a file whose blocks are checked; None if it was as a whole, or cannot be."""
        expected = self._manifests.checksum(name)
        if not expected:
            return None
        if expected.startswith(f"{CRC32C}:"):
            extend = crc32c()
            return None if extend is None else _CheckedFile(self, name, expected, extend)
        total, at = begin(expected), 0
        while piece := self.read(name, at, BLOCK):
            total.update(piece)
            at += len(piece)
        if total.text() != expected:
            raise self.damaged(name)
        return None


class _CheckedFile:
    """How far one block of a file is checked, the one that was read from last."""

    def __init__(self, verifier: Verifier, name: str, expected: str, extend: Extend) -> None:
        self._verifier = verifier
        self._name = name
        self._expected = expected
        self._extend = extend
        self._block = -1
        self._end = self._crc = 0

    def saw(self, at: int, view: memoryview) -> None:
        """See :meth:`Verifier.saw`; pieces may come in any order."""
        while view.nbytes:
            block = at // BLOCK
            if block != self._block or at < self._end:
                self.finish()
                self._block, self._end, self._crc = block, block * BLOCK, 0
            if self._end < at:
                self._add(self._verifier.read(self._name, self._end, at - self._end))
            piece = view[: (block + 1) * BLOCK - at]
            self._add(piece)
            at, view = at + piece.nbytes, view[piece.nbytes :]
            if at == (block + 1) * BLOCK:
                self._compare()

    def finish(self) -> None:
        """Read what the block still lacks, and compare it."""
        if self._block >= 0:
            left = (self._block + 1) * BLOCK - self._end
            self._add(self._verifier.read(self._name, self._end, left))
            self._compare()

    def _add(self, data: memoryview | bytes) -> None:
        self._crc = self._extend(self._crc, data)
        self._end += len(data)

    def _compare(self) -> None:
        start, self._block = _START + self._block * DIGITS, -1
        if self._expected[start : start + DIGITS] != f"{self._crc:08x}":
            raise self._verifier.damaged(self._name)
