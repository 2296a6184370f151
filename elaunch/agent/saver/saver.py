"""The agent's saver of checkpoints, as its loop and its workers' links see it.

It costs nothing until a worker asks for it (elaunch.wire.worker). Then the service is imported and
made (elaunch.agent.saver.service), and the event SaverUsed has the round's end wait for what is in
memory::

    a thread per worker ──► serve: checkpoint, memory, begin, staged, wait, fence, recall
    loop ──► begin(round) … settle(seconds) ──► SavesSettled ──► begin(round + 1) … close
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import convert
from msgspec.structs import replace

from elaunch.agent.context import SaverSetup
from elaunch.agent.patience import logged_wait
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.atonce import start
from elaunch.checkpoint.records import ShardReport
from elaunch.errors import ElaunchError, SaveError
from elaunch.rendezvous.plan import Plan
from elaunch.runs.record import SavesRecord
from elaunch.wire.local import Message, Requests
from elaunch.wire.worker import shard_from_json

if TYPE_CHECKING:
    from elaunch.agent.peers.messages import PeerConnection
    from elaunch.agent.peers.peers import Fields, Peers
    from elaunch.agent.saver.service import SaverService, ServedWorker
    from elaunch.wire.worker import StagedShard

LAST_WAIT_S: Final = 10.0
"""Seconds that the end of the job waits for shards of other nodes."""

log = logging.getLogger("elaunch")


class AgentSaver:
    """Owns the service, once a worker has asked for it."""

    def __init__(self, setup: SaverSetup) -> None:
        self._setup = setup
        self.finisher = setup.finisher
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._service: SaverService | None = None
        self._round: Round | None = None
        self._lived: set[int] = set()
        setup.finisher.unfinished = self.unfinished

    def check(self) -> None:
        """Raise UsageError for more memory than this node has; before the first round."""
        limit = self._setup.settings.checkpoint_memory
        if limit is not None:
            from elaunch.agent.saver.memory import check_limit

            check_limit(limit)

    def meet(self, read_plan: Callable[[], Plan], peers: Peers) -> None:
        """Work as the saver of one node among several; called before the first round."""
        self._setup = replace(self._setup, read_plan=read_plan, peers=peers)
        serve_peers(self, peers)

    @property
    def _running(self) -> SaverService | None:
        with self._lock:
            return self._service

    # ── the loop calls ───────────────────────────────────────────────────────────────────────────

    def begin(self, round_: Round) -> None:
        """Serve the workers of this round, which are about to start, and none of any other."""
        self.finisher.round = round_.round
        self.finisher.resumed = "" if round_.checkpoint is None else round_.checkpoint.stage
        self.finisher.retire(round_.resumed)
        with self._lock:
            self._round = round_
            self._lived.add(round_.round)
            service = self._service
        if service is not None:
            service.begin(round_)

    def settle(self, seconds: float, *, holds: bool = False) -> None:
        """Write what is in memory to the disk, for ``seconds`` at most; then post SavesSettled.

        ``holds``: what the next round can load from memory is not waited for. Its write goes on,
        and SavesSettled is posted again when it is on the disk.
        """
        with self._lock:
            round_, service = self._round, self._service
        number = -1 if round_ is None else round_.round
        if service is None:
            self._setup.post(events.SavesSettled(number))
            return
        until = time.monotonic() + seconds

        def settle() -> None:
            saving = service.queue.record()["saving"]
            what = f"the save of step {saving}" if saving is not None else "what is in memory"
            with logged_wait(lambda passed: f"still writing out {what}, for {passed:.0f} s"):
                settled = service.settle(number, until, holds)
            self._setup.post(settled)
            if any(one.writing for one in settled.held):
                service.queue.await_rest([one.uuid for one in settled.held])
                self._setup.post(events.SavesSettled(number, held=service.held()))

        start("settle checkpoints", settle)

    def close(self) -> None:
        """Give the memory back; waits a bounded time for other nodes' shards of the last save."""
        with self._lock:
            service, self._round = self._service, None
        if service is not None:
            service.close(time.monotonic() + LAST_WAIT_S)
        with self._lock:
            self._service = None  # not before: it is sent reports of other nodes' shards
        self.finisher.close()

    # ── others call ──────────────────────────────────────────────────────────────────────────────

    def serve(self, requests: Requests) -> None:
        """Answer a worker's requests until it is gone; in a thread of that worker's own."""
        connection: ServedWorker | None = None
        try:
            while (request := requests.next()) is not None:
                if connection is not None and request.get("op") == "checkpoint":
                    connection.left()
                    connection = None
                if connection is None and request.get("op") == "resumed":
                    requests.answer(request, self._resumed(request))
                elif connection is None:
                    connection = self._admit(requests, request)
                else:
                    connection.serve(request)
        except Exception:
            log.exception("the saver cannot serve a worker any more")
        finally:
            requests.hang_up()
            if connection is not None:
                connection.left()

    def unfinished(self) -> tuple[str, ...]:
        """Return the names of the stages that this agent still writes into; any thread may ask."""
        service = self._running
        return () if service is None else service.queue.unfinished()

    def record(self) -> SavesRecord | None:
        """Return what ``elaunch status`` shows of saves; None before the first."""
        service = self._running
        return None if service is None else service.queue.record()

    # ── other agents call, in threads of their connections ───────────────────────────────────────

    def on_report(self, report: ShardReport) -> None:
        """Note what became of another node's shard."""
        queue, stage, rank = self._served().queue, report.stage, report.rank
        if report.do == "written":
            manifest = report.manifest.encode("latin-1")
            queue.written_elsewhere(stage, rank, report.world_size, manifest)
        elif report.do == "writing":
            queue.writing_elsewhere(stage, rank, report.world_size)
        else:
            queue.failed_elsewhere(stage, f"rank {rank}: {report.problem}")

    def held(self, wanted: tuple[int, int, str]) -> list[int]:
        """Return the ranks whose shards of a checkpoint are in this agent's memory."""
        service = self._running
        return [] if service is None else service.shards.held(wanted)

    def serve_shard(
        self, step: int, round_number: int, rank: int
    ) -> tuple[StagedShard, memoryview] | None:
        """Return a shard that is in this agent's memory, its own or a replica; None if it is not.

        The memory may be overwritten while it is sent: ask again afterwards, and send a shard only
        as good if the answer is the same one.
        """
        service = self._running
        return None if service is None else service.shards.serve(step, round_number, rank)

    def replica_room(self, shard: StagedShard) -> memoryview:
        """Make room for a replica of another node's shard; SaveError if there is none.

        From here on the replica of that rank that was kept before is gone. With a directory on each
        node that one is on its way to the disk, and is waited for, for a bounded time.
        """
        return self._served().replica_room(shard)

    def replica_came(self, shard: StagedShard) -> None:
        """Keep a replica, which is whole, its checksum right."""
        self._served().replica_came(shard)

    def _resumed(self, request: Message) -> Mapping[str, Any]:
        service = self._running
        uuid = str(request.get("uuid"))
        shards = [] if service is None else service.shards.staged(uuid)
        return {"shards": [asdict(shard) for shard in shards]}

    def _served(self) -> SaverService:
        service = self._running
        if service is None:
            raise SaveError("no worker of this node has saved anything")
        return service

    def _admit(self, requests: Requests, request: Message) -> ServedWorker | None:
        """Answer a worker's first request; return what serves it from then on, None if refused."""
        from elaunch.agent.saver.service import ServedWorker  # jobs without saves do without

        try:
            service, round_ = self._service_for(request)
            self._setup.post(events.SaverUsed(round_.round))
            rank, local_rank = int(request["rank"]), int(request["local_rank"])
            worker = ServedWorker(service, requests, rank, local_rank, round_.round)
            service.admit(worker)
        except (ElaunchError, OSError, ImportError) as error:
            requests.answer(request, {"error": str(error), "kind": "refused"})
            return None
        requests.answer(request, {})
        return worker

    def _service_for(self, request: Message) -> tuple[SaverService, Round]:
        """Return the service, made if it is not there yet, for a worker of the round that runs."""
        with self._lock:
            problem = _refusal(request, self._round)
        if problem:
            raise SaveError(problem)
        service = self._make(str(request["place"]))
        with self._lock:
            problem, round_ = _refusal(request, self._round), self._round
        if problem or round_ is None:
            raise SaveError(problem)
        return service, round_

    def _make(self, place: str) -> SaverService:
        """Return the service for checkpoints at ``place``; SaveError if it is for other ones.

        The lock, which the loop takes as well, is held only while the service is put in place.
        """
        with self._making:
            service = self._service or self._begin_service(place)
        known = str(service.queue.storage.place)
        if known != place:
            raise SaveError(
                f"this run's checkpoints are at {known}, not at {place}: a run has one directory"
            )
        return service

    def _begin_service(self, place: str) -> SaverService:
        from elaunch.agent.saver.service import SaverService  # jobs without saves do without

        service = SaverService(self._setup, place, self._lived)
        with self._lock:
            if self._round is None:
                raise SaveError("no round runs here")
            service.begin(self._round)
            self._service = service
        return service


def _refusal(request: Message, round_: Round | None) -> str:
    if request.get("op") != "checkpoint":
        return "a worker names the location of its checkpoints before all else"
    numbers = [request.get(name) for name in ("round", "rank", "local_rank")]
    if any(type(number) is not int for number in numbers) or type(request.get("place")) is not str:
        return "checkpoint needs the numbers 'round', 'rank', 'local_rank', and a 'place'"
    if round_ is None:
        return "no round runs here"
    if request["round"] != round_.round:
        return f"round {request['round']} is over: round {round_.round} runs here"
    local_rank = request["local_rank"]
    rank, ranks = request["rank"], round_.own_ranks
    fewer = bool(round_.kept) and round_.plan is None  # those that go on number themselves anew
    own = rank in ranks if fewer else rank == round_.first_rank + local_rank
    if not (own and 0 <= local_rank < round_.nproc):
        return f"rank {rank} with local rank {local_rank} is not of this node"
    return ""


# ── requests of other agents (elaunch.agent.peers.messages) ─────────────────────────────────────


def serve_peers(saver: AgentSaver, peers: Peers) -> None:
    """Have requests about shards answered by ``saver``, from now on."""
    for op, serve in _FOR_PEERS.items():
        peers.handle(op, partial(serve, saver))


def _on_report(saver: AgentSaver, _: PeerConnection, request: Fields) -> Fields:
    saver.on_report(convert(request, ShardReport))
    return {"ok": True}


def _on_held(saver: AgentSaver, _: PeerConnection, request: Fields) -> Fields:
    wanted = int(request["step"]), int(request["round"]), str(request["uuid"])
    return {"ok": True, "ranks": saver.held(wanted)}


def _on_shard(saver: AgentSaver, connection: PeerConnection, request: Fields) -> Fields:
    wanted = int(request["step"]), int(request["round"]), int(request["rank"])
    found = saver.serve_shard(*wanted)
    if found is None:
        return {"ok": True}
    shard, memory = found
    connection.send({"ok": True, "shard": asdict(shard)})
    connection.send_bytes([memory[: shard.end]])
    again = saver.serve_shard(*wanted)
    return {"ok": True, "whole": again is not None and again[0] == shard}


def _on_replica(saver: AgentSaver, connection: PeerConnection, request: Fields) -> Fields:
    shard = shard_from_json(request["shard"])
    room = saver.replica_room(shard)
    connection.send({"ok": True})
    connection.receive_into(room[: shard.end], lambda _: None)
    saver.replica_came(shard)
    name, rank = shard.stage.final, shard.header.rank
    log.debug("this node's memory has a copy of rank %d's shard of %s", rank, name)
    return {"ok": True}


_FOR_PEERS: Final[Mapping[str, Callable[..., Fields]]] = {
    "written": _on_report,
    "writing": _on_report,
    "failed": _on_report,
    "held": _on_held,
    "shard": _on_shard,
    "replica": _on_replica,
}
