"""Whose directory it is: ``run.json`` names the run, ``.lock`` the job that works there.

=================  ==========================================================================
``run.json`` has   a run comes
=================  ==========================================================================
nothing            it has the directory from now on
its own id         fine; ``given`` is put right
another id         refused if a user chose both ids; otherwise: a chosen id stays, or takes
                   the directory over; of two that were made up the later one has it
=================  ==========================================================================

``created`` stays through all that: it tells the directory from another one at the same path.

``.lock`` is locked by ``flock``, which the kernel gives back at any end. The file names its holder,
for the error message, and so that agents of one job of several nodes recognise each other: ``jobs``
are the incarnation ids of all plans that the holder has read, none before the first. A job gets
another id with each store that is begun anew::

    {"pid": 4711, "host": "a", "at": 1767225600.0, "jobs": []}
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import dump, schema_checked
from elaunch.checkpoint.records import Location
from elaunch.checkpoint.storage.durable import read_patiently, sync_directory, write_document
from elaunch.checkpoint.storage.files import read_json, shown
from elaunch.errors import CheckpointError, SaveError
from elaunch.files import NotOwnError

log = logging.getLogger(__name__)

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


_open: set[DirectoryLock] = set()


class DirectoryLock:
    """The lock, held until ``close`` or the process's end. SaveError if another job has it.

    Forked processes would keep it beyond that end: they close the descriptor that they inherit.
    """

    def __init__(self, path: Path, jobs: Collection[str] = ()) -> None:
        _close_in_forked()
        self._jobs: set[str] | None = None
        self._descriptor = _open_lock(path)
        _open.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNKNOWN:
                log.warning("%s cannot be locked (%s): start one job per directory", path, error)
                return
            self._drop()
            if error.errno in _TAKEN:
                raise SaveError(_holder(path)) from None
            error.filename = str(path)
            raise
        try:
            self.write_holder(jobs)
        except OSError:
            self.close()
            raise

    def write_holder(self, jobs: Collection[str]) -> None:
        """Write into the file which process has the lock, and the ids of its job."""
        if self._descriptor < 0 or set(jobs) == self._jobs:
            return
        self._jobs = set(jobs)
        who = {"pid": os.getpid(), "host": socket.gethostname(), "at": time.time()}
        content = json.dumps({**who, "jobs": sorted(jobs)}).encode() + b"\n"
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))  # readers never find an empty file
        os.fsync(self._descriptor)  # NFS would show it to other machines at the end only

    def _drop(self) -> None:
        _open.discard(self)
        os.close(self._descriptor)
        self._descriptor = -1

    def close(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._drop()


def _open_lock(path: Path) -> int:
    """Open the lock's file; NotOwnError if something else is there, which would be overwritten."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise NotOwnError("it is a symbolic link", path) from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise NotOwnError("it is no regular file, or another name of one", path)


@functools.cache
def _close_in_forked() -> None:
    """Have processes that are forked from now on close what they inherit; done once."""
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for lock in tuple(_open):
        lock._drop()


class NoLock:
    """A lock that does nothing, for storage that has none."""

    def write_holder(self, jobs: Collection[str]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def holding_jobs(root: Path) -> frozenset[str]:
    """Return the incarnation ids in the lock's file; none if it names none, or cannot be read."""
    try:
        jobs = read_json(root / layout.LOCK).get("jobs")
    except (OSError, CheckpointError):
        return frozenset()
    return frozenset(map(str, jobs)) if isinstance(jobs, list) else frozenset()


def _holder(path: Path) -> str:
    try:
        document = read_json(path)
        who = f"process {document.get('pid')} on {document.get('host')}"
    except (OSError, CheckpointError):
        who = "another process"
    return (
        f"{path.parent} is in use by another job ({who}): two jobs in one checkpoint directory"
        " would take each other's checkpoints. End that one, or give this one another directory"
    )


NOT_THE_ONE: Final = "is not the directory that this job began with"
"""The text about a directory that went away, and with it the checkpoints in it."""

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class Origin:
    """Which directory it was that a job began with at a path: that of the first look.

    While the job runs it may be unmounted, removed or replaced. Making it anew would fill another
    disk, with checkpoints that nobody finds after a remount.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._created: Any = None

    @property
    def known(self) -> bool:
        """Whether it was there at an earlier look."""
        return self._created is not None

    def lost(self, patience: float = 0.0) -> str:
        """Return why nothing may be saved at the path, "" if the directory is what it was.

        ``patience``: seconds that what another machine has made may be hidden here. OSError if it
        cannot be looked at.
        """
        try:
            found = read_patiently(self._read, 0.0 if self.known else patience)
        except CheckpointError as error:
            return self._refusal(str(error))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return self._refusal(f"{layout.RUN} is gone; was it unmounted or removed?")
        if self.known and found.get("created") != self._created:
            return self._refusal(f"{layout.RUN} is that of another one; was it replaced?")
        self._created = found.get("created")
        return ""

    def _read(self) -> dict[str, Any]:
        return schema_checked(read_json(self._root / layout.RUN), layout.RUN)

    def _refusal(self, reason: str) -> str:
        return f"{self._root} {NOT_THE_ONE} ({reason}): nothing is saved there"


def claim_directory(root: Path, run_id: str, given: bool) -> None:
    """Make the directory and its ``run.json``; SaveError if it is another run's."""
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync_directory(root.parent)
    path = root / layout.RUN
    document = claim(root, lambda: read_json(path), run_id, given)
    if document is not None:
        write_document(path, document)
        sync_directory(root)


def claim(
    place: Location, read: Callable[[], dict[str, Any]], run_id: str, given: bool
) -> bytes | None:
    """Return the ``run.json`` to write, None if the one that ``read`` returns may stay.

    SaveError if it is another run's, or cannot be read.
    """
    try:
        found = schema_checked(read(), layout.RUN)
    except FileNotFoundError:
        found = None
    except CheckpointError as error:
        raise SaveError(
            f"{place}/{layout.RUN} does not say whose directory it is: {error}. If no other job"
            " uses it, remove that file"
        ) from None
    document = _decide(place, found, run_id, given)
    return None if document is None else dump(document)


def _decide(
    place: Location, found: dict[str, Any] | None, run_id: str, given: bool
) -> dict[str, Any] | None:
    found = found or {}
    own, theirs = found.get("run_id") == run_id, bool(found.get("given"))
    if given and theirs and not own:
        owner = shown(found.get("run_id"))
        raise SaveError(
            f"{place} belongs to run {owner}, this is run {run_id!r}: give this run a directory of"
            f" its own, or start it with --run-id {found.get('run_id')} to go on where that one"
            " ended"
        )
    if theirs or (own and not given):
        return None
    created = found.get("created", time.time())
    return {"schema": layout.SCHEMA, "run_id": run_id, "given": given, "created": created}
