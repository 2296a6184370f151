"""The shards of checkpoints that are in this agent's memory, and those that it can fetch.

=============  =====================================================================================
kept as        what it is, and until when
=============  =====================================================================================
``worker k``   the shard that the worker with local rank k left; until that one's next save is
               copied there, which all ranks have begun: no shard of the one before is needed then
``replica r``  rank r's shard, of the node before this one (``--checkpoint-replicas``); until the
               next one of that rank comes. With a directory on each node that waits until this one
               is on the disk (elaunch.agent.saver.replicas)
``fetched …``  a shard out of another node's memory, for loading; until a save is copied here
``resumed …``  what was ``worker k``: the round resumes from it, and k's memory has to be larger
=============  =====================================================================================

Every rank leaves its shard of a save with its own agent. So an agent that was in the round of a
save and has nothing of it asks no other: at a job's first load no agent asks another. An agent that
was not in that round asks each node which shards it has, once for all its workers, the likeliest
first; it then fetches them, several at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

from elaunch.agent.context import SaverSetup
from elaunch.agent.policy.turn import Round
from elaunch.agent.saver.memory import CheckpointMemory, Segment
from elaunch.atonce import at_once
from elaunch.checkpoint.records import Stage
from elaunch.errors import SaveError
from elaunch.wire.worker import Files, StagedShard

FilesInMemory = tuple[Files, Segment]
Wanted = tuple[int, int, str]  # step, round, uuid or ""

REPLICA: Final = "replica "
FETCHED_AT_ONCE: Final = 4

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class _Kept:
    """A shard in a segment; one that was ``fetched`` is for loading here, and for nothing else."""

    shard: StagedShard
    segment: Segment
    fetched: bool = False

    @property
    def rank(self) -> int:
        return self.shard.header.rank

    def is_of(self, wanted: Wanted) -> bool:
        stage = self.shard.stage
        return (stage.step, stage.round) == wanted[:2] and wanted[2] in ("", stage.uuid)


_Answers = dict[tuple[int, Wanted], list[int]]
"""The answers of a round's nodes: node rank and checkpoint → ranks."""


class Shards:
    """The shards in each segment of memory; any thread may call.

    ``lived`` has the numbers of the rounds that this agent has been in, the one that runs included.
    """

    def __init__(self, setup: SaverSetup, memory: CheckpointMemory, lived: Collection[int]) -> None:
        self._peers = setup.peers
        self._memory = memory
        self._lived = lived
        self._lock = threading.Condition()
        self._asking = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._coming: set[tuple[Wanted, int]] = set()
        self._answers: _Answers = {}
        self._round: Round | None = None
        self._rounds: dict[int, Round] = {}
        """The round that runs, and those of which something is kept."""

    def begin(self, round_: Round) -> None:
        """Note where the nodes of the new round are; what is kept stays until a save is copied."""
        with self._lock:
            saved = {one.shard.stage.round for one in self._kept.values() if not one.fetched}
            self._rounds = {n: known for n, known in self._rounds.items() if n in saved}
            self._rounds[round_.round] = self._round = round_
            self._answers = {}

    def keep(self, name: str, shard: StagedShard, segment: Segment) -> None:
        """Note that ``segment``, called ``name``, holds this shard."""
        kept = _Kept(shard, segment)
        with self._lock:
            self._kept[name] = kept

    def in_segment(self, name: str) -> StagedShard | None:
        """Return the shard that is in the segment ``name``; None without one."""
        with self._lock:
            kept = self._kept.get(name)
        return None if kept is None else kept.shard

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
            stays = {name for name, kept in copies.items() if kept.shard.stage.round == number}
            going = [name for name in self._kept if name not in stays and name not in names]
            for name in going:
                del self._kept[name]
        for name in going:
            self._memory.free(name)

    def keep_aside(self, name: str) -> None:
        """Give the segment ``name``, with the shard in it, another name."""
        with self._lock:
            kept = self._kept.pop(name)
            aside = f"resumed {kept.rank}"
            self._memory.rename(name, aside)
            self._kept[aside] = kept

    def staged(self, uuid: str = "") -> list[StagedShard]:
        """Return the shards that were staged here, or came as replicas.

        ``uuid``: only those of that save.
        """
        with self._lock:
            staged = [one.shard for one in self._kept.values() if not one.fetched]
        return [shard for shard in staged if uuid in ("", shard.stage.uuid)]

    def has_all(self, stage: Stage) -> bool:
        """Whether every shard of a save is here."""
        shards = self.staged(stage.uuid)
        return bool(shards) and len({s.header.rank for s in shards}) == shards[0].header.world_size

    def replicas(self) -> list[tuple[StagedShard, Segment]]:
        """Return the shards that this agent keeps for others."""
        with self._lock:
            found = [k for n, k in self._kept.items() if n.startswith(REPLICA)]
        return [(kept.shard, kept.segment) for kept in found]

    def serve(
        self, step: int, round_number: int, rank: int
    ) -> tuple[StagedShard, memoryview] | None:
        """Return a shard that another node asks for; None if it is not here."""
        with self._lock:
            kept = self._local((step, round_number, ""), rank)
        if kept is None or kept.fetched:
            return None
        return kept.shard, kept.segment.view

    def held(self, wanted: Wanted) -> list[int]:
        """Return the ranks whose shards another node can have from here."""
        with self._lock:
            return sorted(
                {k.rank for k in self._kept.values() if not k.fetched and k.is_of(wanted)}
            )

    def find(
        self, wanted: Wanted, ranks: Collection[int], timeout: float
    ) -> dict[int, FilesInMemory]:
        """Return those of the shards that are here, or that other nodes send within ``timeout``."""
        until = time.monotonic() + timeout
        with self._lock:
            found = {rank: self._local(wanted, rank) for rank in ranks}
            fetches = {
                rank: partial(self._fetch, wanted, rank, until, nodes, self._answers)
                for rank, kept in found.items()
                if kept is None and (nodes := self._holders(wanted, rank))
            }
        came = at_once(list(fetches.values()), FETCHED_AT_ONCE, "fetch")
        found.update(zip(fetches, came, strict=True))
        return {rank: (kept.shard.images, kept.segment) for rank, kept in found.items() if kept}

    def _local(self, wanted: Wanted, rank: int) -> _Kept | None:
        of_rank = (kept for kept in self._kept.values() if kept.rank == rank)
        return next((kept for kept in of_rank if kept.is_of(wanted)), None)

    def _fetch(
        self, wanted: Wanted, rank: int, until: float, nodes: list[int], answers: _Answers
    ) -> _Kept | None:
        """Ask the nodes that may have it, one after the other; workers here share what comes."""
        coming = wanted, rank
        with self._lock:
            self._lock.wait_for(lambda: coming not in self._coming, until - time.monotonic())
            kept = self._local(wanted, rank)  # another worker may have waited for the same
            if kept is not None or coming in self._coming:
                return kept
            self._coming.add(coming)
        try:
            for node_rank in nodes:
                if rank in self._held_by(node_rank, wanted, rank, until, answers):
                    kept = self._fetch_from(node_rank, wanted, rank, until)
                if kept is not None or time.monotonic() >= until:
                    break
        finally:
            with self._lock:
                self._coming.discard(coming)
                self._lock.notify_all()
        return kept

    def _holders(self, wanted: Wanted, rank: int) -> list[int]:
        """Return the nodes that may have the shard of ``rank``, the likeliest first."""
        now, number = self._round, wanted[1]
        if self._peers is None or now is None or now.plan is None:
            return []
        nodes = now.plan.nodes
        has_some = any(not one.fetched and one.is_of(wanted) for one in self._kept.values())
        then = self._rounds.get(number) if has_some else None
        if then is not None and then.plan is not None:
            before, old = then.plan.nodes, then.node_of(rank)
            names = [before[old].name, before[(old + 1) % len(before)].name]
            ranks = [now.plan.node_rank(name) for name in names]
        elif number in self._lived or number > now.round:
            return []
        else:
            first = now.node_of(rank)
            ranks = [(first + more) % len(nodes) for more in range(len(nodes))]
        own = now.plan.node_rank(now.name)
        return [one for one in ranks if one is not None and one != own]

    def _held_by(
        self, node_rank: int, wanted: Wanted, rank: int, until: float, answers: _Answers
    ) -> list[int]:
        """Return the ranks whose shards a node has; it is asked once, for all workers here."""
        assert self._peers is not None  # _holders has returned it
        key = node_rank, wanted
        if not self._asking.acquire(timeout=max(0.0, until - time.monotonic())):
            return []
        try:
            if key not in answers:
                answers[key] = []
                left = max(0.1, until - time.monotonic())
                answers[key] = self._peers.ask_held(node_rank, wanted, left)
        except (SaveError, OSError) as error:
            log.warning("rank %d's shard is read from the disk: %s", rank, error)
        finally:
            self._asking.release()
        return answers[key]

    def _fetch_from(self, node_rank: int, wanted: Wanted, rank: int, until: float) -> _Kept | None:
        assert self._peers is not None  # _holders has returned it
        step, round_number, uuid = wanted
        name = f"fetched {step} {round_number} {uuid} {rank}"

        def into(size: int) -> memoryview:
            return self._memory.lease(name, size).view

        left = max(0.1, until - time.monotonic())
        try:
            came = self._peers.fetch_shard(node_rank, (step, round_number, rank), into, left)
        except (SaveError, OSError) as error:
            log.warning("rank %d's shard is read from the disk: %s", rank, error)
            came = None
        segment = self._memory.find(name)
        if came is None or segment is None or uuid not in ("", came.stage.uuid):
            self._memory.free(name)
            return None
        kept = _Kept(came, segment, fetched=True)
        with self._lock:
            self._kept[name] = kept
        return kept
