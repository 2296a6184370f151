"""Objects behind an fsspec URL: put, read, listed, deleted; never renamed.

A path is relative to the URL, with ``/`` between its parts. What a storage's driver raises comes as
an OSError that names the place: a FileNotFoundError where the object is not there.

==============================  =================================================================
what is relied on               by
==============================  =================================================================
an object is put as a whole     COMMIT and the other documents
what was put is read and        the committer, the choice of a checkpoint. S3 does it since 2020;
listed at once, by everybody    fsspec's own cache of listings is turned off
==============================  =================================================================
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from elaunch.checkpoint.manifests import FileEntry
from elaunch.checkpoint.records import Image
from elaunch.checkpoint.search.locations import BUCKETS, without_slash
from elaunch.checkpoint.storage.checksums import BLOCK, add_all, begin
from elaunch.checkpoint.storage.durable import do_steps, plain_views, portions, write_document
from elaunch.errors import DamageError, UsageError

MOST: Final = 64 * BLOCK
"""Bytes of an object that are had at once."""
COPIED: Final = 16 * BLOCK
"""Bytes of each of several objects that are copied at once."""


class Objects:
    """All objects below ``url``. UsageError if what fsspec needs for it is not installed."""

    def __init__(self, url: str) -> None:
        self.url = without_slash(url)
        self._connect()

    def _connect(self) -> tuple[Any, str]:
        """Return fsspec's file system, which it keeps per process, and the root's path in it."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UsageError(
                f"{self.url} needs fsspec, which is not installed: pip install 'elaunch[storage]'"
            ) from None
        try:
            system, root = url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            scheme = self.url.partition("://")[0]
            raise UsageError(
                f"{self.url} cannot be used: {error}. Install what fsspec needs for {scheme}://"
                " (for s3:// that is: pip install s3fs), or give a directory"
            ) from None
        return system, root.rstrip("/")

    @contextmanager
    def _at(self, path: str) -> Iterator[tuple[Any, str]]:
        """Give the file system and the full path; make an OSError of what else is raised."""
        system, root = self._connect()
        try:
            yield system, f"{root}/{path}" if path else root
        except OSError as error:
            error.filename = error.filename or f"{self.url}/{path}"
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise OSError(errno.EIO, reason, f"{self.url}/{path}") from error

    def names(self, path: str = "") -> list[str]:
        """Return the names directly below a path; none if nothing is there."""
        with self._at(path) as (system, full):
            system.invalidate_cache()
            try:
                found = system.ls(full, detail=False)
            except FileNotFoundError:
                return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})

    def sizes(self, path: str) -> dict[str, int]:
        """Return all objects below a path, however deep: relative path → bytes."""
        with self._at(path) as (system, full):
            system.invalidate_cache()
            found = system.find(full, detail=True)
            return {
                name[len(full) + 1 :]: int(info["size"] or 0)
                for name, info in found.items()
                if info.get("type") != "directory"
            }

    def read(self, path: str) -> bytes:
        """Return an object's content."""
        with self._at(path) as (system, full):
            return bytes(system.cat_file(full))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return a part of an object's content; less where the object ends before ``end``."""
        with self._at(path) as (system, full):
            return bytes(system.cat_file(full, start=start, end=end))

    def put(self, path: str, content: bytes) -> None:
        """Put a small object, as a whole."""
        with self._at(path) as (system, full):
            if "file" in _protocols(system):  # fsspec would truncate it first
                put = functools.partial(write_document, Path(full), content)
            else:
                put = functools.partial(system.pipe_file, full, content)
            _with_parents(system, [full], put)

    def write(self, path: str, image: Image) -> FileEntry:
        """Put an image below ``path``."""
        total = begin()

        def steps(file: Any) -> Iterator[int]:
            for piece in portions(plain_views(image.pieces)):
                total.update(piece)
                file.write(piece)
                yield piece.nbytes

        with (
            self._at(f"{path}/{image.path}") as (system, full),
            _with_parents(system, [full], lambda: system.open(full, "wb")) as file,
        ):
            do_steps(steps(file), image.beside)
        return FileEntry(image.path, image.size, total.text())

    def upload(self, path: str, local: Path, files: Sequence[str]) -> None:
        """Put files that are below a local directory, several at once where the driver can."""
        with self._at(path) as (system, full):
            targets = [f"{full}/{file}" for file in files]
            sources = [str(local / file) for file in files]
            _with_parents(system, targets, lambda: system.put(sources, targets))

    def copy(self, path: str, file: FileEntry, local: Path) -> None:
        """Get an object into a local directory; DamageError if it is not what its entry says."""
        target, total = local / file.path, begin(file.checksum)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as opened:
            for at in range(0, file.size, COPIED):
                end = min(at + COPIED, file.size)
                content = self.read_range(f"{path}/{file.path}", at, end)
                total.update(content)
                opened.write(content)
        if total.text() != file.checksum:
            raise DamageError(f"bad checksum: {file.path}")

    def differs(self, path: str, checksum: str) -> bool:
        """Return whether an object, read in pieces, has another checksum."""
        total = begin(checksum)
        with self._at(path) as (system, full), system.open(full, "rb") as file:
            add_all(total, file)
        return total.text() != checksum

    def delete(self, path: str) -> None:
        """Delete an object, or all below a path; nothing if it is not there."""
        with self._at(path) as (system, full):
            try:
                system.rm(full, recursive=True)
            except FileNotFoundError:
                return


class Ranges:
    """The objects directly below ``path``, read in ranges of whole blocks.

    The last range stays here: what is read next often begins in it.
    """

    def __init__(self, objects: Objects, path: str) -> None:
        self.sizes = objects.sizes(path)
        self._objects = objects
        self._path = path
        self._held = "", 0, memoryview(b"")

    def read(self, name: str, at: int, end: int) -> memoryview:
        """Return the bytes from ``at``, to ``end`` at most; none at the object's end.

        ``end`` says how many will be wanted: they are had at once, as far as ``MOST``. Raises
        OSError.
        """
        held, start, content = self._held
        if held != name or not start <= at < start + len(content):
            start = at - at % BLOCK
            stop = min(-(-end // BLOCK) * BLOCK, start + MOST, self.sizes.get(name, end))
            self._held = "", 0, memoryview(b"")  # two would take twice the memory
            if stop <= at:
                return memoryview(b"")
            content = memoryview(self._objects.read_range(f"{self._path}/{name}", start, stop))
            self._held = name, start, content
        return content[at - start : end - start]


def name_in(place: Path | str) -> str:
    """Return the last part of a URL."""
    return str(place).rstrip("/").rpartition("/")[2]


def _with_parents(system: Any, paths: Sequence[str], call: Callable[[], Any]) -> Any:
    """Return ``call()``; where a file system has real directories they are made first.

    In an object store that would make a bucket, of a name that may be mistyped.
    """
    try:
        return call()
    except FileNotFoundError:
        if BUCKETS.intersection(_protocols(system)):
            raise
        for parent in sorted({path.rpartition("/")[0] for path in paths}):
            system.makedirs(parent, exist_ok=True)
        return call()


def _protocols(system: Any) -> tuple[str, ...]:
    names = system.protocol
    return (names,) if isinstance(names, str) else tuple(names)
