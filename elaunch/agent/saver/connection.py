"""What one worker asks of its agent's saver, request by request (elaunch.wire.saver).

What was sent is done, also where the worker has ended meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from elaunch.agent.saver.memory import Segment
from elaunch.agent.saver.shards import Shards
from elaunch.agent.saver.surroundings import RoundSurroundings
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.writing.queue import SaveQueue
from elaunch.errors import CheckpointError
from elaunch.wire.local import Message, Requests
from elaunch.wire.saver import (
    Handed,
    committed_from_json,
    committed_to_json,
    files_to_json,
    handed_from_json,
)

SEND_S: Final = 10.0
"""Seconds for the worker to take an answer."""

log = logging.getLogger("elaunch")

Answer = tuple[Mapping[str, Any], list[int]]


class SaverRequests(Protocol):
    """What a worker's connection asks of the saver: elaunch.agent.saver.service."""

    keeping: SaveQueue
    parts: Shards
    world: RoundSurroundings

    def left(self, connection: SaverConnection) -> None:
        """Note that the connection has ended."""

    def lend(self, connection: SaverConnection, size: int) -> Segment:
        """Return the worker's memory."""

    def begin_save(self, connection: SaverConnection, wait: bool, timeout: float | None) -> bool:
        """Wait until the worker may overwrite its memory."""

    def take(self, connection: SaverConnection, handed: Handed) -> None:
        """Take over what the worker has left in its memory."""


class SaverConnection:
    """One worker that the saver has let in, in the thread that answers its requests."""

    def __init__(self, requests: Requests, rank: int, local_rank: int, round_: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.round = round_
        self.begun = False
        self._requests = requests

    def close(self) -> None:
        """Hang up; what has come is still done."""
        self._requests.hang_up()

    def serve(self, service: SaverRequests, request: Message) -> None:
        """Do what is asked, and answer it."""
        files: Sequence[int] = ()
        answer: Mapping[str, Any]
        try:
            answer, files = _SERVED[request["op"]](self, service, request)
        except CheckpointError as error:
            answer = {"error": str(error), "kind": "save"}
        except TimeoutError as error:
            answer = {"error": str(error), "kind": "timeout"}
        except (OSError, ValueError, LookupError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "request"}
        reply(self._requests, request, answer, files)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def memory(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Lend the worker its memory."""
        segment = service.lend(self, int(said["size"]))
        return {"size": segment.size}, [segment.fd]

    def begin(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Have the worker wait for its turn."""
        self.begun = service.begin_save(self, said["wait"] is True, said.get("timeout"))
        return self._last(service, {"begun": self.begun})

    def staged(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Take over what the worker has left in its memory."""
        service.take(self, handed_from_json(said["handed"]))
        return self._last(service, {})

    def abandon(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Note that nothing comes of what was begun."""
        self.begun = False
        stage = said.get("stage")
        service.keeping.abandon(self.rank, None if stage is None else Stage(**stage))
        return {}, []

    def wait(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Have the worker wait until its saves are on the disk."""
        service.keeping.wait(self.rank, said.get("timeout"))
        return self._last(service, {})

    def fence(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Answer whether the worker's round is still the one."""
        service.world.fence(int(said["round"]))
        return {}, []

    def committed(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Count a checkpoint that the ranks have written and committed without the agent."""
        done = committed_from_json(said["committed"])
        if done is not None:
            service.keeping.committed_by_rank(done, float(said["took"]))
        return {}, []

    def recall(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Show the worker what is in memory of a checkpoint."""
        wanted = (int(said["step"]), int(said["round"]), str(said["uuid"]))
        ranks = [int(rank) for rank in said["ranks"]]
        found = service.parts.find(wanted, ranks, float(said["timeout"]))
        parts = [{"rank": r, "files": files_to_json(files)} for r, (files, _) in found.items()]
        return {"parts": parts}, [segment.fd for _, segment in found.values()]

    def _last(self, service: SaverRequests, fields: dict[str, Any]) -> Answer:
        return {**fields, "committed": committed_to_json(service.keeping.last(self.rank))}, []


def reply(
    requests: Requests, request: Message, answer: Mapping[str, Any], files: Sequence[int] = ()
) -> None:
    """Answer a request; a worker that is gone, or does not read, has nothing of it."""
    try:
        requests.answer(request, answer, files, SEND_S)
    except OSError as error:  # what else the worker has sent is still to be done
        log.debug("an answer is not read: %s", error)


_SERVED: Final[
    Mapping[str, Callable[[SaverConnection, SaverRequests, Mapping[str, Any]], Answer]]
] = {
    "memory": SaverConnection.memory,
    "begin": SaverConnection.begin,
    "staged": SaverConnection.staged,
    "abandon": SaverConnection.abandon,
    "wait": SaverConnection.wait,
    "fence": SaverConnection.fence,
    "committed": SaverConnection.committed,
    "recall": SaverConnection.recall,
}
