"""Between a node's saver (elaunch.agent.saver.saver) and the courier that reaches other nodes'.

============================  ====================================================================
:class:`SaverPeers`                what the saver asks of the courier; each call blocks for at most
                              its ``timeout`` seconds, in a thread of the saver's
:class:`Received`             what the courier hands to the saver, in threads of the courier's;
                              no call blocks for longer than memory takes to be made, but for
                              ``replica_room``
============================  ====================================================================

A part is known by (step, round, rank), and by the stage's uuid where two saves could be meant. A
node is known by its node rank in the round that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from elaunch.wire.saver import Files, Handed

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Stage


class SaverPeers(Protocol):
    """The courier. A node that cannot be reached, or that refuses, is a SaveError that names it."""

    def send_sealed(
        self, node_rank: int, stage: Stage, rank: int, manifest: bytes, timeout: float
    ) -> None:
        """Tell the agent of ``node_rank`` that ``rank``'s part is on the disk, with this seal."""

    def send_failed(
        self, node_rank: int, stage: Stage, rank: int, problem: str, timeout: float
    ) -> None:
        """Tell it that ``rank``'s part of the stage will not come."""

    def send_writing(
        self, node_rank: int, stage: Stage, rank: int, world_size: int, timeout: float
    ) -> None:
        """Tell it that ``rank``'s part of the stage is being written still."""

    def fetch_part(
        self,
        node_rank: int,
        part: tuple[int, int, int],
        into: Callable[[int], memoryview],
        timeout: float,
    ) -> tuple[str, Files] | None:
        """Copy a part (step, round, rank) out of that node's memory; None if it is not there.

        ``into`` makes room for so many bytes. Returns the stage's uuid and where the files lie in
        that room.
        """

    def push_replica(
        self, node_rank: int, handed: Handed, memory: memoryview, timeout: float
    ) -> None:
        """Send a part, the first ``handed.end`` bytes of ``memory``, to be kept for this node."""


class Received(Protocol):
    """The saver, as the courier calls it."""

    def on_sealed(self, stage: Stage, rank: int, manifest: bytes) -> None:
        """Another node's part is on the disk."""

    def on_failed(self, stage: Stage, rank: int, problem: str) -> None:
        """Another node's part will not come."""

    def on_writing(self, stage: Stage, rank: int, world_size: int) -> None:
        """Another node's part is being written still."""

    def serve_part(
        self, step: int, round_number: int, rank: int
    ) -> tuple[Handed, memoryview] | None:
        """Return a part that is in this agent's memory, its own or a replica; None if not.

        The memory may be overwritten while it is sent: ask again afterwards, and send a part only
        as good if the answer is the same one.
        """

    def replica_room(self, handed: Handed) -> memoryview:
        """Return room for a replica of another node's part; SaveError if there is none.

        From here on the replica of that rank that was kept before is gone. With a directory on each
        node that one is on its way to the disk, and is waited for, for a bounded time.
        """

    def replica_came(self, handed: Handed) -> None:
        """The replica is whole, and its checksum right."""
