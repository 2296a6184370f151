"""Between a node's saver (elaunch.agent.saver.saver) and the peers (elaunch.agent.peers.peers).

============================  ====================================================================
:class:`SaverPeers`           what the saver asks of its peers; each call blocks for at most its
                              ``timeout`` seconds, in a thread of the saver's
:class:`Received`             what peers ask of the saver, in threads of elaunch.agent.peers; no
                              call blocks for longer than memory takes to be made, but for
                              ``replica_room``
============================  ====================================================================

A shard is known by (step, round, rank), and by the stage's uuid where two saves could be meant. A
node is known by its node rank in the round that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from elaunch.wire.saver import Files, Handed

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Stage


class SaverPeers(Protocol):
    """The peers. A node that cannot be reached, or that refuses, is a SaveError that names it."""

    def send_sealed(
        self, node_rank: int, stage: Stage, rank: int, manifest: bytes, timeout: float
    ) -> None:
        """Send the agent of ``node_rank`` the manifest of ``rank``'s shard: it is on the disk."""

    def send_failed(
        self, node_rank: int, stage: Stage, rank: int, problem: str, timeout: float
    ) -> None:
        """Report to it that ``rank``'s shard of the stage will not come."""

    def send_writing(
        self, node_rank: int, stage: Stage, rank: int, world_size: int, timeout: float
    ) -> None:
        """Report to it that ``rank``'s shard of the stage is being written still."""

    def ask_held(self, node_rank: int, wanted: tuple[int, int, str], timeout: float) -> list[int]:
        """Return the ranks whose shards of (step, round, uuid) are in that node's memory."""

    def fetch_part(
        self,
        node_rank: int,
        part: tuple[int, int, int],
        into: Callable[[int], memoryview],
        timeout: float,
    ) -> tuple[str, Files] | None:
        """Copy a shard (step, round, rank) out of that node's memory; None if it is not there.

        ``into`` makes room for so many bytes. Returns the stage's uuid and where the files lie in
        that room.
        """

    def push_replica(
        self, node_rank: int, handed: Handed, memory: memoryview, timeout: float
    ) -> None:
        """Send a shard, the first ``handed.end`` bytes of ``memory``, to be kept for this node."""


class Received(Protocol):
    """The saver, as peers call it."""

    def on_sealed(self, stage: Stage, rank: int, manifest: bytes) -> None:
        """Note that another node's shard is on the disk."""

    def on_failed(self, stage: Stage, rank: int, problem: str) -> None:
        """Note that another node's shard will not come."""

    def on_writing(self, stage: Stage, rank: int, world_size: int) -> None:
        """Note that another node's shard is being written still."""

    def held(self, wanted: tuple[int, int, str]) -> list[int]:
        """Return the ranks whose shards of (step, round, uuid) are in this agent's memory."""

    def serve_part(
        self, step: int, round_number: int, rank: int
    ) -> tuple[Handed, memoryview] | None:
        """Return a shard that is in this agent's memory, its own or a replica; None if not.

        The memory may be overwritten while it is sent: ask again afterwards, and send a shard only
        as good if the answer is the same one.
        """

    def replica_room(self, handed: Handed) -> memoryview:
        """Return room for a replica of another node's shard; SaveError if there is none.

        From here on the replica of that rank that was kept before is gone. With a directory on each
        node that one is on its way to the disk, and is waited for, for a bounded time.
        """

    def replica_came(self, handed: Handed) -> None:
        """Take the replica, which is whole, its checksum right."""
