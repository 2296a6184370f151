"""Is a checkpoint directory fit for use: can it be written, has it room, do all nodes share it?

::

    CHECKPOINT_DIR/.probe/<nonce>     empty; written by a node's agent, there while the agent lives

A node that shares the directory with others leaves a file under a name that only it knows, before
it sends that name to the others. The node that chooses the checkpoint of a round looks for the
files of all. File systems that cache a directory for a while (NFS) are asked again, and each time
after a change of the asker's own, which makes them look.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from elaunch import text
from elaunch.checkpoint import layout
from elaunch.checkpoint.search.locations import broken_link
from elaunch.checkpoint.storage.durable import stir
from elaunch.checkpoint.storage.files import read_json, refusal, whole_number
from elaunch.errors import CheckpointError, UsageError
from elaunch.files import NotOwnError, own_directory

SEEN_S: Final = 10.0
"""Seconds until a file that another node has written must be seen."""
LOOK_AGAIN_S: Final = 0.2
STALE_S: Final = 365 * 86_400.0
"""Files of killed agents are removed after this time, by the file system's own clock."""
BLOCK: Final = 65_536
"""Bytes that are written to find out whether anything can be."""
AMPLE: Final = 1.2
OWN: Final = (layout.STAGE, layout.QUARANTINE, layout.PINS, layout.TRASH, layout.PROBE)


def check(place: Path, local: bool, frees: bool) -> str:
    """Make the directory if it is not there, and write in it; may block as the storage does.

    Returns a warning in one line, or "".

    Args:
        place: the checkpoint directory, absolute.
        local: whether it is this node's own, so that it has only this node's shards.
        frees: whether old checkpoints make room for new ones (``Keep``).

    Raises:
        UsageError: it cannot be made or written, or has less room than the newest checkpoint takes.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name in OWN:
            with contextlib.suppress(FileNotFoundError), own_directory(place / name):
                pass
        if os.path.islink(place / layout.LOCK):
            raise NotOwnError("it is a symbolic link", place / layout.LOCK)
        _write(place)
        needed, name = _newest_size(place, local)
        room = os.statvfs(place)
    except OSError as error:
        raise UsageError(_unfit(place, error)) from None
    free = room.f_bavail * room.f_frsize
    if free >= needed * AMPLE:
        return ""
    tight = (
        f"--checkpoint-dir {place}: {text.size(free)} are free on {_host()}, and the newest "
        f"checkpoint, {name}, takes {text.size(needed)}"
    )
    if free < needed and not frees:
        raise UsageError(f"{tight}; make room, or have old ones removed by --checkpoint-keep-last")
    return tight


def leave_mark(place: Path, nonce: str) -> None:
    """Write the file by which other nodes see that this one uses the same directory."""
    try:
        with own_directory(place / layout.PROBE, make=True) as directory:
            mark = directory / nonce
            mark.touch()
            _remove_stale(directory, mark.stat().st_mtime)
    except OSError as error:
        raise UsageError(_unfit(place, error)) from None


def remove_mark(place: Path, nonce: str) -> None:
    """Take the file back; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        with own_directory(place / layout.PROBE) as directory:
            (directory / nonce).unlink()
        (place / layout.PROBE).rmdir()  # by the last one


def unseen(place: Path, nonces: Collection[str], patience: float = SEEN_S) -> frozenset[str]:
    """Return which of these files are not there, after ``patience`` seconds of looking."""
    directory, missing = place / layout.PROBE, frozenset(nonces)
    until, never = time.monotonic() + patience, threading.Event()
    while missing:
        missing -= _names(directory)
        if not missing or time.monotonic() >= until:
            break
        never.wait(LOOK_AGAIN_S)
        stir(directory)
    return missing


# ── file work ────────────────────────────────────────────────────────────────────────────────────


def _write(place: Path) -> None:
    """Write and remove a file: rights, quotas, a read-only mount and a full disk show here."""
    path = place / f"{layout.PROBE}-{os.urandom(8).hex()}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(bytes(BLOCK))
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
        path.unlink()


def _newest_size(place: Path, local: bool) -> tuple[int, str]:
    """Return size and name of the newest checkpoint in elaunch's own layout; 0 without one."""
    steps = [(layout.parse_step_name(name), name) for name in os.listdir(place)]
    found = max(((step, name) for step, name in steps if step is not None), default=None)
    if found is None:
        return 0, ""
    name = found[1]
    if local:
        return _size_below(place / name), name
    try:
        return whole_number(read_json(place / name / layout.METADATA), "size", ""), name
    except (OSError, CheckpointError):
        return _size_below(place / name), name


def _size_below(directory: Path) -> int:
    """Return what the files take on the disk: one that is a hole takes nothing."""
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(root, name))
                total += min(status.st_size, status.st_blocks * 512)
    return total


def _names(directory: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(directory))
    except OSError:
        return frozenset()


def _remove_stale(directory: Path, now: float) -> None:
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            if (directory / name).lstat().st_mtime < now - STALE_S:
                (directory / name).unlink()


# ── text ─────────────────────────────────────────────────────────────────────────────────────────

_FIXES = {
    errno.EROFS: "it is mounted read-only; mount it read-write, or give another directory",
    errno.EACCES: "this user may not write there; give it the rights, or another directory",
    errno.EPERM: "this user may not write there; give it the rights, or another directory",
    errno.ENOSPC: "make room, or give another directory",
    errno.EDQUOT: "this user's quota is used up; make room, or give another directory",
    errno.ENOTDIR: "a part of the path is a file; give another directory",
    errno.EEXIST: "it is a file; give a directory",
    errno.ENAMETOOLONG: "give a shorter one",
}


def _unfit(place: Path, error: OSError) -> str:
    if broken := broken_link(place):
        return f"--checkpoint-dir {place} cannot be made on {_host()}: {broken}; mend the link"
    if isinstance(error, NotOwnError):
        return (
            f"--checkpoint-dir {place}: {error.filename} is not elaunch's: "
            f"{error.strerror}; remove it, or give another directory"
        )
    fix = _FIXES.get(error.errno or 0, "give a directory that can be written")
    why = refusal(error, place)
    return f"--checkpoint-dir {place} cannot be written on {_host()}: {why}: {fix}"


def _host() -> str:
    return os.uname().nodename
