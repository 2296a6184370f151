"""One worker that the saver serves: its requests about checkpoints, and what it has begun."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from elaunch.agent.saver.service import SaverService, ServedWorker
from elaunch.checkpoint.records import Stage
from elaunch.errors import CheckpointError, SaveError
from elaunch.wire.local import Message
from elaunch.wire.worker import committed_from_json, shard_from_json

log = logging.getLogger("elaunch")

Answer = tuple[Mapping[str, Any], list[int]]


class SaverConnection:
    """The requests of one worker, in the thread that answers them.

    A request that was received is done, also where the worker has ended meanwhile.
    """

    def __init__(self, service: SaverService, worker: ServedWorker) -> None:
        self._service = service
        self._worker = worker

    def left(self) -> None:
        """Note that no request comes any more."""
        self._service.left(self._worker)

    def serve(self, request: Message) -> None:
        """Do what is requested, and answer."""
        files: Sequence[int] = ()
        answer: Mapping[str, Any]
        try:
            answer, files = _SERVED[request["op"]](self, request)
        except CheckpointError as error:
            answer = {"error": str(error), "kind": "save"}
        except TimeoutError as error:
            replicated = self._service.replicated(self._worker)
            answer = {"error": str(error), "kind": "timeout", "replicated": replicated}
        except (OSError, ValueError, LookupError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "request"}
            if request["n"] == 0:  # it would wait for what nobody does
                log.warning("worker %d is dropped: %s", self._worker.local_rank, answer["error"])
                self._worker.requests.hang_up()
        self._worker.requests.answer(request, answer, files)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def memory(self, request: Mapping[str, Any]) -> Answer:
        """Lend the worker its memory."""
        self._worker.begun = self._worker.begun or request.get("begun") is True
        segment = self._service.lend(self._worker, int(request["size"]))
        return {"size": segment.size}, [segment.fd]

    def begin(self, request: Mapping[str, Any]) -> Answer:
        """Have the worker wait for the save in flight, and begin the next."""
        self._worker.begun = self._service.begin_save(
            self._worker, request["wait"] is True, request.get("timeout")
        )
        return {"begun": self._worker.begun, **self._service.last(self._worker)}, []

    def staged(self, request: Mapping[str, Any]) -> Answer:
        """Take over what the worker has left in its memory, and write it."""
        shard = shard_from_json(request["shard"])
        try:
            write = self._service.take(self._worker, shard, int(request["memory"]))
        except SaveError as error:
            self._service.refuse(self._worker, shard, str(error))
            return {}, []
        write()
        return {}, []

    def abandon(self, request: Mapping[str, Any]) -> Answer:
        """Note that the worker stages nothing of what it has begun."""
        self._worker.begun = False
        stage = request.get("stage")
        self._service.queue.abandon(self._worker.rank, None if stage is None else Stage(**stage))
        return {}, []

    def wait(self, request: Mapping[str, Any]) -> Answer:
        """Have the worker wait until its saves are on the disk."""
        self._service.queue.wait(self._worker.rank, request.get("timeout"))
        return self._service.last(self._worker), []

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
