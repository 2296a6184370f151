"""Files that others have written, made part of a stage: found, fsynced, checksummed, moved in.

A rank's own directory inside the stage (``layout.private_name``) keeps apart what two ranks write
under one name. Moving them in cannot do harm: equal content replaces itself, and for different
content the manifests differ, so that the commit refuses, with both ranks' names.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.atonce import at_once
from elaunch.checkpoint.storage.durable import make_parents, seal_file, temporary_name
from elaunch.checkpoint.writing.manifests import FileEntry
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


def seal_files(directory: Path, files: Sequence[str], most: int) -> list[FileEntry]:
    """Fsync and checksum files below a directory, ``most`` of them at the same time.

    Raises OSError, or SaveError if one changes.
    """
    return at_once([partial(seal_file, directory, file) for file in files], most, "seal")


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
        copied = seal_file(stage, str(temporary.relative_to(stage)))
        if copied.checksum != file.checksum:
            raise SaveError(f"{file.path} was changed while it was copied into the checkpoint")
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return FileEntry(file.path, copied.size, copied.checksum, copied.mtime_ns)
