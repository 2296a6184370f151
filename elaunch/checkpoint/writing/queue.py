"""The save queue: memory → disk → commit, in the background, as an agent does it for its workers.

A thread of its own writes each staged shard and its manifest; the thread that brings the last
manifest commits.

==============================  ==================================================================
what goes wrong                 what becomes of it
==============================  ==================================================================
a shard never comes             the save is discarded when its rank has ended, at the end of the
                                round, or after ``PART_DEADLINE_S`` without a sign of it
the disk is full                what retention allows is removed, the shard is written once more
it is still full, or broken     the save is discarded; the next call of each of its ranks raises
a copy cannot be written        that is logged: the node whose shard it is may have written it
the storage hangs               the save is given up; its memory stays out of use until the
                                storage answers, and what then is written is discarded
the round is over               nothing is committed, unless the next one has resumed from it, out
                                of memory; the process that chooses the next round's checkpoint
                                finishes or clears the stage (``finish_stages``)
==============================  ==================================================================

A save that fails does not fail the job. All methods may be called from any thread.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

from elaunch.checkpoint.records import Committed, Image, Stage
from elaunch.checkpoint.storage.atonce import stand_back
from elaunch.checkpoint.storage.storage import Storage
from elaunch.checkpoint.writing import inflight as saves
from elaunch.checkpoint.writing.inflight import Save, SavesInFlight
from elaunch.checkpoint.writing.pace import Pace
from elaunch.errors import ElaunchError, SaveError
from elaunch.wire.saver import Handed

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
WORD_S = 60.0
"""Seconds between two messages to other nodes that a shard is still being written."""

log = logging.getLogger("elaunch")


class QueueSurroundings(Protocol):
    """What a :class:`SaveQueue` needs of the process that it is in; called from its threads."""

    def own_ranks(self) -> frozenset[int]:
        """Return the ranks of the round that stage their shards here; must not block."""

    def commits(self, handed: Handed) -> bool:
        """Whether this process commits the save that ``handed`` belongs to."""

    def fence(self, stage: Stage) -> None:
        """Raise SaveError unless its round is still the round, or the round has resumed from it."""

    def released(self, handed: Handed) -> None:
        """Note that the memory of this shard is read no more, whether it was written or not."""

    def sealed(self, handed: Handed, manifest: bytes) -> None:
        """Send a written shard's manifest to those that wait for it; may raise SaveError."""

    def failed(self, handed: Handed, problem: str) -> None:
        """Send to those that wait for a shard elsewhere that it will not come."""

    def writing(self, handed: Handed) -> None:
        """Send to those that wait for a shard elsewhere that it is still being written."""

    def committed(self, handed: Handed, done: Committed) -> None:
        """Remove what retention lets go, now that there is a newer one."""

    def make_room(self, handed: Handed) -> bool:
        """Remove what retention lets go on a full disk; False if there was nothing."""


@dataclass(frozen=True)
class Settled:
    """What became of the saves that the end of a round found in flight."""

    committed: tuple[Committed, ...] = ()
    lost: tuple[str, ...] = ()


class SaveQueue:
    """Owns the saves of one process in one storage, and the threads that write them."""

    def __init__(self, storage: Storage, around: QueueSurroundings) -> None:
        self.storage = storage
        self._around = around
        self._books = SavesInFlight(str(storage.place))
        self._changed = self._books.changed
        self.join = self._books.join
        self.last = self._books.last
        self.record = self._books.record

    # ── requests of a rank ───────────────────────────────────────────────────────────────────────

    def begin(self, rank: int, wait: bool, timeout: float | None) -> bool:
        """Wait for the save in flight; see ``AgentSaverClient.begin``."""
        return self._books.await_idle(rank, timeout if wait else 0.0)

    def wait(self, rank: int, timeout: float | None) -> Committed | None:
        """Wait until nothing is in flight, or raise TimeoutError."""
        if not self._books.await_idle(rank, timeout):
            name = self._books.in_flight(rank)
            raise TimeoutError(f"{name} is not committed after {timeout:g} s")
        return self._books.last(rank)

    def stage(self, handed: Handed, memory: memoryview) -> Callable[[], None]:
        """Take the shard in ``memory``, which nobody changes meanwhile; return what has it written.

        The caller calls that, which returns at once, when it has answered the rank: threads that
        start, and write, would keep it from that. A rank that has not joined is another node's, of
        which this process has a copy. If the save has come to nothing already, the rank's next call
        raises that.
        """
        rank, books = handed.part.rank, self._books
        with self._changed:
            save = books.save(handed.stage, handed.part.world_size)
            if save.problem:
                self._around.released(handed)
                books.tell(rank, save)
                return _nothing
            copied = not books.knows(rank)
            if rank in save.handed or (save.done and not copied):
                raise SaveError(
                    f"checkpoint {save.stage.final}: the part of rank {rank} was handed over before"
                )
            save.handed[rank] = handed
            save.world_size = handed.part.world_size
            save.done = False  # this process may have been done with it, but for the copy
            save.commits = self._around.commits(save.lead())
            save.writing[rank] = Pace()
            books.drop_if_hopeless(save)
        if handed.part.copied != copied:
            handed = replace(handed, part=replace(handed.part, copied=copied))
        name = f"checkpoint {handed.stage.step} rank {rank}"
        work = partial(self._write, save, handed, memory)
        lead = save.writing[rank].lead
        return threading.Thread(target=lead, args=(work,), name=name, daemon=True).start

    def abandon(self, rank: int, stage: Stage | None = None) -> None:
        """Note that ``rank`` stages nothing of the save that it has begun.

        ``stage``: no rank's shard of that one counts; see ``AgentSaverClient.abandon``.
        """
        books = self._books
        for save in books.give_up(rank) if stage is None else books.call_off(rank, stage):
            _start(f"checkpoint {save.stage.step} end", self._end, save)

    def leave(self, rank: int) -> None:
        """Note that ``rank`` has ended: what it has not staged will not come."""
        for save in self._books.leave(rank):
            _start(f"checkpoint {save.stage.step} end", self._end, save)

    # ── what other nodes send ────────────────────────────────────────────────────────────────────

    def sealed_elsewhere(self, stage: Stage, rank: int, world_size: int, manifest: bytes) -> None:
        """Note that another node has written the shard of ``rank`` and its manifest."""
        with self._changed:
            save = self._books.save(stage, world_size)
            save.sealed[rank] = manifest
            commits = self._books.take_commit(save)
            self._changed.notify_all()
        if commits:
            _start(f"checkpoint {stage.step} commit", self._commit, save)

    def committed_by_rank(self, done: Committed, seconds: float) -> None:
        """Note a checkpoint that rank 0 has written with the others and committed itself."""
        with self._changed:
            self._books.count(done, seconds)

    def writing_elsewhere(self, stage: Stage, rank: int, world_size: int) -> None:
        """Note that another node still writes the shard of ``rank``."""
        with self._changed:
            self._books.save(stage, world_size).heard[rank] = time.monotonic()

    def failed_elsewhere(self, stage: Stage, problem: str) -> None:
        """Note that a shard of ``stage`` will not come from another node."""
        with self._changed:
            save = self._books.save(stage, 0)
            self._books.drop(save, problem)
        _start(f"checkpoint {stage.step} end", self._clear, save)

    # ── the end of a round ───────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        """End the waits of ranks, which have ended: their next requests are to be read."""
        with self._changed:
            self._books.ending = True
            self._changed.notify_all()

    def settle(
        self, until: float, patient: bool = False, going_on: Collection[str] = ()
    ) -> Settled:
        """Bring to an end what is in flight: no rank stages any more; monotonic ``until``.

        ``patient``: wait for shards of other nodes, too. Without it they are left to the process
        that chooses the next checkpoint, and so is the commit. A save is lost if it has no shard of
        an own rank, or if the storage has not taken it by ``until``. Those of ``going_on``, uuids,
        are not waited for: the next round can load them from memory.
        """
        with self._changed:
            self._books.gone |= self._around.own_ranks()
            open_ = [save for save in self._books.saves.values() if not save.done]
            hopeless = [save for save in open_ if self._books.drop_if_hopeless(save)]
            open_ = [save for save in open_ if save.done or save.stage.uuid not in going_on]

            def settled() -> bool:
                return not any(s.busy or (patient and s.commits) for s in open_ if not s.done)

            self._changed.wait_for(settled, max(0.0, until - time.monotonic()))
            for save in open_:
                if save.busy:
                    self._books.drop(save, "the storage has not taken it in time")
        for save in hopeless:
            _start(f"checkpoint {save.stage.step} end", self._end, save)
        done = tuple(save.committed for save in open_ if save.committed is not None)
        return Settled(done, tuple(f"{s.stage.final}: {s.problem}" for s in open_ if s.problem))

    def end_round(self, adopted: str = "") -> None:
        """Forget the round's ranks and what is still open of its saves.

        ``adopted`` is the uuid of the save that the next round resumes from, out of memory: it goes
        on, also where this process had done its part and commits from now on.
        """
        with self._changed:
            going_on = self._books.end_round(adopted)
            for save in going_on:
                save.commits = self._around.commits(save.lead())
                save.done = save.committed is not None or not (save.commits or save.busy)
            commits = [save for save in going_on if self._books.take_commit(save)]
            self._changed.notify_all()
        for save in commits:
            _start(f"checkpoint {save.stage.step} commit", self._commit, save)

    def send_again(self, uuid: str) -> None:
        """Send the manifests of the shards of this save that are written to those that wait."""
        with self._changed:
            known = [
                (save.handed[rank], seal)
                for save in self._books.saves.values()
                for rank, seal in save.sealed.items()
                if save.stage.uuid == uuid and rank in save.handed
            ]
        for handed, manifest in known:
            self._around.sealed(handed, manifest)

    def is_over(self, stage: Stage) -> bool:
        """Whether this process has committed a save, or given it up."""
        with self._changed:
            save = self._books.saves.get(stage.name)
            return save is not None and (save.committed is not None or bool(save.problem))

    def is_busy(self, uuids: Collection[str]) -> bool:
        """Whether threads of this process work on one of these saves."""
        with self._changed:
            return any(save.busy for save in self._books.saves.values() if save.stage.uuid in uuids)

    def await_rest(self, uuids: Collection[str]) -> None:
        """Wait until none does, however long that is."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy(uuids))

    def is_open(self, stage: Stage) -> bool:
        """Whether something is still expected of a save."""
        with self._changed:
            save = self._books.saves.get(stage.name)
            return save is not None and not save.done

    def is_sealed(self, stage: Stage, rank: int) -> bool:
        """Whether the shard of ``rank`` is known to be on a disk."""
        with self._changed:
            save = self._books.saves.get(stage.name)
            return save is not None and rank in save.sealed

    def left_sealed(self, stage: Stage, rank: int) -> bytes | None:
        """Return the manifest of ``rank`` in a save that no thread works on; None without one."""
        with self._changed:
            save = self._books.saves.get(stage.name)
            return None if save is None or save.busy else save.sealed.get(rank)

    def unfinished(self) -> tuple[str, ...]:
        """Return the names of the stages that threads of this process still write into.

        Stages that are complete and being committed are left out: they may be taken over.
        """
        with self._changed:
            saves = self._books.saves.items()
            return tuple(name for name, save in saves if save.writing or save.adopting)

    # ── the threads ──────────────────────────────────────────────────────────────────────────────

    def _write(self, save: Save, handed: Handed, memory: memoryview) -> None:
        """Write one shard, and commit if it was the last."""
        rank, problem, manifest = handed.part.rank, "", b""
        pace = save.writing[rank]
        with self._telling(handed, pace):
            try:
                try:
                    manifest = self._write_part(handed, memory, pace)
                finally:
                    self._around.released(handed)
                self._around.sealed(handed, manifest)
            except Exception as error:  # whatever it is: the save comes to nothing, the job goes on
                problem = told(error)
        with self._changed:
            del save.writing[rank]
            if not problem:
                save.sealed[rank] = manifest
            elif handed.part.copied:
                del save.handed[rank]
                name = save.stage.final
                log.warning("%s: the copy of rank %d's part: %s", name, rank, problem)
            else:
                self._books.drop(save, f"rank {rank}: {problem}")
            commits = self._books.take_commit(save)
            save.done = save.done or not (save.commits or save.busy or self._awaited(save))
            self._changed.notify_all()
        if problem and not handed.part.copied:
            self._around.failed(handed, problem)
        if commits:
            self._commit(save)
        else:
            self._clear(save)

    def _awaited(self, save: Save) -> bool:
        """Whether a rank of this process has yet to stage its shard."""
        return not save.adopted and bool(save.missing(self._around.own_ranks()))

    @contextmanager
    def _telling(self, handed: Handed, pace: Pace) -> Iterator[None]:
        """Report every WORD_S, to those that wait for the shard elsewhere, that it gets on."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(WORD_S):
                if time.monotonic() - pace.moved <= saves.WRITE_DEADLINE_S:
                    self._say_writing(handed)

        alone = handed.part.copied or handed.part.world_size <= len(self._around.own_ranks())
        if not alone:
            _start(f"checkpoint {handed.stage.step} word", tell)
        try:
            yield
        finally:
            over.set()

    def _say_writing(self, handed: Handed) -> None:
        try:
            self._around.writing(handed)
        except (ElaunchError, OSError) as error:
            log.debug("%s: who commits was not told: %s", handed.stage.name, told(error))

    def _write_part(self, handed: Handed, memory: memoryview, pace: Pace) -> bytes:
        images = [
            Image(path, [memory[at : at + size] for at, size in extents], pace)
            for path, extents in handed.images
        ]
        try:
            return self.storage.write_part(handed.stage, handed.part, images)
        except OSError as error:
            if error.errno not in FULL or not self._around.make_room(handed):
                raise
        return self.storage.write_part(handed.stage, handed.part, images)

    def _commit(self, save: Save) -> None:
        lead, problem, done = save.lead(), "", None
        others = {r: seal for r, seal in save.sealed.items() if r not in save.handed}

        def fence() -> None:
            try:
                self._around.fence(save.stage)
            except SaveError:
                save.stays = True  # the next choice of a checkpoint commits or clears it
                raise

        given: Mapping[str, Any] = lead.extra.get("durations", {})
        durations = {**given, "write": round(time.monotonic() - save.began, 3)}
        try:
            if lead.local:
                self.storage.adopt(save.stage, others)
            with self._changed:
                save.adopting = False
            done = self.storage.commit(save.stage, fence, {**lead.extra, "durations": durations})
        except Exception as error:  # as for a shard
            problem = told(error)
            save.stays = save.stays or (isinstance(error, SaveError) and error.stays)
        with self._changed:
            save.committing = save.adopting = False
            if done is not None:
                self._books.note_commit(save, done)
            self._books.drop(save, problem)
            self._changed.notify_all()
        if done is not None:
            self._around.committed(lead, done)
        else:
            self._clear(save)

    def _end(self, save: Save) -> None:
        """Send to other nodes that a save comes to nothing, and remove its stage."""
        if save.handed:
            self._around.failed(save.lead(), save.problem)
        self._clear(save)

    def _clear(self, save: Save) -> None:
        """Remove the stage of a save that came to nothing, unless a thread still works on it."""
        with self._changed:
            over = save.done and bool(save.problem) and not save.busy
            if not over or save.stays or not save.commits:
                return
        try:
            self.storage.discard(save.stage)
        except (ElaunchError, OSError) as error:
            log.warning("%s cannot be removed: %s", save.stage.name, told(error))


def told(error: Exception) -> str:
    """Return the text of an error for a person."""
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return str(error) if isinstance(error, ElaunchError) else f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """Stand for the writing of a shard that is not wanted any more."""


def _start(name: str, target: Any, *args: Any) -> None:
    threading.Thread(target=_aside, args=(target, *args), name=name, daemon=True).start()


def _aside(target: Any, *args: Any) -> None:
    stand_back()
    target(*args)
