"""The shards of checkpoints that are in this agent's memory, and those that it can fetch.

=============  =====================================================================================
kept as        what it is, and until when
=============  =====================================================================================
``worker k``   the shard that the worker with local rank k left; until that one's next save begins
``replica r``  rank r's shard, of the node before this one (``--checkpoint-replicas``); until the
               next one of that rank comes. With a directory on each node that waits until this one
               is on the disk (elaunch.agent.saver.replicas)
``fetched …``  a shard out of another node's memory, for loading; until a save begins here
=============  =====================================================================================
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from elaunch.agent.policy.turn import Round
from elaunch.agent.saver.memory import CheckpointMemory, Segment
from elaunch.agent.saver.round import SaverPlan
from elaunch.errors import SaveError
from elaunch.wire.saver import Files, Handed

Found = tuple[Files, Segment]
Wanted = tuple[int, int, str]  # step, round, uuid or ""

REPLICA: Final = "replica "

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class _Kept:
    stage: tuple[int, int, str]
    rank: int
    files: Files
    segment: Segment
    handed: Handed | None = None

    def is_of(self, wanted: Wanted, rank: int) -> bool:
        step, round_number, uuid = wanted
        named = self.stage[:2] == (step, round_number) and uuid in ("", self.stage[2])
        return named and rank == self.rank


class Shards:
    """Knows what lies in which segment; any thread may call."""

    def __init__(self, plan: SaverPlan, memory: CheckpointMemory) -> None:
        self._peers = plan.peers
        self._memory = memory
        self._lock = threading.Lock()
        self._fetching = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._round: Round | None = None
        self._before: Round | None = None

    def begin(self, round_: Round) -> None:
        """Note where the nodes of the new round are; what is kept stays until a save begins."""
        with self._lock:
            if self._round is not None and any(k.handed for k in self._kept.values()):
                self._before = self._round
            self._round = round_

    def keep(self, name: str, handed: Handed, segment: Segment) -> None:
        """Note that ``segment``, called ``name``, holds this shard."""
        stage = (handed.stage.step, handed.stage.round, handed.stage.uuid)
        kept = _Kept(stage, handed.part.rank, handed.images, segment, handed)
        with self._lock:
            self._kept[name] = kept

    def forget(self, name: str) -> None:
        """Note that the segment is about to be written to."""
        with self._lock:
            self._kept.pop(name, None)

    def forget_others(self, names: Collection[str]) -> None:
        """Free what earlier rounds left and what was fetched: a newer checkpoint is on its way.

        ``names`` are the segments of the workers that live; this round's replicas stay.
        """
        with self._lock:
            number = -1 if self._round is None else self._round.round
            copies = {n: k for n, k in self._kept.items() if n.startswith(REPLICA)}
            stays = {name for name, kept in copies.items() if kept.stage[1] == number}
            going = [name for name in self._kept if name not in stays and name not in names]
            for name in going:
                del self._kept[name]
        for name in going:
            self._memory.free(name)

    def replicas(self) -> list[tuple[Handed, Segment]]:
        """Return the shards that this agent keeps for others."""
        with self._lock:
            found = [k for n, k in self._kept.items() if n.startswith(REPLICA)]
        return [(kept.handed, kept.segment) for kept in found if kept.handed is not None]

    def serve(self, step: int, round_number: int, rank: int) -> tuple[Handed, memoryview] | None:
        """Return a shard that another node asks for; None if it is not here."""
        with self._lock:
            kept = self._local((step, round_number, ""), rank)
        if kept is None or kept.handed is None:
            return None
        return kept.handed, kept.segment.view

    def find(self, wanted: Wanted, ranks: Collection[int], timeout: float) -> dict[int, Found]:
        """Return those of the shards that are here, or that other nodes send within ``timeout``."""
        until = time.monotonic() + timeout
        found = {}
        for rank in ranks:
            with self._lock:
                kept = self._local(wanted, rank)
            if kept is None and self._peers is not None:
                kept = self._fetch(wanted, rank, until)
            if kept is not None:
                found[rank] = (kept.files, kept.segment)
        return found

    def _local(self, wanted: Wanted, rank: int) -> _Kept | None:
        return next((kept for kept in self._kept.values() if kept.is_of(wanted, rank)), None)

    def _fetch(self, wanted: Wanted, rank: int, until: float) -> _Kept | None:
        """Ask the nodes that may have it, one after the other; workers here share what comes."""
        with self._fetching:
            with self._lock:
                kept = self._local(wanted, rank)  # another worker may have waited for the same
            for node_rank in self._holders(rank):
                if kept is not None or time.monotonic() >= until:
                    break
                kept = self._fetch_from(node_rank, wanted, rank, until)
        return kept

    def _holders(self, rank: int) -> list[int]:
        """Return the nodes that may have the shard of ``rank``, the likeliest first."""
        now, before = self._round, self._before
        if now is None or now.plan is None:
            return []
        own = now.plan.node_rank(now.name)
        others = [node for node in range(len(now.plan.nodes)) if node != own]
        if before is None or before.plan is None:
            return others
        old = before.node_of(rank)
        nodes = before.plan.nodes
        names = [nodes[old].name, nodes[(old + 1) % len(nodes)].name]
        places = [now.plan.node_rank(name) for name in names]
        return [place for place in places if place is not None and place != own]

    def _fetch_from(self, node_rank: int, wanted: Wanted, rank: int, until: float) -> _Kept | None:
        assert self._peers is not None  # asked by find
        step, round_number, uuid = wanted
        name = f"fetched {step} {round_number} {rank}"

        def into(size: int) -> memoryview:
            return self._memory.lease(name, size).view

        left = max(0.1, until - time.monotonic())
        try:
            came = self._peers.fetch_part(node_rank, (step, round_number, rank), into, left)
        except (SaveError, OSError) as error:
            log.warning("rank %d's part is read from the disk: %s", rank, error)
            came = None
        segment = self._memory.find(name)
        if came is None or segment is None or uuid not in ("", came[0]):
            self._memory.free(name)
            return None
        kept = _Kept((step, round_number, came[0]), rank, came[1], segment)
        with self._lock:
            self._kept[name] = kept
        return kept
