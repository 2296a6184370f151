"""The files of a checkpoint: what a name shows, and plain reading.

Nothing here blocks, follows a path out, or writes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO

from elaunch import files
from elaunch.errors import CheckpointError
from elaunch.proc import lacks_inodes

JSON_LIMIT = 64 * 2**20  # bytes; a safetensors index of the largest models has a few MiB
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


def open_regular(path: Path, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading; raise CheckpointError for a FIFO, device or directory."""
    try:
        return files.open_regular(path, flags)
    except files.NotRegularError:
        raise CheckpointError(f"not a regular file: {path.name}") from None


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"not a regular file: {path.name}")
    return status.st_size


def read_limited(path: Path, limit: int, flags: int = 0) -> bytes:
    """Return the content of a regular file; raise CheckpointError if it is larger than ``limit``.

    ``flags`` are more of those of ``os.open``.

    The size counts, not what is on the disk: a file of two hundred gigabytes may be one hole.
    """
    with open_regular(path, flags) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{path.name} is larger than {limit} bytes")
        return file.read()


def inside(directory: Path, relative: object, source: str) -> Path:
    """Return the path of a file that ``source`` names, if it is one below ``directory``."""
    if not isinstance(relative, str) or not relative or "\0" in relative:
        raise CheckpointError(f"{source} names a file by {shown(relative)}, which is no path")
    try:
        os.fsencode(relative)
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{source} names a file by {shown(relative)}, which is no path"
        ) from None
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"{source} names {shown(relative)}, which is outside the checkpoint")
    return directory / pure


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise CheckpointError if it holds anything else."""
    return parse_json(read_limited(path, JSON_LIMIT), path.name)


def text_in(place: Path | str, name: str, key: str) -> str:
    """Return the text at ``key`` of a document of a directory; "" where there is none to read.

    Nothing is asked of a URL.
    """
    try:
        found = None if isinstance(place, str) else read_json(place / name).get(key)
    except (OSError, CheckpointError):
        return ""
    return found if isinstance(found, str) else ""


def parse_json(content: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in ``content``, the bytes of the file called ``name``."""
    if not content.strip(b"\0 \t\r\n"):
        raise CheckpointError(f"{name} is empty")
    if len(content) > JSON_LIMIT:
        raise CheckpointError(f"{name} is larger than {JSON_LIMIT} bytes")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{name} holds no JSON object")
    return document


def whole_number(document: dict[str, Any], key: str, name: str) -> int:
    """Return the number under ``key``, of 0 to 63 bits, of a JSON object from the file ``name``."""
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise CheckpointError(f"{name}: {key} is {shown(value)}, not a whole number")
    return value


def shown(value: object) -> str:
    """Return what a file holds as Python writes it, cut to one line of a message."""
    return _SHORT.repr(value)


def refusal(error: OSError, place: Path | str) -> str:
    """Return the system's reason why nothing can be written below ``place``."""
    if error.errno == errno.ENOSPC and not isinstance(place, str) and lacks_inodes(place):
        return "No inodes left on device, so it takes no more files"
    return error.strerror or str(error)


def explain(error: OSError, path: Path) -> str:
    """Return the reason why the checkpoint at ``path`` could not be read."""
    name = error.filename if isinstance(error.filename, str) else str(error.filename or "")
    if name.startswith(f"{path}{os.sep}"):
        name = name[len(str(path)) + 1 :]
    elif name == str(path):
        name = path.name
    if isinstance(error, FileNotFoundError):
        if not os.path.lexists(path):
            return "it vanished while it was read"
        return f"missing: {name}"
    if isinstance(error, PermissionError):
        return f"permission denied: {name}"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{reason}: {name}" if name else reason


_STEP = re.compile(r"step[^0-9a-z]{0,3}([0-9]+)|steps[^0-9a-z]{0,3}([0-9]+)", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+")
_CHECKPOINT = re.compile(r"step|checkpoint|ckpt|\A[0-9]+\Z", re.IGNORECASE)


def is_temporary(name: str) -> bool:
    """Tell whether a name is one that writers use before they rename: hidden, tmp*, *.tmp*."""
    return name.startswith((".", "tmp")) or ".tmp" in name


def sounds_like_checkpoint(name: str) -> bool:
    """Tell whether people would take this for a checkpoint's name."""
    return _CHECKPOINT.search(name) is not None


def step_in_name(name: str, *, is_file: bool) -> int | None:
    """Return the step in a name: the last number behind "step", else the last number, else None.

    Numbers in a file's extension (``.pt2``) count only if there is no other.
    """
    steps = _STEP.findall(name)
    if steps:
        return int(steps[-1][0] or steps[-1][1])
    numbers = _NUMBER.findall(PurePath(name).stem) if is_file else []
    numbers = numbers or _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None
