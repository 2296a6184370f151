"""The memory in which workers leave their shards of checkpoints: the agent's, so it outlives them.

A segment is a memfd. The worker maps it; after its end, however that came, the agent's descriptor
keeps it. It has the size that the worker asked for. All its pages are touched when it is made, so
that the first copy into it costs no page fault. The kernel counts it as shared memory of the
agent's cgroup.

All segments together, replicas of other nodes' shards included, stay within
``--checkpoint-memory``; without the flag within half of what was available when the first was made.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from typing import Final

from elaunch import text
from elaunch.errors import SaveError, UsageError
from elaunch.proc import available

SLICE: Final = 256 << 20
"""Bytes that are touched in one call."""
PAGE: Final = mmap.PAGESIZE
SPARE: Final = 16
"""A segment is made larger by a sixteenth: the next checkpoint may be a little larger."""


log = logging.getLogger("elaunch")


def check_limit(limit: int) -> None:
    """Raise UsageError for a ``--checkpoint-memory`` that this node does not have."""
    try:
        there = available()
    except OSError as error:
        log.debug("--checkpoint-memory is not checked: %s", error)
        return
    if limit > there:
        raise UsageError(
            f"--checkpoint-memory {text.size(limit)}: this node has {text.size(there)} available; "
            "give less"
        )


class Segment:
    """Some bytes of memory with a descriptor; ``users`` are the threads that read it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.users = 0
        self.fd = os.memfd_create("elaunch-checkpoint", os.MFD_CLOEXEC)
        try:
            for at in range(0, size, SLICE):
                os.posix_fallocate(self.fd, at, min(SLICE, size - at))
            self._mapping = mmap.mmap(self.fd, size)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise SaveError(f"no memory for a checkpoint of {text.size(size)}: {error}") from error

    @property
    def view(self) -> memoryview:
        """The bytes themselves."""
        return memoryview(self._mapping)

    def close(self) -> None:
        """Close the descriptor; the memory is free when nothing reads or maps it any more."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class CheckpointMemory:
    """Owns the segments of an agent; any thread may call."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._given = limit is not None
        self._lock = threading.Condition()
        self._making: dict[str, int] = {}
        """Segments that are being made, which takes a while, and their sizes."""
        self._segments: dict[str, Segment] = {}
        self._retired: list[Segment] = []
        self._closed = False

    @property
    def taken(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return self._taken()

    def lease(self, name: str, size: int) -> Segment:
        """Return the segment ``name`` if it has ``size`` bytes and nobody reads it, else a new one.

        Its pages are touched without the lock: several are made at the same time. Raises SaveError
        that says what is taken, what the bound is, and how to raise it.
        """
        with self._lock:
            self._lock.wait_for(lambda: name not in self._making)
            old = self._segments.get(name)
            if old is not None and old.size >= size and not old.users:
                return old
            self._check(size, 0 if old is None or old.users else old.size)
            if old is not None:
                self._retire(name)
            roomy = _whole_pages(size + size // SPARE)
            fits = self._taken() + roomy <= self._bound()
            self._making[name] = roomy if fits else _whole_pages(size)
        return self._make(name)

    def _make(self, name: str) -> Segment:
        made = None
        try:
            made = Segment(self._making[name])
        finally:
            with self._lock:
                del self._making[name]
                if made is not None:
                    self._segments[name] = made
                if made is not None and self._closed:
                    self._retire(name)
                self._lock.notify_all()
        return made

    def find(self, name: str) -> Segment | None:
        """Return the segment ``name``, if it is there."""
        with self._lock:
            return self._segments.get(name)

    def rename(self, name: str, other: str) -> None:
        """Give a segment another name, so that ``name`` is leased anew."""
        with self._lock:
            self._segments[other] = self._segments.pop(name)

    def free(self, name: str) -> None:
        """Give the segment ``name`` back, as soon as no thread reads it."""
        with self._lock:
            if name in self._segments:
                self._retire(name)

    def hold(self, segment: Segment) -> None:
        """Keep a segment from being lent anew until :meth:`release`."""
        with self._lock:
            segment.users += 1

    def release(self, segment: Segment) -> None:
        """Note that one thread has stopped reading."""
        with self._lock:
            segment.users -= 1
            if not segment.users and segment in self._retired:
                self._retired.remove(segment)
                segment.close()

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._closed = True
            for name in list(self._segments):
                self._retire(name)

    def _retire(self, name: str) -> None:
        segment = self._segments.pop(name)
        if segment.users:
            self._retired.append(segment)
        else:
            segment.close()

    def _taken(self) -> int:
        there = sum(segment.size for segment in (*self._segments.values(), *self._retired))
        return there + sum(self._making.values())

    def _bound(self) -> int:
        if self._limit is None:
            self._limit = available() // 2
        return self._limit

    def _check(self, size: int, freed: int) -> None:
        taken, bound = self._taken() - freed, self._bound()
        if taken + _whole_pages(size) <= bound:
            return
        of = "--checkpoint-memory" if self._given else "half of what was available"
        raise SaveError(
            f"no memory for a part of {text.size(size)}: this node's other parts take "
            f"{text.size(taken)} of {text.size(bound)} ({of}); raise --checkpoint-memory, "
            "or save with block=True"
        )


def _whole_pages(size: int) -> int:
    return max(1, -(-size // PAGE)) * PAGE
