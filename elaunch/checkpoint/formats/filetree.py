"""Can all files below a directory be read, and are those of known formats whole?

=======================  =====================================================================
file                     must be
=======================  =====================================================================
begins as a zip archive  whole, as what ``torch.save`` writes
``.safetensors``         whole
``.json``                valid JSON
``.pt``, ``.pth``, …     a zip archive, or a bare pickle, which cannot be checked
any other                readable at both ends
=======================  =====================================================================

A directory below with ``.metadata`` or ``.distcp`` files must be a whole DCP directory. Hidden and
temporary names are passed by.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from elaunch.checkpoint.formats import dcp
from elaunch.checkpoint.formats.archives import check_safetensors, check_zip
from elaunch.checkpoint.storage.files import (
    JSON_LIMIT,
    explain,
    is_temporary,
    open_regular,
    read_limited,
)
from elaunch.errors import CheckpointError

FORMAT = "directory"
TORCH: Final = (".pt", ".pth", ".ckpt")
STEADY_S: Final = 1.0
"""Seconds for which nothing in a directory of an unknown format may change."""
OLD_S: Final = 60.0
"""A directory whose files are all older is not watched; a clock that is wrong costs the watch."""
_ZIP, _PICKLE = b"PK\3\4", b"\x80"


def verify(path: Path) -> None:
    """Raise CheckpointError unless a directory that a pattern picks is whole and does not change.

    Takes STEADY_S where a file in it is young.
    """
    before = _picture(path)
    if not before:
        raise CheckpointError("it is empty")
    check(path, TORCH)
    if max(changed for _, changed in before.values()) > (time.time() - OLD_S) * 1e9:
        time.sleep(STEADY_S)
    after = _picture(path)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise CheckpointError(f"it is still being written: {name} has just changed")


def check(path: Path, torch: tuple[str, ...]) -> None:
    """Raise CheckpointError by the table above; ``torch``: suffixes of files by ``torch.save``."""
    for directory, names, files in _walk(path):
        below = os.path.relpath(directory, path)
        if dcp.looks_like(names):
            dcp.verify_below(path, below)
        for name in files:
            if dcp.looks_like([name]):
                continue
            try:
                _check_file(Path(directory, name), torch)
            except CheckpointError as error:
                raise CheckpointError(_below(below, str(error))) from None
            except FileNotFoundError as error:
                raise CheckpointError(explain(error, path)) from None


def _check_file(file: Path, torch: tuple[str, ...]) -> None:
    if file.suffix == ".safetensors":
        check_safetensors(file)
        return
    if file.suffix == ".json":
        _check_json(file)
        return
    with open_regular(file) as opened:
        start = opened.read(len(_ZIP))
        if start:
            opened.seek(-1, os.SEEK_END)
            opened.read(1)
    if start == _ZIP or (file.suffix in torch and not start.startswith(_PICKLE)):
        check_zip(file)


def _check_json(file: Path) -> None:
    """Raise CheckpointError unless the file is JSON; a list or a number will do."""
    try:
        json.loads(read_limited(file, JSON_LIMIT))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} is not valid JSON: {error}") from None


def _below(directory: str, problem: str) -> str:
    """Return a problem with the directory, below the one that is checked, of its file."""
    return problem if directory == os.curdir else f"{directory}{os.sep}: {problem}"


def _picture(path: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of each file."""
    found = {}
    for directory, _, files in _walk(path):
        for name in files:
            status = os.lstat(os.path.join(directory, name))
            where = os.path.relpath(os.path.join(directory, name), path)
            found[where] = (status.st_size, status.st_mtime_ns)
    return found


def _walk(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each directory, all names in it, and the files that count; raises OSError."""

    def refuse(error: OSError) -> None:
        raise error

    for directory, below, names in os.walk(path, onerror=refuse):
        files = [name for name in sorted(names) if not is_temporary(name) or name == dcp.METADATA]
        yield directory, [*below, *names], files
        below[:] = sorted(name for name in below if not is_temporary(name))
