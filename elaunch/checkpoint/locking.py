"""One job per checkpoint directory: ``flock`` on ``.lock``, which the kernel gives back at any end.

The file names its holder, for the error message, and so that agents of one job of several nodes
recognise each other: ``job`` is the incarnation id, "" where there is none, or no round yet::

    {"pid": 4711, "host": "a", "at": 1767225600.0, "job": ""}
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import socket
import time
from pathlib import Path

from elaunch.checkpoint.storage.files import read_json
from elaunch.errors import CheckpointError, SaveError

log = logging.getLogger(__name__)

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_UNKNOWN = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


_open: set[DirectoryLock] = set()


class DirectoryLock:
    """The lock, held until ``close`` or the process's end. SaveError if another job has it.

    Forked processes would keep it beyond that end: they close the descriptor that they inherit.
    """

    def __init__(self, path: Path, job: str = "") -> None:
        _close_in_forked()
        self._job: str | None = None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
            self.say_who(job)
        except OSError:
            self.close()
            raise

    def say_who(self, job: str) -> None:
        """Write into the file which process has the lock, for which job."""
        if self._descriptor < 0 or job == self._job:
            return
        self._job = job
        who = {"pid": os.getpid(), "host": socket.gethostname(), "at": time.time(), "job": job}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(who).encode() + b"\n", 0)
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


@functools.cache
def _close_in_forked() -> None:
    """Have processes that are forked from now on close what they inherit; done once."""
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for lock in tuple(_open):
        lock._drop()


class NoLock:
    """What stands for the lock on storage that has none."""

    def say_who(self, job: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


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
