"""Checkpoints that failed verification: out of the readers' way, kept with the reason.

::

    .quarantine/step-00000120.r3/              renamed, as it was; .2, .3, … if the name is taken
    .quarantine/step-00000120.r3.reason.json   {"schema": 1, "name": …, "reason": …, "at": …}
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.durable import sync_directory, write_document
from elaunch.checkpoint.storage.files import read_json
from elaunch.checkpoint.writing.manifests import dump
from elaunch.errors import CheckpointError

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
    return [(entry.name, _reason(Path(entry.path))) for entry in entries if entry.is_dir()]


def _reason(path: Path) -> str:
    try:
        reason = read_json(path.with_name(f"{path.name}{layout.REASON}")).get("reason")
    except (OSError, CheckpointError):
        return UNKNOWN
    return reason if isinstance(reason, str) else UNKNOWN
