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


def pinned(place: Location) -> frozenset[str]:
    """Return the names that are pinned at a directory or URL; OSError if they cannot be read."""
    if isinstance(place, str):
        names = Objects(place).names(layout.PINS)
    else:
        try:
            names = os.listdir(place / layout.PINS)
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
    directory = place / layout.PINS
    directory.mkdir(exist_ok=True)
    (directory / name).touch()
    for changed in (directory, place):
        sync_directory(changed)


def unpin(place: Location, name: str) -> None:
    """Let retention decide about ``name`` again; a second time does nothing."""
    _check(name)
    if isinstance(place, str):
        Objects(place).delete(f"{layout.PINS}/{name}")
        return
    with contextlib.suppress(FileNotFoundError):
        (place / layout.PINS / name).unlink()
        sync_directory(place / layout.PINS)


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
    quarantine = root / layout.QUARANTINE
    quarantine.mkdir(exist_ok=True)
    target = _move(path, quarantine)
    if target is None:
        return None
    write_document(quarantine / f"{target.name}{layout.REASON}", _document(path, reason))
    sync_directory(quarantine)
    sync_directory(root)
    return target


def put_all_aside(root: Path, damaged: Iterable[tuple[Path, str]]) -> list[Path]:
    """Move checkpoints (path, reason) into the quarantine; return those that were there.

    The directories are fsynced once, after the last: a power cut may undo some, or lose a reason.
    """
    quarantine = root / layout.QUARANTINE
    quarantine.mkdir(exist_ok=True)
    moved = []
    try:
        for path, reason in damaged:
            target = _move(path, quarantine)
            if target is not None:
                moved.append(path)
                reasons = quarantine / f"{target.name}{layout.REASON}"
                reasons.write_bytes(_document(path, reason))
    finally:
        sync_directory(quarantine)
        sync_directory(root)
    return moved


def _document(path: Path, reason: str) -> bytes:
    return dump({"schema": layout.SCHEMA, "name": path.name, "reason": reason, "at": time.time()})


def _move(path: Path, quarantine: Path) -> Path | None:
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
            return target
    raise CheckpointError(f"{quarantine} has {_MOST} copies of {path.name}: remove some")


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
    trash = root / layout.TRASH
    target = trash / f"{path.name}.{secrets.token_hex(4)}"
    try:
        trash.mkdir(exist_ok=True)
        os.rename(path, target)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / layout.COMMIT)
        target = path
    _delete(target)


def empty_trash(root: Path) -> None:
    """Delete all that is in the trash."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root / layout.TRASH):
            _delete(Path(entry.path))


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        # Such as a file that a reader on NFS still has open: the next one to empty it succeeds.
        log.warning("%s cannot be deleted now; it is no checkpoint any more", path)
