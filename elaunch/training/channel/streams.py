"""Large objects between nodes: bytes of memory files, one after the other, on their own connection.

A stream goes one way. Bytes may go out again while more come in: so a ring of nodes hands
each object around, and every node sends and receives it once.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Iterable
from typing import Final

from elaunch.training.channel import blobs
from elaunch.training.channel.frames import Contribution
from elaunch.training.channel.link import End, keep_alive
from elaunch.training.channel.members import RankRecord

AT_ONCE: Final = 1 << 20
MOST_FILES: Final = 128
"""Memory files that one call makes for what comes from other nodes; several objects share one."""


class Region:
    """An object's place in a memory file, and how much of it is there; ``view`` to receive into."""

    def __init__(self, entry: Contribution, view: memoryview | None = None) -> None:
        self.fd, self.offset, self.size = entry.fd, entry.offset, entry.size
        self.view = view
        self.filled = 0 if view is not None else self.size


class RegionStream:
    """A connection that carries regions one way; ``end`` once the other side is gone."""

    def __init__(self, sock: socket.socket, peer: RankRecord) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            keep_alive(sock)
        self.peer = peer
        self.end: End | None = None
        self.regions: list[Region] = []
        self._sock = sock
        self._at = 0

    @property
    def done(self) -> bool:
        """Whether all regions are through."""
        return not self.regions

    def fileno(self) -> int:
        """Return the descriptor, -1 once it is closed."""
        return self._sock.fileno()

    def mask(self) -> int:
        """Return the events to poll for."""
        raise NotImplementedError

    def ready(self, events: int) -> None:
        """Do what the events allow."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the descriptor."""
        self._sock.close()

    def _lost(self, why: str) -> None:
        self.end = End("lost", f"{self.peer} {why}", (self.peer.rank,))


class Inflow(RegionStream):
    """Receives into its regions, in order."""

    def mask(self) -> int:
        """Return the events to poll for."""
        return select.POLLIN if self.regions and self.end is None else 0

    def ready(self, events: int) -> None:
        """Receive what is there."""
        region = self.regions[0]
        assert region.view is not None
        try:
            count = self._sock.recv_into(region.view[region.filled :])
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(f"is lost while it sends: {error.strerror}")
            return
        region.filled += count
        if not count:
            self._lost("has ended while it was sending")
        elif region.filled == region.size:
            self.regions.pop(0)


class Outflow(RegionStream):
    """Sends its regions, in order, as far as they are there."""

    def mask(self) -> int:
        """Return the events to poll for: none while there is nothing to send yet."""
        if not self.regions or self.end is not None:
            return 0
        return select.POLLOUT if self._at < self.regions[0].filled else 0

    def ready(self, events: int) -> None:
        """Send what the socket takes."""
        region = self.regions[0]
        count = min(region.filled - self._at, AT_ONCE)
        try:
            sent = os.sendfile(self.fileno(), region.fd, region.offset + self._at, count)
        except BlockingIOError:
            return
        except (ConnectionResetError, BrokenPipeError):
            self._lost("has ended while it was receiving")
            return
        except OSError as error:
            self._lost(f"is lost while it receives: {error.strerror}")
            return
        self._at += sent
        if self._at == region.size:
            self.regions.pop(0)
            self._at = 0


class Rooms:
    """Memory files for the blobs that come from other nodes; a context manager: mapped meanwhile.

    Entries are given their ``fd`` and ``offset``; the descriptors are the caller's to close. The
    files are not sealed: the kernel refuses that while it still sends from one. Nobody writes to
    them after this, as receivers map them privately.
    """

    def __init__(self, entries: Iterable[Contribution]) -> None:
        self.fds: list[int] = []
        self._views: list[memoryview] = []
        self._maps: list[mmap.mmap] = []
        self._entries = list(entries)

    def __enter__(self) -> dict[int, Region]:
        """Make the files; return the regions by rank."""
        together = -(-len(self._entries) // MOST_FILES) or 1
        regions = {}
        for start in range(0, len(self._entries), together):
            group = self._entries[start : start + together]
            starts = [0]
            for entry in group:
                starts.append(starts[-1] + -(-entry.size // blobs.PAGE) * blobs.PAGE)
            fd = blobs.room(starts[-1])
            self.fds.append(fd)
            self._maps.append(mmap.mmap(fd, starts[-1]))
            whole = memoryview(self._maps[-1])
            self._views.append(whole)
            for entry, offset in zip(group, starts, strict=False):
                entry.fd, entry.offset = fd, offset
                view = whole[offset : offset + entry.size]
                self._views.append(view)
                regions[entry.rank] = Region(entry, view)
        return regions

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is not None:
            return  # a view may still be in use; all goes with its last user
        for view in self._views:
            view.release()
        for memory in self._maps:
            memory.close()
