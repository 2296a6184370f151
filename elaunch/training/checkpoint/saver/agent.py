"""The worker's end of its agent's saver (protocol: elaunch.wire.saver).

Requests are sent one after the other, each with a deadline. An answer that comes too late is
passed over: it has the number of its request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elaunch.errors import SaveError
from elaunch.training.checkpoint.saver.pages import release, touch
from elaunch.training.place.placement import Placement
from elaunch.wire.control import short_address
from elaunch.wire.saver import (
    ANSWER_S,
    CLOSE_S,
    LONGEST_LINE,
    MARGIN_S,
    Files,
    Handed,
    committed_from_json,
    committed_to_json,
    files_from_json,
    handed_to_json,
)

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Committed, Stage

ADMIT_S: Final = 300.0
"""Seconds for the agent to bring to an end what earlier rounds left in the directory."""
MEMORY_S: Final = 120.0
"""Seconds for the agent to make memory; more where that is large."""
SLOWEST: Final = 1 << 28
"""Bytes per second that are made at least, beside the other ranks' memory."""
RECALL_S: Final = 60.0
AT_ONCE: Final = 64
"""Shards that are asked for in one request: each brings a descriptor."""


log = logging.getLogger("elaunch")


class AgentSaverClient:
    """A connection to this node's agent, from :meth:`connect` to :meth:`close`; see ``Saver``."""

    lacks = ""

    def __init__(self, path: Path, placement: Placement, place: str) -> None:
        self._path = path
        self._placement = placement
        self._place = place
        self._asking = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._number = 0
        self._unread = bytearray()
        self._files: list[int] = []
        self._view: memoryview | None = None

    def connect(self, round_number: int) -> None:
        """Connect, and register this worker.

        Raises SaveError if the agent refuses this worker, OSError if it cannot be reached.
        """
        self._pid = os.getpid()
        found = self._placement
        line = {"op": "checkpoint", "round": round_number, "rank": found.rank}
        line |= {"local_rank": found.local_rank, "pid": self._pid, "place": self._place}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ANSWER_S)
            with short_address(self._path) as address:
                connection.connect(address)
            self._socket = connection
            connection.sendall(_line(line))
            answer = self._receive(time.monotonic() + ADMIT_S)
        except OSError:
            connection.close()
            self._socket = None
            raise
        if not answer.get("ok"):
            connection.close()
            self._socket = None
            why = answer.get("error", "it gives no reason")
            raise SaveError(f"the agent writes no checkpoints for this worker: {why}")

    # ── Saver ───────────────────────────────────────────────────────────────────────────────────

    def fence(self, round_number: int) -> None:
        """Ask whether ``round_number`` is still the round; SaveError if not."""
        self._ask("fence", ANSWER_S, round=round_number)

    def committed(self, done: Committed, seconds: float) -> None:
        """Have the agent count a checkpoint that it has not written."""
        fields = committed_to_json(done)
        try:
            self._ask("committed", ANSWER_S, committed=fields, took=round(seconds, 3))
        except SaveError as error:
            log.debug("the agent does not count %s: %s", done.name, error)

    def memory(self, size: int) -> memoryview:
        """Return memory of the agent's, mapped and touched."""
        if self._view is not None and self._view.nbytes >= size:
            return self._view
        if self._view is not None:
            release(self._view)
            self._view = None  # what the script still has of it keeps it mapped
        answer, files = self._ask("memory", MEMORY_S + size / SLOWEST, size=size)
        try:
            mapping = mmap.mmap(files[0], int(answer["size"]))
        except (OSError, ValueError) as error:
            raise SaveError(f"the agent's memory cannot be mapped: {error}") from error
        finally:
            _close(files)
        touch(mapping)
        self._view = memoryview(mapping)
        return self._view

    def begin(self, wait: bool, timeout: float | None = None) -> bool:
        """Wait for the save in flight; whether the memory may be overwritten."""
        limit = _limit(timeout) if wait else ANSWER_S
        answer, _ = self._ask("begin", limit, wait=wait, timeout=timeout)
        return bool(answer["begun"])

    def staged(self, handed: Handed) -> None:
        """Stage what is in the memory."""
        self._ask("staged", ANSWER_S, handed=handed_to_json(handed))

    def abandon(self, stage: Stage | None = None) -> None:
        """Take back ``begin``."""
        self._ask("abandon", ANSWER_S, stage=None if stage is None else asdict(stage))

    def share(self, wait: bool, timeout: float) -> None:
        """Do nothing: the agents report to each other."""

    def wait(self, timeout: float | None = None) -> Committed | None:
        """Wait until nothing is in flight; the newest that was committed."""
        answer, _ = self._ask("wait", _limit(timeout), timeout=timeout)
        return committed_from_json(answer["committed"])

    def recall(
        self,
        step: int,
        round_number: int,
        ranks: Collection[int],
        uuid: str = "",
        timeout: float | None = None,
    ) -> dict[int, dict[str, memoryview]]:
        """Return the shards of a checkpoint that are in living agents' memory."""
        found: dict[int, dict[str, memoryview]] = {}
        wanted, seconds = sorted(set(ranks)), RECALL_S if timeout is None else timeout
        until = time.monotonic() + seconds
        for at in range(0, len(wanted), AT_ONCE):
            left = max(0.1, until - time.monotonic())
            answer, files = self._ask(
                "recall",
                left + ANSWER_S,
                step=step,
                round=round_number,
                uuid=uuid,
                timeout=left,
                ranks=wanted[at : at + AT_ONCE],
            )
            try:
                for part, fd in zip(answer["parts"], files, strict=True):
                    found[int(part["rank"])] = _mapped(fd, files_from_json(part["files"]))
            except (OSError, ValueError, TypeError) as error:
                raise SaveError(f"the agent's memory cannot be mapped: {error}") from error
            finally:
                _close(files)
        return found

    def close(self, patient: bool = True) -> None:
        """Wait for what is in flight, then disconnect; without ``patient`` at once."""
        connection = self._socket
        if connection is None or os.getpid() != self._pid:
            return
        try:
            if patient:
                self._ask("wait", CLOSE_S + MARGIN_S, timeout=CLOSE_S)
        finally:
            self._socket = None
            self._view = None
            connection.close()

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def _ask(self, op: str, seconds: float, **fields: object) -> tuple[dict[str, Any], list[int]]:
        """Make one request; SaveError if it is refused, or not answered within ``seconds``."""
        if os.getpid() != self._pid:
            raise SaveError(
                "a process forked from the worker cannot save: the worker itself has to"
            )
        with self._asking:
            if self._socket is None:
                raise SaveError("this node's agent is gone, or its saver was closed")
            self._number += 1
            until = time.monotonic() + seconds
            try:
                self._send({"op": op, "n": self._number, **fields}, seconds)
                answer = self._receive(until)
                while answer.get("n") != self._number and "n" in answer:
                    _close(self._take_files())  # it answers what nobody waits for any more
                    answer = self._receive(until)
            except OSError as error:
                raise SaveError(_gone(error)) from error
            files = self._take_files()
        if not answer.get("ok"):
            _close(files)
            raise SaveError(str(answer.get("error")))
        return answer, files

    def _send(self, fields: Mapping[str, object], seconds: float) -> None:
        connection = self._socket
        assert connection is not None  # asked by the caller
        connection.settimeout(seconds)
        try:
            connection.sendall(_line(fields))
        except OSError:  # half a line may be sent: what followed would be read as its rest
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            raise

    def _receive(self, until: float) -> dict[str, Any]:
        connection = self._socket
        assert connection is not None  # asked by the callers
        while b"\n" not in self._unread:
            connection.settimeout(max(0.01, until - time.monotonic()))
            chunk, files, _, _ = socket.recv_fds(connection, 1 << 16, 256)
            self._files += files
            if not chunk or len(self._unread) > LONGEST_LINE:
                raise ConnectionError("it has hung up")
            self._unread += chunk
        line, _, rest = self._unread.partition(b"\n")
        self._unread = bytearray(rest)
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ConnectionError(f"it answered something else than JSON: {error}") from error
        return said if isinstance(said, dict) else {}

    def _take_files(self) -> list[int]:
        files, self._files = self._files, []
        return files


def _line(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _limit(timeout: float | None) -> float:
    return threading.TIMEOUT_MAX if timeout is None else timeout + MARGIN_S


def _gone(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "this node's agent does not answer: it is frozen, or the storage it waits for is"
    return f"this node's agent is gone: {error.strerror or error}"


def _close(files: list[int]) -> None:
    for fd in files:
        os.close(fd)
    files.clear()


def _mapped(fd: int, files: Files) -> dict[str, memoryview]:
    """Map a shard and return its files; one that does not lie in one piece is copied."""
    size = os.fstat(fd).st_size
    # Not populated: the pages are there, and a reader maps sixteen of them with each fault.
    whole = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    found = {}
    for path, extents in files:
        pieces = [whole[at : at + length] for at, length in extents]
        found[path] = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    return found
