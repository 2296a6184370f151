"""The worker's end of its agent's saver (protocol: elaunch.wire.worker).

They are requests on the worker's one connection to its agent, each with a deadline. The shards are
copied into memory of the agent's, which writes them out, whatever becomes of the worker.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from elaunch.env import AGENT_SOCKET
from elaunch.errors import SaveError
from elaunch.training.launch import Placement
from elaunch.wire.local import Message, Received, close_files
from elaunch.wire.worker import (
    ANSWER_S,
    AT_ONCE,
    CLOSE_S,
    MARGIN_S,
    Files,
    StagedShard,
    committed_from_json,
    committed_to_json,
    files_from_json,
)

if TYPE_CHECKING:
    from elaunch.checkpoint.records import Committed, Stage
    from elaunch.training.agentlink import AgentLink

SLICE: Final = 64 << 20
"""Bytes that are touched in one call, in which no other thread of Python runs."""
POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14


def touch(mapping: mmap.mmap) -> None:
    """Have the pages of ``mapping`` in place, so that no copy into it waits for them."""
    size = len(mapping)
    for at in range(0, size, SLICE):
        length = min(SLICE, size - at)
        try:
            mapping.madvise(POPULATE_WRITE, at, length)
        except (OSError, ValueError):  # an older kernel
            view = memoryview(mapping)
            pages = view[at : at + length : mmap.PAGESIZE]
            pages[:] = pages.tobytes()


def unmap(views: Sequence[memoryview]) -> None:
    """End views and the mappings that they are of, beside the caller: that takes a while.

    A mapping that somebody still has a part of goes with that part.
    """
    mappings = {id(view.obj): view.obj for view in views if isinstance(view.obj, mmap.mmap)}
    for view in views:
        release(view)

    def close() -> None:
        for mapping in mappings.values():
            with contextlib.suppress(BufferError):
                mapping.close()

    if mappings:
        try:
            threading.Thread(target=close, name="unmap", daemon=True).start()
        except RuntimeError:  # no thread can be had
            close()


def release(view: memoryview) -> None:
    """End a view of memory, unless somebody still has a part of it."""
    try:
        view.release()
    except BufferError:
        return


ADMIT_S: Final = 300.0
"""Seconds for the agent to bring to an end what earlier rounds left in the directory."""
MEMORY_S: Final = 120.0
"""Seconds for the agent to make memory; more where that is large."""
SLOWEST: Final = 1 << 28
"""Bytes per second that are made at least, beside the other ranks' memory."""
RECALL_S: Final = 60.0

log = logging.getLogger("elaunch")


class StillInFlight(SaveError):
    """A save is not over after the seconds that it was waited for; it goes on."""


class AgentSaverClient:
    """The agent's saver for a rank, from :meth:`connect` to :meth:`close`.

    The methods are called by one thread at a time. All of them raise SaveError if the agent is gone
    or refuses; none of them waits for ever. One whose save came to nothing is ``lost``; it is
    raised once.

    ``last`` is the newest checkpoint that a save of this rank has become, as far as the agent has
    reported; None on nodes other than rank 0's, whose agents do not commit. ``replicated`` is the
    uuid of the newest save whose shard of this rank is in another node's memory, too.
    """

    def __init__(self, link: AgentLink, placement: Placement, place: str) -> None:
        self._link = link
        self._placement = placement
        self._place = place
        self._asking = threading.Lock()
        self._pid = os.getpid()
        self._connected = False
        self._begun = self._is_quick = False
        self._staged = ""
        """The uuid of the save that this rank has staged last."""
        self._over: Message = {}
        """The agent's last message that a save is over."""
        self._view: memoryview | None = None
        self._inode = 0
        self.last: Committed | None = None
        self.replicated = ""

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
                local_rank=self._link.local_rank,
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
        self._link.on_over = self._note_over

    # ── what a script's calls need ───────────────────────────────────────────────────────────────

    def fence(self, round_number: int) -> None:
        """Return if ``round_number`` is still the round; raise SaveError if it is over.

        The committing process calls it right before COMMIT.
        """
        self._ask("fence", ANSWER_S, round=round_number)

    def committed(self, done: Committed, seconds: float) -> None:
        """Have the run's record count a checkpoint that the ranks have written themselves.

        Rank 0 calls it after the commit. An agent that is gone is no error: the checkpoint is
        there.
        """
        fields = committed_to_json(done)
        try:
            self._ask("committed", ANSWER_S, committed=fields, took=round(seconds, 3))
        except SaveError as error:
            log.debug("the agent does not count %s: %s", done.name, error)

    def memory(self, size: int) -> memoryview:
        """Return ``size`` bytes or more of the agent's memory, mapped and touched.

        It is mostly the same until a larger one is asked for; another one ends the views of the
        old one. Between :meth:`begin` and :meth:`staged` it may be written to, once all ranks have
        begun and this was called: then what it held can be recalled no more. Raises SaveError if
        the ranks of the node together would be over --checkpoint-memory.
        """
        if (
            self._view is not None
            and self._view.nbytes >= size
            and (self._is_quick or not self._begun)
        ):
            if self._begun:
                self._post("memory", size=size, begun=True)
            return self._view
        seconds = MEMORY_S + size / SLOWEST
        answer, files = self._ask("memory", seconds, size=size, begun=self._begun)
        try:
            inode = os.fstat(files[0]).st_ino
            if self._view is None or inode != self._inode:
                self._map(files[0], int(answer["size"]), inode)
        except (OSError, ValueError) as error:
            raise SaveError(f"the agent's memory cannot be mapped: {error}") from error
        finally:
            close_files(files)
        assert self._view is not None  # mapped
        return self._view

    def _map(self, file: int, size: int, inode: int) -> None:
        if self._view is not None:
            release(self._view)
            self._view = None  # what the script still has of it keeps it mapped
        mapping = mmap.mmap(file, size)
        touch(mapping)
        self._view, self._inode = memoryview(mapping), inode

    @property
    def is_over(self) -> bool:
        """Whether the agent has reported that this rank's last save is over."""
        return bool(self._staged) and self._over.get("uuid") == self._staged

    def begin(self, wait: bool, timeout: float | None = None) -> bool:
        """Wait for the save in flight; True: this rank has nothing in flight any more.

        False: one is in flight and ``wait`` is False, or ``timeout`` seconds are over. Raises a
        lost SaveError if the save before came to nothing. The agent is not asked if it ``is_over``.
        """
        answer = self._over  # the link's thread may replace it
        self._is_quick = bool(self._staged) and answer.get("uuid") == self._staged
        if not self._is_quick:
            limit = _limit(timeout) if wait else ANSWER_S
            answer, _ = self._ask("begin", limit, wait=wait, timeout=timeout)
        self.last = committed_from_json(answer["committed"])
        self._begun = self._is_quick or bool(answer["begun"])
        return self._begun

    def staged(self, shard: StagedShard) -> None:
        """Stage what is in the memory; it is the agent's, even if this process ends at once.

        Every rank of ``shard.stage`` has to stage its shard, or the save is discarded. So it is if
        the agent refuses a shard: the next call raises that.
        """
        self._begun, self._staged = False, shard.stage.uuid
        # Not asdict, which copies all of it.
        fields = {**vars(shard), "stage": vars(shard.stage), "header": vars(shard.header)}
        self._post("staged", shard=fields, memory=self._inode)

    def abandon(self, stage: Stage | None = None) -> None:
        """Take back :meth:`begin`: this rank stages nothing, so what others have staged is lost.

        ``stage``: the ranks have agreed, each calling this, that this checkpoint comes to nothing,
        also where this rank has staged its shard. No later call raises for it.
        """
        self._begun = False
        self._ask("abandon", ANSWER_S, stage=None if stage is None else asdict(stage))

    def wait(self, timeout: float | None = None) -> Committed | None:
        """Wait until no save of this rank is in flight; return :attr:`last`.

        Raises StillInFlight if that takes longer than ``timeout`` seconds, a lost SaveError if a
        save came to nothing.
        """
        answer, _ = self._ask("wait", _limit(timeout), timeout=timeout)
        self.last = committed_from_json(answer["committed"])
        return self.last

    def recall(
        self,
        step: int,
        round_number: int,
        ranks: Collection[int],
        uuid: str = "",
        timeout: float | None = None,
    ) -> dict[int, dict[str, memoryview]]:
        """Return the shards of a checkpoint that are in living agents' memory: rank → path → bytes.

        ``uuid`` is the checkpoint's; "" takes any of that step and round. Only those of ``ranks``
        that are there. Not to be written to, and valid until a rank of this node calls
        :meth:`memory` after :meth:`begin`: loading ends, on all ranks, before that.
        """
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
                for row, fd in zip(answer["shards"], files, strict=True):
                    found[int(row["rank"])] = _mapped(fd, files_from_json(row["files"]))
            except (OSError, ValueError, TypeError) as error:
                raise SaveError(f"the agent's memory cannot be mapped: {error}") from error
            finally:
                close_files(files)
        return found

    def close(self, patient: bool = True) -> None:
        """Wait a bounded time for what is in flight; without ``patient`` do not.

        The agent goes on with it either way. Raises SaveError, once, if a save came to nothing, or
        takes longer.
        """
        if not self._connected or os.getpid() != self._pid:
            return
        try:
            if patient:
                self._ask("wait", CLOSE_S + MARGIN_S, timeout=CLOSE_S)
        finally:
            self._connected = False
            self._view = None

    def _note_over(self, message: Message) -> None:
        """Note that a save is over; in the link's thread."""
        self._over = message

    def _post(self, op: str, **fields: object) -> None:
        """Make a request that is not answered; SaveError if the agent cannot get it."""
        self._check_connected()
        with self._asking:
            try:
                self._link.post(op, ANSWER_S, **fields)
            except OSError as error:
                raise SaveError(_gone(error)) from error

    def _check_connected(self) -> None:
        if os.getpid() != self._pid:
            raise SaveError(
                "a process forked from the worker cannot save: the worker itself has to"
            )
        if not self._connected:
            raise SaveError("this node's agent is gone, or its saver was closed")

    def _ask(self, op: str, seconds: float, **fields: object) -> Received:
        """Make one request; SaveError if it is refused, or not answered within ``seconds``."""
        self._check_connected()
        with self._asking:
            try:
                answer, files = self._link.ask(op, seconds, **fields)
            except OSError as error:
                raise SaveError(_gone(error)) from error
        self.replicated = str(answer.get("replicated", self.replicated))
        if not answer.get("ok"):
            close_files(files)
            raise _refusal(answer)
        return answer, files


def connected(
    link: AgentLink | None, placement: Placement, place: str, round_number: int
) -> tuple[AgentSaverClient | None, str]:
    """Return the agent's saver for this rank; without an agent, why there is none.

    An agent that cannot be reached at all is no reason for a script to fail. ``place`` is the
    directory or URL, ``round_number`` that of the names of the checkpoints that are written. Raises
    SaveError where the agent refuses this worker: the round is over, or the directory is another
    job's.
    """
    if link is None:
        return None, f"{AGENT_SOCKET} is not set"
    saver = AgentSaverClient(link, placement, place)
    try:
        saver.connect(round_number)
    except OSError as error:
        return None, link.problem or str(error)
    return saver, ""


def _refusal(answer: Mapping[str, Any]) -> SaveError:
    kind, text = answer.get("kind"), str(answer.get("error"))
    error = StillInFlight(text) if kind == "timeout" else SaveError(text)
    error.lost = kind == "save"
    return error


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
