"""The choice of committed checkpoints that are kept, and the removal of the others.

The rule is a ``Keep`` (elaunch.checkpoint.records): a checkpoint stays if a part of the rule keeps
it. Whatever the rule, these stay: the newest, what is pinned (elaunch.checkpoint.shelves), what is
being read at this moment, and what the caller protects: the one that this round has resumed from,
until the next is committed, and the one just committed. Stages and the quarantine are neither
counted nor touched.

One process of a job removes (``Retiring``): the agent of the first node, or rank 0 where there is
no agent. A removal that fails is logged and never fails a save.

A reader holds a shared ``flock`` on the checkpoint's ``COMMIT`` (``reading``); it goes with the
process, however that ends. A process that deletes asks for the exclusive one and does not wait. On
a URL, and on file systems that have no locks, no reader is seen. NFS locks by byte ranges, where an
exclusive lock needs a file that is open for writing: a process that may not write there deletes
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from elaunch.checkpoint import layout, shelves
from elaunch.checkpoint.records import Committed, Keep, Location
from elaunch.checkpoint.storage.storage import ReadBefore, Storage
from elaunch.errors import CheckpointError

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # of a pipe, too, nobody waits for the other end

log = logging.getLogger("elaunch")


class Retiring:
    """Removes checkpoints of one storage; ``rule`` is for saves that bring none.

    One process of a job has one, and calls it for one save at a time; other calls wait. What it has
    read of the checkpoints once it knows at the next save, which so reads the newest one alone.
    """

    def __init__(self, storage: Storage, rule: Keep) -> None:
        self._storage = storage
        self._rule = rule
        self._lock = threading.Lock()
        self._known: ReadBefore = {}

    def apply(self, keep: Keep | None, protected: Collection[str]) -> list[str]:
        """Remove what may go and return the names; call it after a commit.

        Args:
            keep: the rule of that save; None: that of the flags.
            protected: names that stay beside those that are pinned; among them the one just
                committed, since a script that has gone back to an older step may commit below the
                newest.

        What cannot be listed or removed is logged, and stays.
        """
        with self._lock:
            return self._removed(self._rule if keep is None else keep, protected, math.inf)

    def follow(self, done: Committed, resumed: str = "") -> list[str]:
        """Do the same for a save that another process began, by the rule that it brings.

        ``resumed`` is the name of the checkpoint that was chosen to be resumed from, or "".
        """
        given = done.document.get("keep")
        try:
            rule = None if given is None else Keep(**given)
        except (TypeError, ValueError) as error:
            log.warning("%s names no rule of what may go (%s): nothing does", done.name, error)
            return []
        return self.apply(rule, {done.name, resumed})

    def make_room(self, keep: Keep | None, needed: int, protected: Collection[str]) -> list[str]:
        """Remove what may go once another one is committed, until there is room for it.

        Call it when a write has found the disk full: one goes at least, whatever room is free, for
        the bytes of a checkpoint are not all that it needs: blocks, inodes, its documents.

        Args:
            keep: as for :meth:`apply`; the coming checkpoint counts as one of the newest.
            needed: bytes of the coming checkpoint, about.
            protected: names that stay, as for :meth:`apply`.

        Returns the names of what was removed; the oldest go first. On a URL, whose room is not
        known, all that may go does.
        """
        try:
            self._storage.clear_trash()
        except OSError as error:
            place = self._storage.place
            log.warning("%s: cannot clear what was removed before: %s", place, error)
        rule = self._rule if keep is None else keep
        if rule and rule.last is not None:
            rule = replace(rule, last=max(1, rule.last - 1))
        with self._lock:
            return self._removed(rule, protected, needed)

    def _removed(self, rule: Keep, protected: Collection[str], needed: float) -> list[str]:
        """Remove what may go, one at least, until so many bytes are free; return the names."""
        removed = list[str]()
        for found, reason in self._going(rule, protected):
            if removed and _has_room(self._storage.place, needed):
                break
            with claimed(found.place) as free:
                if free and _remove(self._storage, found):
                    log.info("removed %s: %s", found.name, reason)
                    removed.append(found.name)
        return removed

    def _going(self, rule: Keep, protected: Collection[str]) -> list[tuple[Committed, str]]:
        """Return what may go, with the reasons; an empty rule looks at nothing."""
        if not rule:
            return []
        try:
            staying = {*protected, *shelves.pinned(self._storage.place)}
            listed = self._storage.listed(self._known)
        except (OSError, CheckpointError) as error:
            place = self._storage.place
            log.warning("%s: cannot tell which checkpoints may go: %s", place, error)
            return []
        names = {found.name for found in listed}
        self._known = {key: seen for key, seen in self._known.items() if seen[1].name in names}
        return decide(listed, rule, staying)


def decide(
    listed: Sequence[Committed], rule: Keep, protected: Collection[str]
) -> list[tuple[Committed, str]]:
    """Return what may go, from old to new, each with the reason as text. Pure.

    Args:
        listed: the committed checkpoints, in any order.
        rule: what is to be kept; an empty rule keeps everything.
        protected: names that stay whatever the rule is (pinned, resumed from, being read).
    """
    ordered = sorted(listed, key=lambda found: found.age)
    if not rule or not ordered:
        return []
    staying = {found.name for found in ordered[-max(rule.last or 1, 1) :]}
    if rule.every is not None:
        staying |= {found.name for found in ordered if found.step % rule.every == 0}
    best = best_of(ordered, rule)
    if best is not None:
        staying.add(best.name)
    staying |= set(protected)
    going = [found for found in ordered if found.name not in staying]
    return [(found, f"kept are {rule.describe()}") for found in going]


def best_of(listed: Sequence[Committed], rule: Keep) -> Committed | None:
    """Return the best by the rule's metric; of equals the newest; None if none has it.

    A value that is no number, NaN or infinite the bad way round is never the best.
    """
    if rule.best is None:
        return None
    sign = 1.0 if rule.mode == "max" else -1.0
    graded = []
    for found in listed:
        value = found.metrics.get(rule.best)
        if isinstance(value, int | float) and not math.isnan(value):
            graded.append((sign * value, found.age, found))
    graded = [grade for grade in graded if grade[0] != -math.inf]
    return max(graded, key=lambda grade: grade[:2])[2] if graded else None


def free_bytes(place: Path | str) -> float:
    """Return the room that is left for this user at a place, in bytes; inf where it is unknown."""
    if isinstance(place, str):
        return math.inf
    room = os.statvfs(place)
    return float(room.f_bavail * room.f_frsize)


def _remove(storage: Storage, found: Committed) -> bool:
    try:
        storage.remove(found)
    except (OSError, CheckpointError) as error:
        log.warning("%s cannot be removed: %s", found.name, error)
        return False
    return True


def _has_room(place: Path | str, needed: float) -> bool:
    if math.isinf(needed) or isinstance(place, str):
        return False
    try:
        return free_bytes(place) >= needed
    except OSError:
        return False


@contextlib.contextmanager
def reading(place: Location) -> Iterator[None]:
    """Keep the checkpoint at ``place`` from being deleted while the block lasts.

    Raises OSError if it is gone.
    """
    if isinstance(place, str):
        yield
        return
    descriptor = os.open(place / layout.COMMIT, _READ)
    try:
        locked = _lock(descriptor, fcntl.LOCK_SH)
        # A deleter has renamed it by then; it may have gone before it was locked.
        if not locked or not os.path.lexists(place / layout.COMMIT):
            raise FileNotFoundError(errno.ENOENT, "it is being deleted", str(place))
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(place: Location) -> Iterator[bool]:
    """Tell whether no process reads the checkpoint at ``place``; then none begins in the block."""
    if isinstance(place, str):
        yield True
        return
    try:
        descriptor = _open_to_claim(place / layout.COMMIT)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _open_to_claim(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    return os.open(path, _READ)


def _lock(descriptor: int, kind: int) -> bool:
    """Take a lock without waiting; False if others have it. No locks at all count as taken."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.EBADF  # there are locks, for processes that may write
    return True
