"""The worker's end of its agent's saver (protocol: elaunch.wire.saver).

They are requests on the worker's one connection to its agent, each with a deadline.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from elaunch.errors import SaveError
from elaunch.training.checkpoint.saver.pages import release, touch
from elaunch.training.place.placement import Placement
from elaunch.wire.local import Received, close_files
from elaunch.wire.saver import (
    ANSWER_S,
    AT_ONCE,
    CLOSE_S,
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
    from elaunch.training.agentlink import AgentLink

ADMIT_S: Final = 300.0
"""Seconds for the agent to bring to an end what earlier rounds left in the directory."""
MEMORY_S: Final = 120.0
"""Seconds for the agent to make memory; more where that is large."""
SLOWEST: Final = 1 << 28
"""Bytes per second that are made at least, beside the other ranks' memory."""
RECALL_S: Final = 60.0

log = logging.getLogger("elaunch")


class AgentSaverClient:
    """The agent's saver for a rank, from :meth:`connect` to :meth:`close`; see ``Saver``."""

    lacks = ""

    def __init__(self, link: AgentLink, placement: Placement, place: str) -> None:
        self._link = link
        self._placement = placement
        self._place = place
        self._asking = threading.Lock()
        self._pid = os.getpid()
        self._connected = False
        self._view: memoryview | None = None

    def connect(self, round_number: int) -> None:
        """Have the agent serve this rank.

        Raises SaveError if the agent refuses this worker, OSError if it cannot be reached.
        """
        found = self._placement
        try:
            answer, _ = self._link.ask(
                "checkpoint",
                ADMIT_S,
                round=round_number,
                rank=found.rank,
                local_rank=found.local_rank,
                place=self._place,
            )
        except OSError:
            if not self._link.refusal:
                raise
            answer = {"error": self._link.refusal}
        if not answer.get("ok"):
            why = answer.get("error", "it gives no reason")
            raise SaveError(f"the agent writes no checkpoints for this worker: {why}")
        self._connected = True

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
            close_files(files)
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
                close_files(files)
        return found

    def close(self, patient: bool = True) -> None:
        """Wait for what is in flight; without ``patient`` do not."""
        if not self._connected or os.getpid() != self._pid:
            return
        try:
            if patient:
                self._ask("wait", CLOSE_S + MARGIN_S, timeout=CLOSE_S)
        finally:
            self._connected = False
            self._view = None

    def _ask(self, op: str, seconds: float, **fields: object) -> Received:
        """Make one request; SaveError if it is refused, or not answered within ``seconds``."""
        if os.getpid() != self._pid:
            raise SaveError(
                "a process forked from the worker cannot save: the worker itself has to"
            )
        if not self._connected:
            raise SaveError("this node's agent is gone, or its saver was closed")
        with self._asking:
            try:
                answer, files = self._link.ask(op, seconds, **fields)
            except OSError as error:
                raise SaveError(_gone(error)) from error
        if not answer.get("ok"):
            close_files(files)
            raise SaveError(str(answer.get("error")))
        return answer, files


def _limit(timeout: float | None) -> float:
    return threading.TIMEOUT_MAX if timeout is None else timeout + MARGIN_S


def _gone(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "this node's agent does not answer: it is frozen, or the storage it waits for is"
    return f"this node's agent is gone: {error.strerror or error}"


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
