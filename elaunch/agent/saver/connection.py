"""One worker's connection to its agent's saver: reads its requests, answers them in order.

What was sent is done, also where the worker has ended meanwhile: the lines before the end of the
connection are read to the last whole one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from elaunch.agent.saver.memory import Segment
from elaunch.agent.saver.shards import Shards
from elaunch.agent.saver.surroundings import RoundSurroundings
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.writing.queue import SaveQueue
from elaunch.errors import CheckpointError
from elaunch.wire.saver import (
    LONGEST_LINE,
    Handed,
    committed_from_json,
    committed_to_json,
    files_to_json,
    handed_from_json,
)

CHUNK: Final = 1 << 18
SEND_S: Final = 10
"""Seconds for the worker to take an answer."""

log = logging.getLogger("elaunch")

Answer = tuple[Mapping[str, Any], list[int]]


class SaverRequests(Protocol):
    """What a worker's connection asks of the saver: elaunch.agent.saver.service."""

    keeping: SaveQueue
    parts: Shards
    world: RoundSurroundings

    def admit(self, connection: SaverConnection) -> None:
        """Let the worker in; CheckpointError says why not."""

    def left(self, connection: SaverConnection) -> None:
        """Note that the connection has ended."""

    def lend(self, connection: SaverConnection, size: int) -> Segment:
        """Return the worker's memory."""

    def begin_save(self, connection: SaverConnection, wait: bool, timeout: float | None) -> bool:
        """Wait until the worker may overwrite its memory."""

    def take(self, connection: SaverConnection, handed: Handed) -> None:
        """Take over what the worker has left in its memory."""


class SaverConnection:
    """Serves one worker in a thread of its own, until it hangs up."""

    def __init__(self, sock: socket.socket, rank: int, local_rank: int, round_: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.round = round_
        self.begun = False
        self._sock = sock

    def start(self, service: SaverRequests) -> None:
        """Begin to serve."""
        self._sock.setblocking(True)
        limit = struct.pack("@ll", SEND_S, 0)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        name = f"saver rank {self.rank}"
        threading.Thread(target=self._run, args=(service,), name=name, daemon=True).start()

    def close(self) -> None:
        """Hang up; the thread ends when it has done what it is at."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("rank %d had hung up: %s", self.rank, error)

    def _run(self, service: SaverRequests) -> None:
        try:
            if self._greet(service):
                self._read(service)
        except Exception:
            log.exception("the saver cannot serve rank %d any more", self.rank)
        finally:
            self._sock.close()
            service.left(self)

    def _greet(self, service: SaverRequests) -> bool:
        try:
            service.admit(self)
        except (CheckpointError, OSError) as error:
            self._send({"error": str(error)})
            return False
        self._send({"ok": True})
        return True

    def _read(self, service: SaverRequests) -> None:
        unread = bytearray()
        while True:
            try:
                chunk = self._sock.recv(CHUNK)
            except OSError as error:  # what had come was read before the kernel says this
                log.debug("rank %d: %s", self.rank, error)
                return
            if not chunk:
                return
            searched = len(unread)
            unread += chunk
            while (end := unread.find(b"\n", searched)) >= 0:
                line, searched = bytes(unread[:end]), 0
                del unread[: end + 1]
                self._serve(service, line)
            if len(unread) > LONGEST_LINE:
                log.warning("rank %d sent a line of more than %d bytes", self.rank, LONGEST_LINE)
                return

    def _serve(self, service: SaverRequests, line: bytes) -> None:
        number, files = None, list[int]()
        answer: Mapping[str, Any]
        try:
            said = json.loads(line)
            number = said["n"]
            serve = _SERVED[said["op"]]
            answer, files = serve(self, service, said)
        except CheckpointError as error:
            answer = {"error": str(error), "kind": "save"}
        except TimeoutError as error:
            answer = {"error": str(error), "kind": "timeout"}
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "request"}
        self._send({"n": number, "ok": "error" not in answer, **answer}, files)

    def _send(self, fields: Mapping[str, Any], files: list[int] | None = None) -> None:
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        try:
            sent = socket.send_fds(self._sock, [line], files or [])
            self._sock.sendall(line[sent:])
        except OSError as error:
            # It has ended, or a part of the answer is sent: what followed it would be read as its
            # rest. What else the worker has sent is still to be read.
            log.debug("rank %d does not read its answers: %s", self.rank, error)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def memory(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Lend the worker its memory."""
        segment = service.lend(self, int(said["size"]))
        return {"size": segment.size}, [segment.fd]

    def begin(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Have the worker wait for its turn."""
        self.begun = service.begin_save(self, said["wait"] is True, said.get("timeout"))
        return self._newest(service, {"begun": self.begun})

    def staged(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Take over what the worker has left in its memory."""
        service.take(self, handed_from_json(said["handed"]))
        return self._newest(service, {})

    def abandon(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Note that nothing comes of what was begun."""
        self.begun = False
        stage = said.get("stage")
        service.keeping.abandon(self.rank, None if stage is None else Stage(**stage))
        return {}, []

    def wait(self, service: SaverRequests, said: Mapping[str, Any]) -> Answer:
        """Have the worker wait until its saves are on the disk."""
        service.keeping.wait(self.rank, said.get("timeout"))
        return self._newest(service, {})

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

    def _newest(self, service: SaverRequests, fields: dict[str, Any]) -> Answer:
        return {**fields, "committed": committed_to_json(service.keeping.newest(self.rank))}, []


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
