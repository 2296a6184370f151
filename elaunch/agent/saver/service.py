"""The saver's service: made when a run's first worker asks for it (elaunch.agent.saver.saver).

=================  ===============================================================================
object             what it owns
=================  ===============================================================================
ServedWorker       one for each worker, whose requests it answers
CheckpointMemory   the memfds, within --checkpoint-memory
Shards             what lies in them, and what other nodes have
SaveQueue          the saves in flight, and the threads that write and commit
Replicas           other nodes' shards on the way to this node's own disk (--checkpoint-local)
CommitRules        the fence, messages to other nodes, retention
=================  ===============================================================================
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from elaunch.agent.context import SaverSetup
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.saver.commitrules import CommitRules
from elaunch.agent.saver.memory import CheckpointMemory, Segment
from elaunch.agent.saver.queue import SaveQueue, Settled
from elaunch.agent.saver.replicas import Replicas
from elaunch.agent.saver.shards import REPLICA, Shards
from elaunch.atonce import start, within
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import CheckpointError, SaveError
from elaunch.rendezvous.plan import HeldShards
from elaunch.wire.local import Message, Requests
from elaunch.wire.worker import (
    StagedShard,
    committed_from_json,
    committed_to_json,
    shard_from_json,
)

PUSH_S = 300.0
"""Seconds for another node to take a replica."""
DRAIN_S = 5.0
"""Seconds at the end of a round for the connections of the workers, which have ended, to end."""

MANIFESTS_S = 5.0
"""Seconds at the end of a round for other nodes' manifests, where each has its own directory."""

log = logging.getLogger("elaunch")

Answer = tuple[Mapping[str, Any], list[int]]


class ServedWorker:
    """A worker of the round that uses the saver; its requests, in the thread that answers them.

    A request that was received is done, also where the worker has ended meanwhile.

    Attributes:
        begun: its memory is about to hold its next shard.
        newest: the uuid of the save that it has staged last.
    """

    def __init__(
        self, service: SaverService, requests: Requests, rank: int, local_rank: int, round: int
    ) -> None:
        self._service = service
        self.requests = requests
        self.rank = rank
        self.local_rank = local_rank
        self.round = round
        self.begun = False
        self.newest = ""

    def close(self) -> None:
        """Hang up; requests that were received are still done."""
        self.requests.hang_up()

    def left(self) -> None:
        """Note that no request comes any more."""
        self._service.left(self)

    def serve(self, request: Message) -> None:
        """Do what is requested, and answer."""
        files: Sequence[int] = ()
        answer: Mapping[str, Any]
        try:
            answer, files = _SERVED[request["op"]](self, request)
        except CheckpointError as error:
            answer = {"error": str(error), "kind": "save"}
        except TimeoutError as error:
            replicated = self._service.replicated(self)
            answer = {"error": str(error), "kind": "timeout", "replicated": replicated}
        except (OSError, ValueError, LookupError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "request"}
            if request["n"] == 0:  # it would wait for what nobody does
                log.warning("worker %d is dropped: %s", self.local_rank, answer["error"])
                self.requests.hang_up()
        self.requests.answer(request, answer, files)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def memory(self, request: Mapping[str, Any]) -> Answer:
        """Lend the worker its memory."""
        self.begun = self.begun or request.get("begun") is True
        segment = self._service.lend(self, int(request["size"]))
        return {"size": segment.size}, [segment.fd]

    def begin(self, request: Mapping[str, Any]) -> Answer:
        """Have the worker wait for the save in flight, and begin the next."""
        self.begun = self._service.begin_save(self, request["wait"] is True, request.get("timeout"))
        return {"begun": self.begun, **self._service.last(self)}, []

    def staged(self, request: Mapping[str, Any]) -> Answer:
        """Take over what the worker has left in its memory, and write it."""
        shard = shard_from_json(request["shard"])
        try:
            write = self._service.take(self, shard, int(request["memory"]))
        except SaveError as error:
            self._service.refuse(self, shard, str(error))
            return {}, []
        write()
        return {}, []

    def abandon(self, request: Mapping[str, Any]) -> Answer:
        """Note that the worker stages nothing of what it has begun."""
        self.begun = False
        stage = request.get("stage")
        self._service.queue.abandon(self.rank, None if stage is None else Stage(**stage))
        return {}, []

    def wait(self, request: Mapping[str, Any]) -> Answer:
        """Have the worker wait until its saves are on the disk."""
        self._service.queue.wait(self.rank, request.get("timeout"))
        return self._service.last(self), []

    def fence(self, request: Mapping[str, Any]) -> Answer:
        """Answer whether the worker's round is still the one."""
        self._service.rules.check_round(int(request["round"]))
        return {}, []

    def committed(self, request: Mapping[str, Any]) -> Answer:
        """Count a checkpoint that the ranks have written and committed without the agent."""
        done = committed_from_json(request["committed"])
        if done is not None:
            self._service.queue.committed_by_rank(done, float(request["took"]))
        return {}, []

    def recall(self, request: Mapping[str, Any]) -> Answer:
        """Send the worker the shards of a checkpoint that are in memory."""
        wanted = (int(request["step"]), int(request["round"]), str(request["uuid"]))
        ranks = [int(rank) for rank in request["ranks"]]
        found = self._service.shards.find(wanted, ranks, float(request["timeout"]))
        rows = [{"rank": rank, "files": files} for rank, (files, _) in found.items()]
        return {"shards": rows}, [segment.fd for _, segment in found.values()]


_SERVED: Final[Mapping[str, Callable[[ServedWorker, Mapping[str, Any]], Answer]]] = {
    op: getattr(ServedWorker, op)
    for op in "memory begin staged abandon wait fence committed recall".split()
}


class SaverService:
    """Owns memory, saves and connections; the loop calls begin, settle and close."""

    def __init__(self, setup: SaverSetup, place: str, lived: Collection[int]) -> None:
        self._setup = setup
        self._storage = open_storage(place, setup.settings.checkpoint_local)
        self._memory = CheckpointMemory(setup.settings.checkpoint_memory)
        self._changed = threading.Condition()
        self._connections: dict[int, ServedWorker] = {}
        self._reading: dict[tuple[str, int], Segment] = {}
        self._pushing: set[str] = set()
        self._replicated: dict[str, str] = {}  # segment → uuid of the save that a neighbour has
        self.shards = Shards(setup, self._memory, lived)
        self.rules = CommitRules(setup, self._storage, self._released, self.shards.has_all)
        self.queue = SaveQueue(self._storage, self.rules)
        self._replicas = Replicas(self._storage, self.queue, self._memory)
        self.rules.on_commit = self._replicas.committed
        self.queue.on_over = self._send_over

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────

    def begin(self, round_: Round) -> None:
        """Serve the workers of this round, and go on with the save that it resumes from."""
        with self._changed:
            self.rules.begin(round_)
            old, self._connections = list(self._connections.values()), {}
        for connection in old:
            if connection.local_rank not in round_.kept:
                connection.close()
        found = round_.checkpoint
        adopted = "" if found is None else found.uuid
        self.queue.end_round(
            adopted, round_.resumed, whole=bool(round_.kept) and round_.plan is None
        )
        self.shards.begin(round_)
        if adopted and round_.plan is not None:
            name = "go on with a save"
            start(name, self._go_on, adopted)

    def _go_on(self, uuid: str) -> None:
        """Go on with the save that the round resumes from, also for the nodes that are gone."""
        for shard, segment in self.shards.replicas():
            if self.rules.is_orphaned(shard):
                self._write_replica(shard, segment)
        try:
            self.queue.send_manifests(uuid)
        except SaveError as error:
            log.warning("the save that this round resumes from: %s", error)

    def settle(self, number: int, until: float, holds: bool = False) -> events.SavesSettled:
        """Write what the workers, which have ended, have left in memory; monotonic ``until``.

        ``holds``: what the next round can load from memory is not waited for.
        """
        self.queue.wake()
        with self._changed:
            # What they sent last may still be unread.
            drained = min(until, time.monotonic() + DRAIN_S)
            self._changed.wait_for(
                lambda: not self._connections, max(0.0, drained - time.monotonic())
            )
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        self.rules.ending = True
        held = self.held() if holds else ()
        self.rules.decide(not held)
        if not held:
            within(max(0.0, until - time.monotonic()), self._write_replicas, "replicas")
        settled = self.queue.settle(until, going_on={one.uuid for one in held})
        if self._setup.settings.checkpoint_local:
            # Nobody can finish it later: each directory lacks what the other nodes have.
            more = self.queue.settle(min(until, time.monotonic() + MANIFESTS_S), patient=True)
            done = (*settled.committed, *more.committed)
            settled = Settled(done, (*settled.lost, *more.lost))
            self._replicas.settle(until)
        names = tuple(done.name for done in settled.committed)
        return events.SavesSettled(number, names, settled.lost, self.held() if held else ())

    def held(self) -> tuple[HeldShards, ...]:
        """Return the shards in memory of saves that are not over, and that a round could load.

        These saves are of the round that has ended, or the one that it has resumed from itself.
        """
        round_, saves, place = (
            self.rules.round,
            dict[Stage, list[StagedShard]](),
            self._storage.place,
        )
        if not self._setup.loads_by_call(place):
            return ()
        for shard in self.shards.staged():
            stage = shard.stage
            counts = round_ is not None and (stage.round == round_.round or round_.resumes(stage))
            if counts and shard.loads and not shard.local and not self.queue.is_over(stage):
                saves.setdefault(stage, []).append(shard)
        return tuple(
            HeldShards(
                path=f"{place}/{stage.name if isinstance(place, str) else stage.final}",
                step=stage.step,
                round=stage.round,
                uuid=stage.uuid,
                world_size=shards[0].header.world_size,
                ranks=tuple(sorted({shard.header.rank for shard in shards})),
                writing=self.queue.is_writing([stage.uuid]),
            )
            for stage, shards in saves.items()
        )

    def close(self, until: float) -> None:
        """End; saves that only lack shards of other nodes wait for them until ``until``."""
        self.queue.close(until)
        self._replicas.settle(until)
        with self._changed:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        self._memory.close()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def admit(self, connection: ServedWorker) -> None:
        """Serve a worker of the round, in place of an earlier one with its rank.

        For rank 0 the directory is locked for this job; SaveError if another job has it.
        """
        with self._changed:
            old = self._connections.get(connection.rank)
            self._connections[connection.rank] = connection
        self.queue.join(connection.rank)
        if old is not None and old.local_rank == connection.local_rank:
            old.close()
        try:
            self._lock(connection)
        except (CheckpointError, OSError):
            self.left(connection)
            raise

    def _lock(self, connection: ServedWorker) -> None:
        alone = self._setup.settings.checkpoint_local and connection.local_rank == 0
        if connection.rank == 0 or alone:
            self._setup.finisher.lock(self._storage)
            self._setup.finisher.tidy(self._storage)
            self._setup.finisher.retire(
                "" if self.rules.round is None else self.rules.round.resumed
            )

    def left(self, connection: ServedWorker) -> None:
        """Note that a worker's connection has ended."""
        with self._changed:
            current = self._connections.get(connection.rank) is connection
            if current:
                del self._connections[connection.rank]
            self._changed.notify_all()
        if current:
            self.queue.leave(connection.rank)

    def lend(self, connection: ServedWorker, size: int) -> Segment:
        """Return the worker's segment, of ``size`` bytes or more."""
        self._check_round(connection)
        name = _name(connection)
        before = self._memory.find(name)
        if connection.begun:  # on all ranks: no older shard is needed any more
            self.shards.forget(name)
            self.shards.forget_others(_worker_names(self.rules.round))
        elif before is not None and self._is_held(name):
            if before.size >= size:
                return before  # it is not written to before a save has begun
            self.shards.keep_aside(name)
        segment = self._memory.lease(name, size)
        if segment is not before:
            self.shards.forget(name)
        return segment

    def _is_held(self, name: str) -> bool:
        """Whether a round may have to load what is in a segment."""
        shard = self.shards.in_segment(name)
        return shard is not None and shard.loads and not self.queue.is_over(shard.stage)

    def begin_save(self, connection: ServedWorker, wait: bool, timeout: float | None) -> bool:
        """Wait for the save in flight."""
        self._check_round(connection)
        until = None if timeout is None else time.monotonic() + timeout
        if not self.queue.begin(connection.rank, wait, timeout):
            return False
        name = _name(connection)
        with self._changed:
            left = None if until is None else max(0.0, until - time.monotonic())
            return self._changed.wait_for(lambda: name not in self._pushing, left if wait else 0.0)

    def take(self, connection: ServedWorker, shard: StagedShard, memory: int) -> Callable[[], None]:
        """Take over a shard, which is this agent's from here on, whatever becomes of its worker.

        ``memory`` is the inode of where it lies. Returns what starts its write: see
        ``SaveQueue.stage``.
        """
        self._check_round(connection)
        name = _name(connection)
        segment = self._memory.find(name)
        problem = _unfit(connection, shard, segment, self._setup.settings.run_id)
        if segment is not None and os.fstat(segment.fd).st_ino != memory:
            problem = "it lies in memory that the worker has no more"
        if problem or segment is None:
            who = f"rank {connection.rank}'s shard of {shard.stage.final}"
            raise SaveError(f"{who} is refused: {problem}")
        connection.begun, connection.newest = False, shard.stage.uuid
        self.shards.keep(name, shard, segment)
        start = self._write(shard, segment)
        self._replicate(name, shard, segment)
        return start

    def refuse(self, connection: ServedWorker, shard: StagedShard, problem: str) -> None:
        """Have a save come to nothing that this agent takes no shard of."""
        connection.begun = False
        now = self.rules.round
        if now is None or shard.stage.round != now.round:
            log.info("%s: %s", shard.stage.final, problem)  # nobody waits for it
        else:
            self.queue.refuse(shard, problem)

    def _send_over(self, stage: Stage) -> None:
        """Send the workers whose last save is over that it is: the next one need not ask."""
        with self._changed:
            connections = [
                one
                for one in self._connections.values()
                if one.newest == stage.uuid and _name(one) not in self._pushing
            ]
        for connection in connections:
            if self.queue.is_well(connection.rank, stage):
                over = {"op": "over", "uuid": stage.uuid, **self.last(connection)}
                connection.requests.post(over)

    def last(self, connection: ServedWorker) -> dict[str, Any]:
        """Return what has become of the worker's last save."""
        committed = committed_to_json(self.queue.last(connection.rank))
        return {"committed": committed, "replicated": self.replicated(connection)}

    def _check_round(self, connection: ServedWorker) -> None:
        now = self.rules.round
        if now is None or connection.round != now.round:
            raise SaveError(
                f"round {connection.round} is over"
                + ("" if now is None else f": round {now.round} runs here")
                + "; what it saves counts no more"
            )

    def _write(self, shard: StagedShard, segment: Segment) -> Callable[[], None]:
        self._memory.hold(segment)
        with self._changed:
            self._reading[shard.stage.name, shard.header.rank] = segment
        try:
            return self.queue.stage(shard, segment.view)
        except CheckpointError:
            self._released(shard)
            raise

    def _released(self, shard: StagedShard) -> None:
        with self._changed:
            segment = self._reading.pop((shard.stage.name, shard.header.rank), None)
        if segment is not None:
            self._memory.release(segment)

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────

    def _replicate(self, name: str, shard: StagedShard, segment: Segment) -> None:
        peers, round_ = self._setup.peers, self.rules.round
        if peers is None or round_ is None or round_.plan is None:
            return
        own, nodes = round_.plan.node_rank(round_.name), len(round_.plan.nodes)
        if not self._setup.settings.checkpoint_replicas or own is None or nodes < 2:
            return
        node_rank = (own + 1) % nodes

        def push() -> None:
            try:
                peers.push_replica(node_rank, shard, segment.view, PUSH_S)
                self._replicated[name] = shard.stage.uuid
            except (SaveError, OSError) as error:
                log.warning("%s has no copy on another node: %s", shard.stage.final, error)
            finally:
                self._memory.release(segment)
                with self._changed:
                    self._pushing.discard(name)
                    self._changed.notify_all()
                self._send_over(shard.stage)

        self._memory.hold(segment)
        with self._changed:
            self._pushing.add(name)
        thread_name = f"replica of rank {shard.header.rank}"
        start(thread_name, push)

    def replicated(self, connection: ServedWorker) -> str:
        """Return the uuid of the worker's newest save whose shard a neighbour has, or ""."""
        return self._replicated.get(_name(connection), "")

    def _write_replicas(self) -> None:
        """Write other nodes' shards that are not on the disk: those nodes may be gone."""
        round_ = self.rules.round
        for shard, segment in self.shards.replicas():
            if round_ is not None and shard.stage.round == round_.round:
                self._write_replica(shard, segment)

    def _write_replica(self, shard: StagedShard, segment: Segment) -> None:
        try:
            if self._is_lacking(shard):
                self._write(shard, segment)()
        except (CheckpointError, OSError) as error:
            log.warning("the copy of rank %d's shard: %s", shard.header.rank, error)

    def _is_lacking(self, shard: StagedShard) -> bool:
        if self._storage.holds(shard.stage.final, shard.stage.uuid):
            return False
        if shard.local and self.queue.is_written(shard.stage, shard.header.rank):
            return False  # a second manifest of the rank would make another checkpoint of it
        return shard.header.rank not in self._storage.manifests(shard.stage)

    def replica_room(self, shard: StagedShard) -> memoryview:
        """Make room for a replica; see ``AgentSaver.replica_room``."""
        name = f"{REPLICA}{shard.header.rank}"
        self._replicas.await_room(shard.header.rank)
        self.shards.forget(name)
        return self._memory.lease(name, shard.end).view

    def replica_came(self, shard: StagedShard) -> None:
        """Keep a replica that is whole."""
        name = f"{REPLICA}{shard.header.rank}"
        segment = self._memory.find(name)
        if segment is not None:
            shard = replace(shard, header=replace(shard.header, copied=True))
            self.shards.keep(name, shard, segment)
            if shard.local:
                self._replicas.came(shard, segment)


def _name(connection: ServedWorker) -> str:
    return f"worker {connection.local_rank}"


def _worker_names(round_: Round | None) -> list[str]:
    return [f"worker {k}" for k in range(0 if round_ is None else round_.nproc)]


def _unfit(
    connection: ServedWorker, shard: StagedShard, segment: Segment | None, run_id: str
) -> str:
    """Return why a shard cannot be taken, or ""."""
    if not connection.begun:
        return "no save was begun"
    if segment is None:
        return "no memory was asked for"
    if shard.header.rank != connection.rank or shard.stage.round != connection.round:
        return f"it is of rank {shard.header.rank} and round {shard.stage.round}"
    if shard.header.run_id != run_id:
        return f"it is of run {shard.header.run_id}"
    extents = [extent for _, pieces in shard.images for extent in pieces]
    if any(at < 0 or size < 0 or at + size > segment.size for at, size in extents):
        return f"it lies beyond the {segment.size} bytes of its memory"
    return ""
