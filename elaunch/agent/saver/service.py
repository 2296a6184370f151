"""The saver at work: made when a run's first worker connects to it (elaunch.agent.saver.saver).

=================  ===============================================================================
object             what it owns
=================  ===============================================================================
SaverConnection    one a worker: what it has begun, and how it is answered
CheckpointMemory   the memfds, within --checkpoint-memory
Shards             what lies in them, and what other nodes have
SaveQueue          the saves in flight, and the threads that write and commit
Replicas           other nodes' shards on the way to this node's own disk (--checkpoint-local)
RoundSurroundings  the fence, messages to other nodes, retention
=================  ===============================================================================
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.saver.memory import CheckpointMemory, Segment
from elaunch.agent.saver.plan import SaverPlan
from elaunch.agent.saver.replicas import Replicas
from elaunch.agent.saver.shards import REPLICA, Shards
from elaunch.agent.saver.surroundings import RoundSurroundings
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.checkpoint.writing.queue import SaveQueue, Settled
from elaunch.errors import CheckpointError, SaveError
from elaunch.rendezvous.plan import HeldShards
from elaunch.wire.local import Message, Requests
from elaunch.wire.saver import (
    Handed,
    committed_from_json,
    committed_to_json,
    files_to_json,
    handed_from_json,
)

PUSH_S = 300.0
"""Seconds for another node to take a replica."""
DRAIN_S = 5.0
"""Seconds at the end of a round for the connections of the workers, which have ended, to end."""

SEALS_S = 5.0
"""Seconds at the end of a round for other nodes' manifests, where each has its own directory."""

log = logging.getLogger("elaunch")

Answer = tuple[Mapping[str, Any], list[int]]


class SaverService:
    """Owns memory, saves and connections; the loop calls begin, settle and close."""

    def __init__(self, plan: SaverPlan, place: str, lived: Collection[int]) -> None:
        self._plan = plan
        self._storage = open_storage(place, plan.settings.checkpoint_local)
        self._memory = CheckpointMemory(plan.settings.checkpoint_memory)
        self._changed = threading.Condition()
        self._connections: dict[int, SaverConnection] = {}
        self._reading: dict[tuple[str, int], Segment] = {}
        self._pushing: set[str] = set()
        self._replicated: dict[str, str] = {}  # segment → uuid of the save that a neighbour has
        self.parts = Shards(plan, self._memory, lived)
        self.world = RoundSurroundings(plan, self._storage, self._released, self.parts.has_all)
        self.keeping = SaveQueue(self._storage, self.world)
        self._copies = Replicas(self._storage, self.keeping, self._memory)
        self.world.on_commit = self._copies.committed

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────

    def begin(self, round_: Round) -> None:
        """Serve the workers of this round, and go on with the save that it resumes from."""
        with self._changed:
            self.world.begin(round_)
            old, self._connections = list(self._connections.values()), {}
        for connection in old:
            connection.close()
        adopted = "" if round_.checkpoint is None else round_.checkpoint.uuid
        self.keeping.end_round(adopted)
        self.parts.begin(round_)
        if adopted and round_.plan is not None:
            name = "go on with a save"
            threading.Thread(target=self._go_on, args=(adopted,), name=name, daemon=True).start()

    def _go_on(self, uuid: str) -> None:
        """Do what nodes that are gone have had to do for a save that the round resumes from."""
        for handed, segment in self.parts.replicas():
            if self.world.is_orphaned(handed):
                self._write_replica(handed, segment)
        try:
            self.keeping.send_again(uuid)
        except SaveError as error:
            log.warning("the save that this round resumes from: %s", error)

    def settle(self, number: int, until: float, holds: bool = False) -> events.SavesSettled:
        """Bring to the disk what the workers, which have ended, have left; monotonic ``until``.

        ``holds``: what the next round can load from memory is not waited for.
        """
        self.keeping.wake()
        with self._changed:
            # What they sent last may still be unread.
            drained = min(until, time.monotonic() + DRAIN_S)
            self._changed.wait_for(
                lambda: not self._connections, max(0.0, drained - time.monotonic())
            )
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        self.world.ending = True
        held = self.held() if holds else ()
        self.world.decide(not held)
        if not held:
            replicas = threading.Thread(target=self._write_replicas, name="replicas", daemon=True)
            replicas.start()
            replicas.join(max(0.0, until - time.monotonic()))
        settled = self.keeping.settle(until, going_on={one.uuid for one in held})
        if self._plan.settings.checkpoint_local:
            # Nobody can finish it later: each directory lacks what the other nodes have.
            more = self.keeping.settle(min(until, time.monotonic() + SEALS_S), patient=True)
            done = (*settled.committed, *more.committed)
            settled = Settled(done, (*settled.lost, *more.lost))
            self._copies.settle(until)
        names = tuple(done.name for done in settled.committed)
        return events.SavesSettled(number, names, settled.lost, self.held() if held else ())

    def held(self) -> tuple[HeldShards, ...]:
        """Return what is in memory of saves that are not over, and that a round could load.

        They are of the round that was, or what it has resumed from itself.
        """
        round_, saves, place = self.world.round, dict[Stage, list[Handed]](), self._storage.place
        if not self._plan.loads_by_call(place):
            return ()
        for handed in self.parts.handed():
            stage = handed.stage
            counts = round_ is not None and (stage.round == round_.round or round_.resumes(stage))
            if counts and handed.loads and not handed.local and not self.keeping.is_over(stage):
                saves.setdefault(stage, []).append(handed)
        return tuple(
            HeldShards(
                path=f"{place}/{stage.name if isinstance(place, str) else stage.final}",
                step=stage.step,
                round=stage.round,
                uuid=stage.uuid,
                world_size=shards[0].part.world_size,
                ranks=tuple(sorted({handed.part.rank for handed in shards})),
                writing=self.keeping.is_busy([stage.uuid]),
            )
            for stage, shards in saves.items()
        )

    def close(self, until: float) -> None:
        """End; a save that only lacks shards of other nodes may get them until then."""
        self.keeping.settle(until, patient=True)
        self._copies.settle(until)
        with self._changed:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        self._memory.close()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────

    def let_in(
        self, requests: Requests, rank: int, local_rank: int, round_: Round
    ) -> SaverConnection:
        """Serve a worker of ``round_``, in place of one with its rank before.

        Makes the directory this job's own when its rank 0 comes; SaveError if it is another's.
        """
        connection = SaverConnection(
            self, requests, rank=rank, local_rank=local_rank, round_=round_.round
        )
        with self._changed:
            old = self._connections.get(rank)
            self._connections[rank] = connection
        self.keeping.join(rank)
        if old is not None:
            old.close()
        try:
            self._lock(connection)
        except (CheckpointError, OSError):
            self.left(connection)
            raise
        return connection

    def _lock(self, connection: SaverConnection) -> None:
        alone = self._plan.settings.checkpoint_local and connection.local_rank == 0
        if connection.rank == 0 or alone:
            self._plan.finishing.lock(self._storage)
            self._plan.finishing.tidy(self._storage)

    def left(self, connection: SaverConnection) -> None:
        """Note that a worker's connection has ended."""
        with self._changed:
            current = self._connections.get(connection.rank) is connection
            if current:
                del self._connections[connection.rank]
            self._changed.notify_all()
        if current:
            self.keeping.leave(connection.rank)

    def lend(self, connection: SaverConnection, size: int) -> Segment:
        """Return the worker's segment, of ``size`` bytes or more."""
        self._check_round(connection)
        name = _name(connection)
        before = self._memory.find(name)
        if connection.begun:  # so have all ranks: no older shard is needed any more
            self.parts.forget(name)
            self.parts.forget_others(_worker_names(self.world.round))
        elif before is not None and self._is_held(name):
            if before.size >= size:
                return before  # it is not written to before a save has begun
            self.parts.keep_aside(name)
        segment = self._memory.lease(name, size)
        if segment is not before:
            self.parts.forget(name)
        return segment

    def _is_held(self, name: str) -> bool:
        """Whether a round may have to load what is in a segment."""
        handed = self.parts.in_segment(name)
        return handed is not None and handed.loads and not self.keeping.is_over(handed.stage)

    def begin_save(self, connection: SaverConnection, wait: bool, timeout: float | None) -> bool:
        """Wait for the save in flight."""
        self._check_round(connection)
        until = None if timeout is None else time.monotonic() + timeout
        if not self.keeping.begin(connection.rank, wait, timeout):
            return False
        name = _name(connection)
        with self._changed:
            left = None if until is None else max(0.0, until - time.monotonic())
            return self._changed.wait_for(lambda: name not in self._pushing, left if wait else 0.0)

    def take(self, connection: SaverConnection, handed: Handed) -> Callable[[], None]:
        """Take over a shard, which is this agent's from here on, whatever becomes of its worker.

        Returns what has it written: see ``SaveQueue.stage``.
        """
        self._check_round(connection)
        name = _name(connection)
        segment = self._memory.find(name)
        problem = _unfit(connection, handed, segment, self._plan.settings.run_id)
        if problem or segment is None:
            who = f"rank {connection.rank}'s part of {handed.stage.final}"
            raise SaveError(f"{who} is refused: {problem}")
        connection.begun = False
        self.parts.keep(name, handed, segment)
        write = self._write(handed, segment)
        self._replicate(name, handed, segment)
        return write

    def _check_round(self, connection: SaverConnection) -> None:
        now = self.world.round
        if now is None or connection.round != now.round:
            raise SaveError(
                f"round {connection.round} is over"
                + ("" if now is None else f": round {now.round} runs here")
                + "; what it saves counts no more"
            )

    def _write(self, handed: Handed, segment: Segment) -> Callable[[], None]:
        self._memory.hold(segment)
        with self._changed:
            self._reading[handed.stage.name, handed.part.rank] = segment
        try:
            return self.keeping.stage(handed, segment.view)
        except CheckpointError:
            self._released(handed)
            raise

    def _released(self, handed: Handed) -> None:
        with self._changed:
            segment = self._reading.pop((handed.stage.name, handed.part.rank), None)
        if segment is not None:
            self._memory.release(segment)

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────

    def _replicate(self, name: str, handed: Handed, segment: Segment) -> None:
        peers, round_ = self._plan.peers, self.world.round
        if peers is None or round_ is None or round_.plan is None:
            return
        own, nodes = round_.plan.node_rank(round_.name), len(round_.plan.nodes)
        if not self._plan.settings.checkpoint_replicas or own is None or nodes < 2:
            return
        node_rank = (own + 1) % nodes

        def push() -> None:
            try:
                peers.push_replica(node_rank, handed, segment.view, PUSH_S)
                self._replicated[name] = handed.stage.uuid
            except (SaveError, OSError) as error:
                log.warning("%s has no copy on another node: %s", handed.stage.final, error)
            finally:
                self._memory.release(segment)
                with self._changed:
                    self._pushing.discard(name)
                    self._changed.notify_all()

        self._memory.hold(segment)
        with self._changed:
            self._pushing.add(name)
        name_of_thread = f"replica of rank {handed.part.rank}"
        threading.Thread(target=push, name=name_of_thread, daemon=True).start()

    def replicated(self, connection: SaverConnection) -> str:
        """Return the uuid of the worker's newest save whose shard a neighbour has, or ""."""
        return self._replicated.get(_name(connection), "")

    def _write_replicas(self) -> None:
        """Write out the shards of other nodes that are not on the disk: those nodes may be gone."""
        round_ = self.world.round
        for handed, segment in self.parts.replicas():
            if round_ is not None and handed.stage.round == round_.round:
                self._write_replica(handed, segment)

    def _write_replica(self, handed: Handed, segment: Segment) -> None:
        try:
            if self._is_lacking(handed):
                self._write(handed, segment)()
        except (CheckpointError, OSError) as error:
            log.warning("the copy of rank %d's part: %s", handed.part.rank, error)

    def _is_lacking(self, handed: Handed) -> bool:
        if self._storage.holds(handed.stage.final, handed.stage.uuid):
            return False
        if handed.local and self.keeping.is_sealed(handed.stage, handed.part.rank):
            return False  # a manifest of this node's would make another checkpoint of it
        return handed.part.rank not in self._storage.manifests(handed.stage)

    def replica_room(self, handed: Handed) -> memoryview:
        """Make room for a replica; see ``Receiver``."""
        name = f"{REPLICA}{handed.part.rank}"
        self._copies.await_room(handed.part.rank)
        self.parts.forget(name)
        return self._memory.lease(name, handed.end).view

    def replica_came(self, handed: Handed) -> None:
        """Keep a replica that is whole."""
        name = f"{REPLICA}{handed.part.rank}"
        segment = self._memory.find(name)
        if segment is not None:
            self.parts.keep(name, handed, segment)
            if handed.local:
                self._copies.came(handed, segment)


class SaverConnection:
    """One worker that the saver has let in, in the thread that answers its requests.

    What was asked is done, also where the worker has ended meanwhile.
    """

    def __init__(
        self, service: SaverService, requests: Requests, *, rank: int, local_rank: int, round_: int
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.round = round_
        self.begun = False
        self._afterwards: Callable[[], None] | None = None
        self._service = service
        self._requests = requests

    def close(self) -> None:
        """Hang up; what has come is still done."""
        self._requests.hang_up()

    def left(self) -> None:
        """Note that the worker asks no more."""
        self._service.left(self)

    def serve(self, request: Message) -> None:
        """Do what is asked, and answer it."""
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
        afterwards, self._afterwards = self._afterwards, None
        try:
            self._requests.answer(request, answer, files)
        finally:
            if afterwards is not None:
                afterwards()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def memory(self, said: Mapping[str, Any]) -> Answer:
        """Lend the worker its memory."""
        segment = self._service.lend(self, int(said["size"]))
        return {"size": segment.size}, [segment.fd]

    def begin(self, said: Mapping[str, Any]) -> Answer:
        """Have the worker wait for the save before."""
        self.begun = self._service.begin_save(self, said["wait"] is True, said.get("timeout"))
        return self._last({"begun": self.begun})

    def staged(self, said: Mapping[str, Any]) -> Answer:
        """Take over what the worker has left in its memory."""
        self._afterwards = self._service.take(self, handed_from_json(said["handed"]))
        return self._last({})

    def abandon(self, said: Mapping[str, Any]) -> Answer:
        """Note that nothing comes of what was begun."""
        self.begun = False
        stage = said.get("stage")
        self._service.keeping.abandon(self.rank, None if stage is None else Stage(**stage))
        return {}, []

    def wait(self, said: Mapping[str, Any]) -> Answer:
        """Have the worker wait until its saves are on the disk."""
        self._service.keeping.wait(self.rank, said.get("timeout"))
        return self._last({})

    def fence(self, said: Mapping[str, Any]) -> Answer:
        """Answer whether the worker's round is still the one."""
        self._service.world.check_round(int(said["round"]))
        return {}, []

    def committed(self, said: Mapping[str, Any]) -> Answer:
        """Count a checkpoint that the ranks have written and committed without the agent."""
        done = committed_from_json(said["committed"])
        if done is not None:
            self._service.keeping.committed_by_rank(done, float(said["took"]))
        return {}, []

    def recall(self, said: Mapping[str, Any]) -> Answer:
        """Show the worker what is in memory of a checkpoint."""
        wanted = (int(said["step"]), int(said["round"]), str(said["uuid"]))
        ranks = [int(rank) for rank in said["ranks"]]
        found = self._service.parts.find(wanted, ranks, float(said["timeout"]))
        parts = [{"rank": r, "files": files_to_json(files)} for r, (files, _) in found.items()]
        return {"parts": parts}, [segment.fd for _, segment in found.values()]

    def _last(self, fields: dict[str, Any]) -> Answer:
        last, replicated = self._service.keeping.last(self.rank), self._service.replicated(self)
        return {**fields, "committed": committed_to_json(last), "replicated": replicated}, []


_SERVED: Final[Mapping[str, Callable[[SaverConnection, Mapping[str, Any]], Answer]]] = {
    "memory": SaverConnection.memory,
    "begin": SaverConnection.begin,
    "staged": SaverConnection.staged,
    "abandon": SaverConnection.abandon,
    "wait": SaverConnection.wait,
    "fence": SaverConnection.fence,
    "committed": SaverConnection.committed,
    "recall": SaverConnection.recall,
}


def _name(connection: SaverConnection) -> str:
    return f"worker {connection.local_rank}"


def _worker_names(round_: Round | None) -> list[str]:
    return [f"worker {k}" for k in range(0 if round_ is None else round_.nproc)]


def _unfit(
    connection: SaverConnection, handed: Handed, segment: Segment | None, run_id: str
) -> str:
    """Return why a shard cannot be taken, or ""."""
    if not connection.begun:
        return "no save was begun"
    if segment is None:
        return "no memory was asked for"
    if handed.part.rank != connection.rank or handed.stage.round != connection.round:
        return f"it is of rank {handed.part.rank} and round {handed.stage.round}"
    if handed.part.run_id != run_id:
        return f"it is of run {handed.part.run_id}"
    extents = [extent for _, pieces in handed.images for extent in pieces]
    if any(at < 0 or size < 0 or at + size > segment.size for at, size in extents):
        return f"it lies beyond the {segment.size} bytes of its memory"
    return ""
