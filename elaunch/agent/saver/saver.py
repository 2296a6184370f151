"""The agent's saver of checkpoints, as its loop and its control socket see it.

It costs nothing until a worker connects to it (elaunch.wire.saver): then what does the work is
imported and made (elaunch.agent.saver.service), and SaverUsed has the round's end wait for what is
in memory::

    control socket ──► adopt ──► a thread per worker: memory, begin, staged, wait, fence, recall
    loop ──► begin(round) … settle(seconds) ──► SavesSettled ──► begin(round + 1) … close
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from elaunch.agent.patience import telling
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.saver.round import SaverPlan
from elaunch.errors import ElaunchError, SaveError
from elaunch.rendezvous.plan import Plan
from elaunch.run.saves import SavesRecord

if TYPE_CHECKING:
    from elaunch.agent.saver.peers import SaverPeers
    from elaunch.agent.saver.service import SaverService
    from elaunch.checkpoint.records import Stage
    from elaunch.wire.saver import Handed

LAST_WAIT_S: Final = 10.0
"""Seconds that the end of the job waits for shards of other nodes."""

log = logging.getLogger("elaunch")


class AgentSaver:
    """Owns the service, once a worker has asked for it."""

    def __init__(self, plan: SaverPlan) -> None:
        self._plan = plan
        self.finishing = plan.finishing
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._service: SaverService | None = None
        self._round: Round | None = None
        plan.finishing.unfinished = self.unfinished

    def check(self) -> None:
        """Raise UsageError for settings that this node cannot keep to; before the first round."""
        limit = self._plan.settings.checkpoint_memory
        if limit is not None:
            from elaunch.agent.saver.memory import check_limit

            check_limit(limit)

    def meet(self, read_plan: Callable[[], Plan], peers: SaverPeers) -> None:
        """Be the saver of one node among several, from before the first round on."""
        self._plan = replace(self._plan, read_plan=read_plan, peers=peers)

    # ── the loop calls ───────────────────────────────────────────────────────────────────────────

    def begin(self, round_: Round) -> None:
        """Serve the workers of this round, which are about to start, and none of any other."""
        self.finishing.round = round_.round
        if round_.plan is not None:
            self.finishing.enter(round_.plan.job)
        with self._lock:
            self._round = round_
            service = self._service
        if service is not None:
            service.begin(round_)

    def settle(self, seconds: float) -> None:
        """Bring what is in memory to the disk, for ``seconds`` at most; posts SavesSettled."""
        with self._lock:
            round_, service = self._round, self._service
        number = -1 if round_ is None else round_.round
        if service is None:
            self._plan.post(events.SavesSettled(number))
            return
        until = time.monotonic() + seconds

        def settle() -> None:
            saving = service.keeping.record()["saving"]
            what = f"the save of step {saving}" if saving is not None else "what is in memory"
            with telling(lambda passed: f"still writing out {what}, for {passed:.0f} s"):
                settled = service.settle(number, until)
            self._plan.post(settled)

        threading.Thread(target=settle, name="settle checkpoints", daemon=True).start()

    def close(self) -> None:
        """Give the memory back; waits a bounded time for other nodes' shards of the last save."""
        with self._lock:
            service, self._round = self._service, None
        if service is not None:
            service.close(time.monotonic() + LAST_WAIT_S)
        with self._lock:
            self._service = None  # not before: it gets reports of other nodes' shards
        self.finishing.close()

    # ── others call ──────────────────────────────────────────────────────────────────────────────

    def adopt(self, sock: socket.socket, said: Mapping[str, Any], files: list[int]) -> str:
        """Take over the connection of a worker; return why not, or "". ``files`` are closed."""
        for fd in files:
            os.close(fd)
        with self._lock:
            problem, made = _refusal(said, self._round), self._service is not None
        if problem:
            refuse(sock, problem)
        elif made:
            self._serve(sock, said)
        else:  # the imports may take long, and whoever asks for the run's status is not to wait
            threading.Thread(
                target=self._serve, args=(sock, said), name="saver begins", daemon=True
            ).start()
        return problem

    def _serve(self, sock: socket.socket, said: Mapping[str, Any]) -> None:
        """Serve a worker whose message is in order, if its round is still the one."""
        problem = self._make(str(said["place"]))
        with self._lock:
            service, round_ = self._service, self._round
            problem = problem or _refusal(said, round_)
        if problem or service is None or round_ is None:
            refuse(sock, problem or "this agent ends")
            return
        self._plan.post(events.SaverUsed(round_.round))
        service.adopt(sock, int(said["rank"]), int(said["local_rank"]), round_)

    def unfinished(self) -> tuple[str, ...]:
        """Return the names of the stages that this agent still writes into; any thread may ask."""
        with self._lock:
            service = self._service
        return () if service is None else service.keeping.unfinished()

    def record(self) -> SavesRecord | None:
        """Return what ``elaunch status`` shows of saves; None before the first."""
        with self._lock:
            service = self._service
        return None if service is None else service.keeping.record()

    # ── peers call (elaunch.agent.saver.peers.Received) ──────────────────────────────────────────

    def on_sealed(self, stage: Stage, rank: int, manifest: bytes) -> None:
        """Note that another node's shard is on the disk."""
        said = json.loads(manifest)
        self._served().keeping.sealed_elsewhere(stage, rank, int(said["world_size"]), manifest)

    def on_writing(self, stage: Stage, rank: int, world_size: int) -> None:
        """Note that another node's shard is being written still."""
        self._served().keeping.writing_elsewhere(stage, rank, world_size)

    def on_failed(self, stage: Stage, rank: int, problem: str) -> None:
        """Note that another node's shard will not come."""
        self._served().keeping.failed_elsewhere(stage, f"rank {rank}: {problem}")

    def serve_part(
        self, step: int, round_number: int, rank: int
    ) -> tuple[Handed, memoryview] | None:
        """Return a shard that is in this agent's memory; None if it is not."""
        with self._lock:
            service = self._service
        return None if service is None else service.parts.serve(step, round_number, rank)

    def replica_room(self, handed: Handed) -> memoryview:
        """Make room for a replica of another node's shard; SaveError if there is none."""
        return self._served().replica_room(handed)

    def replica_came(self, handed: Handed) -> None:
        """Keep a replica, which is whole."""
        self._served().replica_came(handed)

    def _served(self) -> SaverService:
        with self._lock:
            service = self._service
        if service is None:
            raise SaveError("no worker of this node has saved anything")
        return service

    def _make(self, place: str) -> str:
        """Make the service for checkpoints at ``place``; return why it cannot be, or "".

        The lock, which the loop takes as well, is held only while the service is put in place.
        """
        with self._making:
            service = self._service
            if service is None:
                try:
                    service = self._begin_service(place)
                except (ElaunchError, OSError, ImportError) as error:
                    return str(error)
        known = str(service.keeping.storage.place)
        if known != place:
            return f"this run's checkpoints are at {known}, not at {place}: a run has one directory"
        return ""

    def _begin_service(self, place: str) -> SaverService:
        from elaunch.agent.saver.service import SaverService  # jobs without saves do without

        service = SaverService(self._plan, place)
        with self._lock:
            if self._round is None:
                raise SaveError("no round runs here")
            service.begin(self._round)
            self._service = service
        return service


def _refusal(said: Mapping[str, Any], round_: Round | None) -> str:
    numbers = [said.get(name) for name in ("round", "rank", "local_rank", "pid")]
    if any(type(number) is not int for number in numbers) or type(said.get("place")) is not str:
        return "checkpoint needs the numbers 'round', 'rank', 'local_rank', 'pid', and a 'place'"
    if round_ is None:
        return "no round runs here"
    if said["round"] != round_.round:
        return f"round {said['round']} is over: round {round_.round} runs here"
    local_rank = said["local_rank"]
    if not 0 <= local_rank < round_.nproc or said["rank"] != round_.first_rank + local_rank:
        return f"rank {said['rank']} with local rank {local_rank} is not of this node"
    return ""


def refuse(sock: socket.socket, problem: str) -> None:
    """Send the worker that connected why it is not served, and hang up."""
    try:
        sock.settimeout(1.0)
        sock.sendall(json.dumps({"error": problem}).encode() + b"\n")
    except OSError as error:
        log.debug("a worker did not wait for the reason: %s", error)
    sock.close()
