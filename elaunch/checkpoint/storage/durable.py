"""Putting files on the disk so that they survive a power cut, and never torn under their names.

====================  ==============================================================================
function              leaves
====================  ==============================================================================
``write_file``        a new file under a temporary name, written, fsynced, then renamed
``sync_file``         a file that is there: fsynced, its checksum known
``write_document``    a small file, like ``write_file``
``list_files``        (reads) what a script has written into a stage
``move_in``           an fsynced file in the stage, moved from a rank's own directory
``sync_directory``    the directory's entries on the disk; ``sync_parents``: of all below it
``make_parents``      directories below one that must exist already
``read_patiently``    (reads) a file that another machine has just written
====================  ==============================================================================

A rename is on the disk only when the directory is fsynced after it: callers do that once for all
files of a directory. Every OSError names its file.

A rank's own directory inside a stage (``layout.private_name``) keeps apart what two ranks write
under one name. Moving files out of it cannot do harm: equal content replaces itself, and for
different content the manifests differ, so that the commit refuses, with both ranks' names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from elaunch.atonce import STEP, Writing, at_once
from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import FileEntry
from elaunch.checkpoint.storage.checksums import Checksum, add_all, begin
from elaunch.checkpoint.storage.files import open_regular
from elaunch.errors import SaveError

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def list_files(directory: Path, staged: bool) -> list[str]:
    """Return the files below a directory, relative and sorted.

    ``staged``: it is a stage, where elaunch's own files are left out. Raises SaveError for what is
    no regular file, and for names that elaunch itself writes.
    """
    return sorted(_walk(directory, "", staged))


def _walk(directory: Path, above: str, staged: bool) -> Iterator[str]:
    with os.scandir(directory) as found:
        entries = list(found)
    for entry in entries:
        relative = f"{above}{entry.name}"
        if entry.name.startswith(layout.TEMPORARY):
            continue
        if not above and layout.is_reserved(entry.name):
            _check_reserved(entry.name, staged)
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{relative}/", staged)
        elif entry.is_file(follow_symlinks=False):
            yield relative
        else:
            mode = entry.stat(follow_symlinks=False).st_mode
            kind = next((kind for test, kind in _KINDS if test(mode)), "no regular file")
            raise SaveError(
                f"{relative} is {kind}: only regular files can be in a checkpoint; write the"
                " content itself"
            )


def _check_reserved(name: str, staged: bool) -> None:
    ours = layout.parse_manifest_name(name) is not None or name.startswith(layout.PRIVATE)
    if not (staged and ours):
        raise SaveError(
            f"a checkpoint's file cannot be called {name!r}: elaunch itself writes that;"
            " choose another name, or put it into a directory"
        )


def sync_files(directory: Path, files: Sequence[str], most: int) -> list[FileEntry]:
    """Fsync and checksum files below a directory, ``most`` of them at the same time.

    Raises OSError, or SaveError if one changes.
    """
    return at_once([partial(sync_file, directory, file) for file in files], most, "sync")


def move_in(source: Path, stage: Path, file: FileEntry) -> FileEntry:
    """Move an fsynced file into the stage, by copying from another file system; return its entry.

    A file where another rank has a directory, or the other way round, stays where it is: the
    commit refuses it by the manifests.
    """
    try:
        make_parents(stage, file.path)
        os.replace(source / file.path, stage / file.path)
    except (NotADirectoryError, IsADirectoryError):
        if not stage.is_dir():
            raise
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return _copy_in(source, stage, file)
    return file


def _copy_in(source: Path, stage: Path, file: FileEntry) -> FileEntry:
    target = stage / file.path
    temporary = target.with_name(temporary_name())
    try:
        shutil.copyfile(source / file.path, temporary, follow_symlinks=False)
        copied = sync_file(stage, str(temporary.relative_to(stage)))
        if copied.checksum != file.checksum:
            raise SaveError(f"{file.path} was changed while it was copied into the checkpoint")
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return FileEntry(file.path, copied.size, copied.checksum, copied.mtime_ns)


_PIECES = 512  # per call of writev; the system takes 1024 at most
_PAUSE = 0.05  # seconds between two looks at what another machine has written
# CIFS and some FUSE: to sync a directory, to write past the cache.
_NO_SUCH_CALL = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_NOT_YET = (errno.ENOENT, errno.ESTALE)

_T = TypeVar("_T")
Piece = memoryview | bytes


def temporary_name() -> str:
    """Return a name that no other writer uses; readers and listings leave it out."""
    return f"{layout.TEMPORARY}{secrets.token_hex(8)}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError from a call on a descriptor the file's name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_file(
    directory: Path,
    relative: str,
    pieces: Iterable[Piece],
    beside: Writing | None = None,
    *,
    like: str = "",
) -> FileEntry:
    """Write a file below ``directory``, whose parents are there, and return its entry.

    The checksum is computed of what is just about to be written, by the algorithm of ``like``, a
    checksum, if there is one. What is written ``beside`` a training goes past the page cache where
    the storage can do that.
    """
    path = directory / relative
    total = begin(like)
    temporary = path.with_name(temporary_name())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with naming(path):
                write = _writer(descriptor, direct=beside is not None)
                do_steps(_writes(write, plain_views(pieces), total), beside)
                os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return FileEntry(relative, status.st_size, total.text(), status.st_mtime_ns)


def write_document(path: Path, content: bytes) -> None:
    """Write a small file that is whole whenever it has its name."""
    write_file(path.parent, path.name, [content])


def sync_file(directory: Path, relative: str) -> FileEntry:
    """Fsync a regular file and return its entry; SaveError if it changes meanwhile."""
    path = directory / relative
    with open_regular(path) as file, naming(path):
        before, total = os.fstat(file.fileno()), begin()
        calls = [partial(os.fsync, file.fileno()), partial(add_all, total, file)]
        at_once(calls, len(calls), "fsync")
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise SaveError(
            f"{relative} was changed while it was put on the disk: what writes it must be done"
            " before"
        )
    return FileEntry(relative, after.st_size, total.text(), after.st_mtime_ns)


def sync_directory(path: Path) -> None:
    """Put a directory's entries on the disk: what was made, renamed and removed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
    finally:
        os.close(descriptor)


def make_parents(directory: Path, relative: str) -> None:
    """Make the directories of ``relative`` below ``directory``, which itself must be there."""
    for parent in reversed(PurePosixPath(relative).parents[:-1]):
        try:
            os.mkdir(directory / parent)
        except FileExistsError:
            if not (directory / parent).is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory / parent)
                ) from None


def sync_parents(directory: Path, relatives: Sequence[str]) -> None:
    """Put the entries of these files' directories on the disk, but for ``directory`` itself.

    A path that another rank has made a file is left to the commit, which refuses it.
    """
    parents = {parent for relative in relatives for parent in PurePosixPath(relative).parents[:-1]}
    for parent in sorted(parents, key=lambda path: -len(path.parts)):
        with contextlib.suppress(NotADirectoryError):
            sync_directory(directory / parent)


def put_in_place(source: Path, directory: Path, relative: str) -> None:
    """Move a file or a directory below ``directory``, and have that on the disk."""
    make_parents(directory, relative)
    os.rename(source, directory / relative)
    sync_parents(directory, [relative])
    sync_directory(directory)


def read_patiently(read: Callable[[], _T], patience: float) -> _T:
    """Return ``read()``, again and again for ``patience`` seconds while the file is not there.

    For what another machine is known to have written: attribute caches of network file systems
    may hide it for a while.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno not in _NOT_YET or time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE)


def stir(directory: Path) -> None:
    """Change a directory, so that a cached copy of it is given up."""
    name = directory / temporary_name()
    with contextlib.suppress(OSError):
        name.touch()
        name.unlink()


def regular(path: Path) -> os.stat_result:
    """Return the ``stat`` of a regular file; SaveError for anything else."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise SaveError(f"{path.name} is not a regular file any more")
    return status


def plain_views(pieces: Iterable[Piece]) -> Iterator[memoryview]:
    """Yield the pieces that are not empty as memory of single bytes."""
    for piece in pieces:
        view = memoryview(piece)
        if view.nbytes:
            yield view.cast("B")


def do_steps(steps: Iterator[int], beside: Writing | None) -> None:
    """Do steps, which yield their bytes; note each one where they are ``beside`` a training."""
    (beside or Writing()).follow(steps)


def portions(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield pieces that are not larger than STEP bytes."""
    for view in views:
        for start in range(0, view.nbytes, STEP):
            yield view[start : start + STEP]


def _writes(
    write: Callable[[list[memoryview]], None], views: Iterable[memoryview], total: Checksum
) -> Iterator[int]:
    """Write pieces, so many in one call that there are not more than about STEP bytes.

    Each is added to ``total`` right before.
    """
    batch: list[memoryview] = []
    size = 0
    for piece in portions(views):
        total.update(piece)
        batch.append(piece)
        size += piece.nbytes
        if size >= STEP or len(batch) == _PIECES:
            write(batch)
            yield size
            batch, size = [], 0
    write(batch)


def _writer(descriptor: int, direct: bool) -> Callable[[list[memoryview]], None]:
    """Return what writes batches to a file one after the other; ``direct``: past the page cache.

    The storage then reads the memory itself: a copy, and the pages for it, would take the processor
    ten times as long, from the training that it shares the processor with, and drive files out of
    the cache that are read again. Only whole steps go that way. The first batch that is none, or
    that the storage refuses, goes through the cache, and so does the rest of the file.
    """
    direct = direct and _set_direct(descriptor, True)

    def write(batch: list[memoryview]) -> None:
        nonlocal direct
        if direct and (len(batch) != 1 or batch[0].nbytes != STEP):
            direct = _set_direct(descriptor, False)
        while batch:
            try:
                written = os.writev(descriptor, batch)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = _set_direct(descriptor, False)
                continue
            while batch and written >= batch[0].nbytes:
                written -= batch.pop(0).nbytes
            if written:
                batch[0] = batch[0][written:]

    return write


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Have a file written past the page cache, or not; return whether it is from here on."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if not direct or error.errno not in _NO_SUCH_CALL:
            raise
        return False
    return direct
