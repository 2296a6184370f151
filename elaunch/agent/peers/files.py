"""Fetches a checkpoint's files from the agents that have them; each file from the first that can.

Every file is checked against the checksum that it was asked for by, and is on the disk when it is
returned. Where one agent dies, or sends what is not the file, the next that has it is asked.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elaunch.agent.peers.messages import PeerConnection, Undelivered
from elaunch.agent.peers.peers import Peer, Peers
from elaunch.checkpoint.storage.checksums import begin
from elaunch.checkpoint.writing.manifests import FileEntry
from elaunch.errors import CheckpointError

REACH_S: Final = 10.0
"""Seconds to reach an agent that has a file."""


@dataclass(frozen=True)
class Fetched:
    """A file to fetch, and which of the nodes have it."""

    entry: FileEntry
    places: tuple[int, ...]


class NodeSources:
    """The nodes that have the files of one checkpoint; owns the lines to them."""

    def __init__(
        self,
        courier: Peers,
        checkpoint: str,
        nodes: Sequence[Peer],
        progress: Callable[[int], object],
    ) -> None:
        self._courier = courier
        self._checkpoint = checkpoint
        self._nodes = nodes
        self._progress = progress
        self._lines: dict[int, PeerConnection] = {}
        self._gone: dict[int, str] = {}
        self._turn = secrets.randbelow(max(1, len(nodes)))
        """Where to begin: nodes that fetch at the same time ask different ones first."""

    def __enter__(self) -> NodeSources:
        """Return it; the end of the block hangs up."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up."""
        for line in self._lines.values():
            line.close()

    def fetch(self, wanted: Fetched, target: Path) -> None:
        """Write the file to ``target``, synced, from the first node that gives it whole.

        Raises CheckpointError that names each node that did not, and why; OSError for the disk.
        """
        places = sorted(wanted.places, key=lambda one: (one + self._turn) % len(self._nodes))
        problems = []
        for place in places:
            try:
                if place in self._gone:
                    raise Undelivered(self._gone[place], True)
                self._fetch(place, wanted.entry, target)
            except Undelivered as error:
                self._hang_up(place, error)
                self._progress(1)  # there may be another one to ask
                problems.append(str(error))
            else:
                return
        name = wanted.entry.path or self._checkpoint
        raise CheckpointError(f"{name} cannot be had: {'; '.join(problems) or 'no node has it'}")

    def _fetch(self, place: int, entry: FileEntry, target: Path) -> None:
        line = self._lines.get(place)
        if line is None:
            line = self._courier.call(self._nodes[place], time.monotonic() + REACH_S)
            self._lines[place] = line
        asked = {"do": "file", "checkpoint": self._checkpoint, "file": entry.path}
        size = int(line.ask(asked).get("size", -1))
        if size != entry.size:
            raise Undelivered(f"{line.who}: {entry.path} has {size:,} bytes now")
        total = begin(entry.checksum)
        with open(target, "wb") as file:

            def take(piece: memoryview) -> None:
                total.update(piece)
                file.write(piece)

            line.receive_to(take, size, self._progress)
            file.flush()
            os.fsync(file.fileno())
        if total.text() != entry.checksum:
            raise Undelivered(f"{line.who}: {entry.path} is another file now")

    def _hang_up(self, place: int, error: Undelivered) -> None:
        """After an error nobody knows what comes on the line; who is gone is not called again."""
        line = self._lines.pop(place, None)
        if line is not None:
            line.close()
        if error.gone:
            self._gone[place] = str(error)
