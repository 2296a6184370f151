"""Where checkpoints lie that do not count as others do: pinned, in quarantine, on their way out.

::

    .pins/step-00000120.r3                     an empty file: retention leaves the checkpoint alone
    .quarantine/step-00000120.r3/              renamed, as it was; .2, .3, … if the name is taken
    .quarantine/step-00000120.r3.reason.json   {"schema": 1, "name": …, "reason": …, "at": …}
    .trash/step-00000120.r3.<random>/          renamed, so that no reader sees half of it; deleted

A person pins and unpins. A pin says nothing about the content: what is damaged is quarantined all
the same. On a URL the pins are empty objects under the same names. On a disk so full that not even
a rename into the trash succeeds, COMMIT is removed first: what has none does not exist for readers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import dump
from elaunch.checkpoint.records import Location
from elaunch.checkpoint.storage.durable import sync_directory, write_document
from elaunch.checkpoint.storage.files import text_in
from elaunch.checkpoint.storage.objects import Objects
from elaunch.errors import CheckpointError
from elaunch.files import own_directory


def pinned(place: Location) -> frozenset[str]:
    """Return the names that are pinned at a directory or URL; OSError if they cannot be read."""
    if isinstance(place, str):
        names = Objects(place).names(layout.PINS)
    else:
        try:
            with own_directory(place / layout.PINS) as pins:
                names = os.listdir(pins)
        except FileNotFoundError:
            return frozenset()
    return frozenset(name for name in names if layout.parse_step_name(name) is not None)


def pin(place: Location, name: str) -> None:
    """Have retention leave the checkpoint ``name`` alone; a second time does nothing.

    Raises CheckpointError for a name that no checkpoint of elaunch's layout has.
    """
    _check(name)
    if isinstance(place, str):
        Objects(place).put(f"{layout.PINS}/{name}", b"")
        return
    with own_directory(place / layout.PINS, make=True) as pins:
        (pins / name).touch()
        sync_directory(pins)
    sync_directory(place)


def unpin(place: Location, name: str) -> None:
    """Let retention decide about ``name`` again; a second time does nothing."""
    _check(name)
    if isinstance(place, str):
        Objects(place).delete(f"{layout.PINS}/{name}")
        return
    with contextlib.suppress(FileNotFoundError), own_directory(place / layout.PINS) as pins:
        (pins / name).unlink()
        sync_directory(pins)


def _check(name: str) -> None:
    if layout.parse_step_name(name) is None:
        raise CheckpointError(
            f"{name!r} cannot be pinned: only checkpoints in elaunch's own layout can, whose names "
            "are as step-00000120.r3"
        )


_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_MOST = 10_000
UNKNOWN = "the reason is not known"


def put_aside(root: Path, path: Path, reason: str) -> Path | None:
    """Move a checkpoint into the quarantine; None if it is gone already, else where it is now."""
    with own_directory(root / layout.QUARANTINE, make=True) as quarantine:
        name = _move(path, quarantine)
        if name is None:
            return None
        write_document(quarantine / f"{name}{layout.REASON}", _document(path, reason))
        sync_directory(quarantine)
    sync_directory(root)
    return root / layout.QUARANTINE / name


def put_all_aside(root: Path, damaged: Iterable[tuple[Path, str]]) -> list[Path]:
    """Move checkpoints (path, reason) into the quarantine; return those that were there.

    The directories are fsynced once, after the last: a power cut may undo some, or lose a reason.
    """
    with own_directory(root / layout.QUARANTINE, make=True) as quarantine:
        try:
            return [path for path, reason in damaged if _put(path, reason, quarantine)]
        finally:
            sync_directory(quarantine)
            sync_directory(root)


def _put(path: Path, reason: str, quarantine: Path) -> bool:
    name = _move(path, quarantine)
    if name is not None:
        document = quarantine / f"{name}{layout.REASON}"
        document.unlink(missing_ok=True)  # a link would be followed
        document.write_bytes(_document(path, reason))
    return name is not None


def _document(path: Path, reason: str) -> bytes:
    return dump({"schema": layout.SCHEMA, "name": path.name, "reason": reason, "at": time.time()})


def _move(path: Path, quarantine: Path) -> str | None:
    """Rename a checkpoint into the quarantine; return its name there, None if it is gone."""
    for number in range(1, _MOST):
        target = quarantine / (path.name if number == 1 else f"{path.name}.{number}")
        try:
            os.rename(path, target)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        else:
            return target.name
    raise CheckpointError(f"{layout.QUARANTINE} has {_MOST} copies of {path.name}: remove some")


def put_aside_list(root: Path) -> list[tuple[str, str]]:
    """Return (name, reason) of all that is in the quarantine."""
    try:
        entries = sorted(os.scandir(root / layout.QUARANTINE), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    names = [entry.name for entry in entries if entry.is_dir()]
    quarantine = root / layout.QUARANTINE
    return [
        (name, text_in(quarantine, f"{name}{layout.REASON}", "reason") or UNKNOWN) for name in names
    ]


log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


def throw_away(root: Path, path: Path) -> None:
    """Remove a directory below ``root``; nothing if it is gone already. OSError if it stays."""
    with contextlib.ExitStack() as stack:
        try:
            trash = stack.enter_context(own_directory(root / layout.TRASH, make=True))
            target = trash / f"{path.name}.{secrets.token_hex(4)}"
            os.rename(path, target)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _FULL:
                raise
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, descriptor)
                os.unlink(layout.COMMIT, dir_fd=descriptor)
            target = path
        _delete(target, path.name)


def empty_trash(root: Path) -> None:
    """Delete all that is in the trash."""
    with contextlib.suppress(FileNotFoundError), own_directory(root / layout.TRASH) as trash:
        for name in os.listdir(trash):
            _delete(trash / name, name)


def _delete(path: Path, name: str) -> None:
    """Delete a directory, called ``name`` in a message; of a link only the link itself."""
    try:
        os.unlink(path)
    except OSError:  # it is a directory
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        # Such as a file that a reader on NFS still has open: the next one to empty it succeeds.
        log.warning("%s cannot be deleted now; it is no checkpoint any more", name)
