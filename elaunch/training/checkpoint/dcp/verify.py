"""Checksums of files while they are read, so that a flipped bit does not go unnoticed.

Each file is checked by one of the ranks that read it. A thread hashes what that rank reads,
beside the reading, from where it was read to; it reads by itself what the rank leaves out, so that
all of the file is hashed once, in order. The checksum is that of the manifest, SHA-256, for
which processors have instructions.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.files import read_json, sha256_of
from elaunch.checkpoint.writing import manifests

_AHEAD: Final = 2
"""Pieces that wait for the thread; what was read for another device is kept so long."""
_SMALL: Final = 1 << 16
"""Bytes; a smaller piece is read again, together with what is around it."""
_CHUNK: Final = 1 << 20


def checksums(path: Path, names: Iterable[str], writers: Mapping[str, int]) -> dict[str, str]:
    """Return the checksums of files of a checkpoint, as the manifests have them.

    ``writers`` are the ranks in whose manifests they probably are. Raises CheckpointError for a
    manifest that cannot be read.
    """
    wanted, found = set(names), dict[str, str]()
    likely = sorted({writers[name] for name in wanted if name in writers})
    first = [layout.manifest_name(rank) for rank in likely]
    others = (name for name in sorted(os.listdir(path)) if name not in first)
    for name in (*first, *others):
        if wanted <= found.keys():
            break
        if layout.parse_manifest_name(name) is None or not (path / name).is_file():
            continue
        for entry in manifests.entries(read_json(path / name), name):
            found[entry.path] = entry.checksum
    return {name: found[name] for name in wanted & found.keys()}


class _HashedFile:
    """How far a file is hashed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        self.total = hashlib.sha256()
        self._descriptor = -1

    def add(self, at: int, view: memoryview) -> None:
        """Hash what was read from offset ``at``, and before it what was left out."""
        self.read_until(at)
        if at <= self.end < at + view.nbytes:
            self.total.update(view[self.end - at :])
            self.end = at + view.nbytes

    def read_until(self, end: int | None) -> None:
        """Hash what is not yet hashed before ``end``; None: to the end of the file."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        while end is None or self.end < end:
            size = _CHUNK if end is None else min(_CHUNK, end - self.end)
            chunk = os.pread(self._descriptor, size, self.end)
            if not chunk:
                return
            self.total.update(chunk)
            self.end += len(chunk)

    def close(self) -> None:
        """Close it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Verifier:
    """Hashes files of a directory beside their readers; ``close`` ends its thread."""

    def __init__(self, path: Path, expected: Mapping[str, str]) -> None:
        self._expected = expected
        self._files = {name: _HashedFile(path / name) for name in expected}
        self._queue: queue.Queue[tuple[str, int, memoryview] | None] = queue.Queue(_AHEAD)
        self._problem: OSError | None = None
        self._unwanted = self._finished = False
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def saw(self, name: str, at: int, view: memoryview) -> None:
        """Have hashed what was read from a file; it may not change before :meth:`damage`."""
        if name in self._files and view.nbytes >= _SMALL:
            self._queue.put((name, at, view))

    def damage(self) -> str:
        """Return which file is not what its manifest says, with all files read; "" if none is.

        Raises OSError for a file that cannot be read.
        """
        self.finish()
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        for name, checksum in self._expected.items():
            file = self._files[name]
            if f"{layout.CHECKSUM}:{file.total.hexdigest()}" == checksum:
                continue
            # Two keys may be one tensor here, which then changed while it was hashed.
            if f"{layout.CHECKSUM}:{sha256_of(file.path)}" != checksum:
                return f"bad checksum: {name}"
        return ""

    def close(self) -> None:
        """Hash no more."""
        self._unwanted = True
        self.finish()
        self._thread.join()

    def finish(self) -> None:
        """Note that no more was read: what is left of the files is hashed."""
        if not self._finished:
            self._finished = True
            self._queue.put(None)

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None:
            self._hash(piece)
        for name, file in self._files.items():
            self._hash((name, -1, memoryview(b"")))
            file.close()

    def _hash(self, piece: tuple[str, int, memoryview]) -> None:
        name, at, view = piece
        if self._unwanted or self._problem is not None:
            return
        try:
            if at < 0:
                self._files[name].read_until(None)
            else:
                self._files[name].add(at, view)
        except OSError as error:
            self._problem = error


def damage_of(path: Path, name: str, content: bytes | memoryview, writer: int) -> str:
    """Return what is wrong with a small file that was read as a whole; "" if nothing is."""
    expected = checksums(path, [name], {name: writer})
    if name in expected and layout.checksum(bytes(content)) != expected[name]:
        return f"bad checksum: {name}"
    return ""


@contextmanager
def beside(path: Path, names: Sequence[str]) -> Iterator[Verifier]:
    """Read and hash files of rank 0 beside the ``with`` block, in which somebody else reads them.

    Raises CheckpointError for a manifest that cannot be read.
    """
    verifier = Verifier(path, checksums(path, names, dict.fromkeys(names, 0)))
    try:
        verifier.finish()
        yield verifier
    finally:
        verifier.close()
