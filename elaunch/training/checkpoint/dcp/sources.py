"""Where the bytes of a checkpoint come from: living agents' memory, else the files.

``.metadata`` says which files a rank needs of which rank. Files that are in no memory are read
by ``pread`` and not through a mapping: one that ends too early is an error then, no SIGBUS. Objects
at a URL are read in ranges, without a copy on the disk.

What is read is compared with the checksums in the manifests, so that a flipped bit does not go
unnoticed. Each rank checks what it reads itself: right after a piece was read, while it lies in the
caches of the processor, its CRC is taken. A checksum is that of a block of a file
(elaunch.checkpoint.storage.checksums): of a block that is read in part the rest is read, too, and
no other block. A file with one checksum for the whole is read as a whole when its first piece is.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar, cast

from elaunch.checkpoint import layout, manifests
from elaunch.checkpoint.storage.checksums import BLOCK, CRC32C, DIGITS, Extend, begin, crc32c
from elaunch.checkpoint.storage.files import JSON_LIMIT, open_regular, parse_json, read_json
from elaunch.checkpoint.storage.storage import Committed
from elaunch.errors import CheckpointError, DamageError, SaveError
from elaunch.training.checkpoint import saver
from elaunch.training.checkpoint.callcontext import CallContext
from elaunch.training.checkpoint.dcp import metadata
from elaunch.training.checkpoint.restore import is_foreign
from elaunch.training.checkpoint.together import guarded

if TYPE_CHECKING:
    from elaunch.checkpoint.storage.objects import Ranges

Result = TypeVar("Result")

_START: Final = len(CRC32C) + 1

log = logging.getLogger("elaunch")


class Manifests:
    """The checksums of the files of the checkpoint at ``place``, as its manifests have them."""

    def __init__(self, place: Path | Ranges) -> None:
        self._place = place
        self._unread: list[str] | None = None
        self._found: dict[str, str] = {}

    def checksum(self, name: str) -> str:
        """Return the checksum of a file; "" for one that no manifest has.

        Raises DamageError for a manifest that cannot be read, OSError for storage that fails.
        """
        if name in self._found:
            return self._found[name]
        if self._unread is None:
            names = self._names()
            self._unread = [one for one in names if layout.parse_manifest_name(one) is not None]
        likely = layout.manifest_name(writer_of(name) or 0)
        for manifest in sorted(self._unread, key=lambda one: one != likely):
            self._unread.remove(manifest)
            try:
                document = self._document(manifest)
                entries = manifests.entries(document, manifest)
            except CheckpointError as error:
                raise DamageError(str(error)) from None
            self._found.update({entry.path: entry.checksum for entry in entries})
            if name in self._found:
                break
        return self._found.setdefault(name, "")

    def _names(self) -> list[str]:
        if not isinstance(self._place, Path):
            return sorted(self._place.sizes)
        try:
            return sorted(os.listdir(self._place))
        except FileNotFoundError:
            # A shard may be in memory before a network file system shows what was committed.
            log.debug("%s is not there yet: what is read is not compared", self._place)
            return []

    def _document(self, name: str) -> dict[str, Any]:
        if isinstance(self._place, Path):
            return read_json(self._place / name)
        limit = min(self._place.sizes[name], JSON_LIMIT + 1)
        return parse_json(bytes(self._place.read(name, 0, limit)), name)


class _CheckedFile:
    """How far one block of a file is checked, the one that was read from last."""

    def __init__(self, source: Source, name: str, expected: str, extend: Extend) -> None:
        self._source = source
        self._name = name
        self._expected = expected
        self._extend = extend
        self._block = -1
        self._end = self._crc = 0

    def saw(self, at: int, view: memoryview) -> None:
        """Check what was read from offset ``at``; pieces may come in any order."""
        while view.nbytes:
            block = at // BLOCK
            if block != self._block or at < self._end:
                self.finish()
                self._block, self._end, self._crc = block, block * BLOCK, 0
            if self._end < at:
                self._add(self._source.some(self._name, self._end, at - self._end))
            piece = view[: (block + 1) * BLOCK - at]
            self._add(piece)
            at, view = at + piece.nbytes, view[piece.nbytes :]
            if at == (block + 1) * BLOCK:
                self._compare()

    def finish(self) -> None:
        """Read what the block still lacks, and compare it."""
        if self._block >= 0:
            left = (self._block + 1) * BLOCK - self._end
            self._add(self._source.some(self._name, self._end, left))
            self._compare()

    def _add(self, data: memoryview | bytes) -> None:
        self._crc = self._extend(self._crc, data)
        self._end += len(data)

    def _compare(self) -> None:
        start, self._block = _START + self._block * DIGITS, -1
        if self._expected[start : start + DIGITS] != f"{self._crc:08x}":
            raise self._source.damaged(self._name)


_DATA: Final = re.compile(r"__([0-9]+)_[0-9]+\.distcp")


class MemoryDamage(DamageError):
    """An agent's memory does not fit the manifests; the files may well do."""


class Source:
    """The files of one checkpoint, by name; ``place`` is how errors call it.

    ``manifests``: the directory with the manifests that all content has to fit; None: there are
    none, or they were compared before.
    """

    def __init__(self, place: object, manifests: Path | None = None) -> None:
        self.place = place
        self.path: Path | None = None
        self._ranges: Ranges | None = None
        self._held: dict[str, memoryview] = {}
        self._open: dict[str, BinaryIO] = {}
        self._manifests = None if manifests is None else Manifests(manifests)
        self._checked: dict[str, _CheckedFile | None] = {}
        self._found: DamageError | None = None

    def hold(self, files: Mapping[str, memoryview]) -> None:
        """Take these files from memory, whose mappings are this source's from here on."""
        self._held.update({name: view.cast("B") for name, view in files.items()})

    def read_ranges(self, ranges: Ranges) -> None:
        """Read what is not in memory from these, compared with the manifests there."""
        self._ranges, self._manifests = ranges, Manifests(ranges)

    @property
    def is_open(self) -> bool:
        """Whether files that are not in memory can be read."""
        return self.path is not None or self._ranges is not None

    def has_file(self, name: str) -> bool:
        """Tell whether a file is there, which is in no memory."""
        if self._ranges is not None:
            return name in self._ranges.sizes
        return self.path is not None and (self.path / name).is_file()

    def lacks(self, names: Iterable[str]) -> bool:
        """Tell whether some of these files are not in memory."""
        return any(name not in self._held for name in names)

    def read_into(self, name: str, at: int, target: memoryview) -> None:
        """Fill ``target`` from offset ``at`` of a file.

        Raises CheckpointError if the file ends before, OSError if it cannot be read, DamageError
        if it is not what its manifest says.
        """
        end = at + target.nbytes
        while at < end:
            piece = target[: BLOCK - at % BLOCK]
            count = self._fill(name, at, piece, end)
            if not count:
                raise self._too_short(name, at, end)
            self._check(name, at, piece[:count])
            at, target = at + count, target[count:]

    def read(self, name: str, at: int, size: int) -> bytes | memoryview:
        """Return ``size`` bytes from offset ``at`` of a file; errors as in :meth:`read_into`."""
        held = self._held.get(name)
        if held is not None and at + size <= held.nbytes:
            self._check(name, at, held[at : at + size])
            return held[at : at + size]
        content = bytearray(size)
        self.read_into(name, at, memoryview(content))
        return memoryview(content)

    def whole(self, name: str) -> bytes | memoryview:
        """Return all of a file."""
        return self.read(name, 0, self.size(name))

    def size(self, name: str) -> int:
        """Return the size of a file."""
        held = self._held.get(name)
        if held is not None:
            return held.nbytes
        if self._ranges is None:
            return os.fstat(self._descriptor(name)).st_size
        if name not in self._ranges.sizes:
            raise self._missing(name)
        return self._ranges.sizes[name]

    def finish(self) -> None:
        """Check the blocks that were read in part; raises as read_into, and what that raised."""
        if self._found is not None:  # the reader may have made something else of it
            raise self._found
        for file in filter(None, self._checked.values()):
            file.finish()

    def checked(self, read: Callable[[], Result], what: str) -> Result:
        """Return ``read()``, and :meth:`finish`; raises DamageError before what has come of it.

        ``what`` is for errors: see ``guarded``.
        """
        value, problem = guarded(read, what)
        try:
            self.finish()
        except DamageError as damage:
            if problem is None or damage is problem:
                raise
            raise type(damage)(f"{damage} ({problem})") from problem
        if problem is not None:
            raise problem
        return cast(Result, value)

    def close(self) -> None:
        """Close the files, and let the memory go."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        held = list(self._held.values())
        self._held.clear()
        saver.unmap(held)

    def _fill(self, name: str, at: int, target: memoryview, end: int) -> int:
        """Read into ``target``; return how many bytes came, 0 at the file's end.

        ``end``: up to where the file will be read next.
        """
        held = self._held.get(name)
        if held is not None:
            found = held[at : at + target.nbytes]
        elif self._ranges is not None:
            self.size(name)  # it is there
            found = self._ranges.read(name, at, end)[: target.nbytes]
        else:
            return os.preadv(self._descriptor(name), [target], at)
        target[: found.nbytes] = found
        return found.nbytes

    def some(self, name: str, at: int, size: int) -> memoryview | bytes:
        """Return up to ``size`` bytes, unchecked; fewer at the file's end."""
        held = self._held.get(name)
        if held is not None:
            return held[at : at + size]
        content, come = memoryview(bytearray(size)), 0
        while come < size and (count := self._fill(name, at + come, content[come:], at + size)):
            come += count
        return content[:come]

    def damaged(self, name: str) -> DamageError:
        """Return the error about a file that is not what its manifest says, and note it."""
        kind = MemoryDamage if name in self._held else DamageError
        self._found = kind(f"bad checksum: {name}")
        return self._found

    def _check(self, name: str, at: int, piece: memoryview) -> None:
        """Check what was read from offset ``at`` of a file, as far as whole blocks were."""
        if self._manifests is None:
            return
        if name not in self._checked:
            self._checked[name] = self._begin(name, self._manifests.checksum(name))
        file = self._checked[name]
        if file is not None:
            file.saw(at, piece)

    def _begin(self, name: str, expected: str) -> _CheckedFile | None:
        """Return a file whose blocks are checked; None if it was as a whole, or cannot be."""
        if not expected:
            return None
        if expected.startswith(f"{CRC32C}:"):
            extend = crc32c()
            return None if extend is None else _CheckedFile(self, name, expected, extend)
        total, at = begin(expected), 0
        while piece := self.some(name, at, BLOCK):
            total.update(piece)
            at += len(piece)
        if total.text() != expected:
            raise self.damaged(name)
        return None

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if self.path is None:
                raise CheckpointError(f"{self.place}: {name} is not in memory, and no file is open")
            try:
                self._open[name] = open_regular(self.path / name)
            except FileNotFoundError:
                raise self._missing(name) from None
        return self._open[name].fileno()

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.place}: {name} is missing")

    def _too_short(self, name: str, size: int, wanted: int) -> CheckpointError:
        return CheckpointError(
            f"{self.place}: {name} is truncated: it has {size} bytes, "
            f"{metadata.FILE} wants {wanted}"
        )


def writer_of(name: str) -> int | None:
    """Return the rank that wrote a file, by its name; None for other names."""
    if name == metadata.FILE:
        return 0
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else None


def recall(
    call: CallContext, found: Committed, names: Iterable[str], timeout: float | None
) -> dict[str, memoryview]:
    """Return those of the files that are in memory; any rank, alone."""
    ranks = {writer_of(name) for name in names} - {None}
    if is_foreign(found) or not ranks or call.saver is None:
        return {}
    wanted = [rank for rank in ranks if rank is not None]
    seconds = call.seconds(timeout)
    try:
        held = call.saver.recall(found.step, found.round, wanted, found.uuid, seconds)
    except SaveError as error:
        if found.uuid not in call.known.unrecalled:
            log.warning("%s is read from the files, not from memory: %s", found.name, error)
            call.known.unrecalled.add(found.uuid)
        return {}
    return {name: view for files in held.values() for name, view in files.items()}
