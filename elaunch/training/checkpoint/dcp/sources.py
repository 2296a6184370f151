"""Where the bytes of a checkpoint come from: living agents' memory, else the files.

``.metadata`` says which files a rank needs of which rank. Files that are in no memory are read
by ``pread`` and not through a mapping: one that ends too early is an error then, no SIGBUS.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from elaunch.checkpoint.storage.storage import Committed
from elaunch.errors import CheckpointError, SaveError
from elaunch.training.checkpoint.dcp import metadata
from elaunch.training.checkpoint.dcp.verify import Verifier
from elaunch.training.checkpoint.parts import CallContext
from elaunch.training.checkpoint.restore import is_foreign
from elaunch.training.checkpoint.saver import pages

_DATA: Final = re.compile(r"__([0-9]+)_[0-9]+\.distcp")
_LONGEST_READ: Final = 1 << 30

log = logging.getLogger("elaunch")


class Source:
    """The files of one checkpoint, by name; ``place`` is how errors call it."""

    def __init__(self, place: object) -> None:
        self.place = place
        self.path: Path | None = None
        self.verifier: Verifier | None = None
        self._held: dict[str, memoryview] = {}
        self._open: dict[str, int] = {}

    def hold(self, files: Mapping[str, memoryview]) -> None:
        """Take these files from memory, whose mappings are this source's from here on."""
        self._held.update({name: view.cast("B") for name, view in files.items()})

    def lacks(self, names: Iterable[str]) -> bool:
        """Tell whether some of these files are not in memory."""
        return any(name not in self._held for name in names)

    def read_into(self, name: str, at: int, target: memoryview) -> None:
        """Fill ``target`` from offset ``at`` of a file.

        Raises CheckpointError if the file ends before, OSError if it cannot be read.
        """
        size = target.nbytes
        held = self._held.get(name)
        if held is not None:
            if at + size > held.nbytes:
                raise self._too_short(name, held.nbytes, at + size)
            target[:] = held[at : at + size]
            return
        descriptor, done = self._descriptor(name), 0
        while done < size:
            count = os.preadv(descriptor, [target[done : done + _LONGEST_READ]], at + done)
            if not count:
                raise self._too_short(name, at + done, at + size)
            done += count
        if self.verifier is not None:
            self.verifier.saw(name, at, target)

    def read(self, name: str, at: int, size: int) -> bytes | memoryview:
        """Return ``size`` bytes from offset ``at`` of a file; errors as in :meth:`read_into`."""
        held = self._held.get(name)
        if held is not None and at + size <= held.nbytes:
            return held[at : at + size]
        content = bytearray(size)
        self.read_into(name, at, memoryview(content))
        return memoryview(content)

    def whole(self, name: str) -> bytes | memoryview:
        """Return all of a file."""
        if name in self._held:
            return self._held[name]
        return self.read(name, 0, os.fstat(self._descriptor(name)).st_size)

    def close(self) -> None:
        """Close the files, and let the memory go."""
        if self.verifier is not None:
            self.verifier.close()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        held = list(self._held.values())
        self._held.clear()
        pages.unmap(held)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if self.path is None:
                raise CheckpointError(f"{self.place}: {name} is not in memory, and no file is open")
            try:
                # O_NONBLOCK: opening a FIFO that nobody writes to would wait for ever.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                self._open[name] = os.open(self.path / name, flags)
            except FileNotFoundError:
                raise CheckpointError(f"{self.place}: {name} is missing") from None
        return self._open[name]

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
    parts: CallContext, found: Committed, names: Iterable[str], timeout: float | None
) -> dict[str, memoryview]:
    """Return those of the files that are in memory; any rank, alone."""
    ranks = {writer_of(name) for name in names} - {None}
    if is_foreign(found) or not ranks:
        return {}
    wanted = [rank for rank in ranks if rank is not None]
    seconds = parts.seconds(timeout)
    try:
        held = parts.saver.recall(found.step, found.round, wanted, found.uuid, seconds)
    except SaveError as error:
        if found.uuid not in parts.known.unrecalled:
            log.warning("%s is read from the files, not from memory: %s", found.name, error)
            parts.known.unrecalled.add(found.uuid)
        return {}
    return {name: view for files in held.values() for name, view in files.items()}
