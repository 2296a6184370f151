"""The save queue: memory → disk → commit, in the background.

A thread of its own writes each staged shard and its manifest; the thread that brings the last
manifest commits.

==============================  ==================================================================
what goes wrong                 what becomes of it
==============================  ==================================================================
a shard never comes             the save is discarded when its rank has ended, at the end of the
                                round, or ``SHARD_DEADLINE_S`` after the last report of it
the disk is full                what retention allows is removed, the shard is written once more
it is still full, or broken     the save is discarded; the next call of each of its ranks raises
a shard is refused              the same
a copy cannot be written        that is logged: the node whose shard it is may have written it
the storage hangs               the save is given up; its memory stays out of use until the
                                storage answers, and what then is written is discarded
the round is over               nothing is committed, unless the next one has resumed from it, out
                                of memory; the process that chooses the next round's checkpoint
                                finishes or clears the stage (``finish_stages``)
==============================  ==================================================================

A save that fails does not fail the job. Any thread may call any method.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from elaunch.agent.patience import repeatedly
from elaunch.agent.saver import inflight
from elaunch.agent.saver.commitrules import CommitRules
from elaunch.agent.saver.inflight import Save, SavesInFlight
from elaunch.atonce import Writing, start
from elaunch.checkpoint.records import Committed, Image, Location, Stage
from elaunch.checkpoint.storage.files import refusal
from elaunch.checkpoint.storage.storage import Storage
from elaunch.errors import ElaunchError, SaveError
from elaunch.wire.worker import StagedShard

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
REPORT_S = 60.0
"""Seconds between two messages to other nodes that a shard is still being written."""

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class Settled:
    """The outcome of the saves that were in flight at the end of a round."""

    committed: tuple[Committed, ...] = ()
    lost: tuple[str, ...] = ()


class SaveQueue:
    """Owns the saves of one process in one storage, and the threads that write them."""

    def __init__(self, storage: Storage, rules: CommitRules) -> None:
        self.storage = storage
        self._rules = rules
        self._saves = SavesInFlight(str(storage.place))
        self._changed = self._saves.changed
        self.join = self._saves.join
        self.last = self._saves.last
        self.on_over: Callable[[Stage], object] = lambda _: None
        """Called for a save that is over here, and well, by the thread that did its last work."""
        self.record = self._saves.record

    # ── requests of a rank ───────────────────────────────────────────────────────────────────────

    def begin(self, rank: int, wait: bool, timeout: float | None) -> bool:
        """Wait for the save in flight; see ``AgentSaverClient.begin``."""
        return self._saves.await_idle(rank, timeout if wait else 0.0)

    def wait(self, rank: int, timeout: float | None) -> Committed | None:
        """Wait until nothing is in flight, or raise TimeoutError."""
        if not self._saves.await_idle(rank, timeout):
            name = self._saves.in_flight(rank)
            raise TimeoutError(f"{name} is not committed after {timeout:g} s")
        return self._saves.last(rank)

    def stage(self, shard: StagedShard, memory: memoryview) -> Callable[[], None]:
        """Take the shard in ``memory``, which nobody changes meanwhile; return what starts a write.

        The caller calls that, which returns at once. If the save has come to nothing already, the
        rank's next call raises that.
        """
        rank, copied, saves = shard.header.rank, shard.header.copied, self._saves
        with self._changed:
            save = saves.save(shard.stage, shard.header.world_size)
            if save.problem:
                self._rules.released(shard)
                saves.note_failure(rank, save)
                return _nothing
            if rank in save.shards or (save.done and not copied):
                raise SaveError(
                    f"checkpoint {save.stage.final}: rank {rank} has staged its shard before"
                )
            save.shards[rank] = shard
            save.world_size = shard.header.world_size
            save.done = False  # it may have been done here, but for the copy
            save.commits = self._rules.commits(save.first_shard())
            save.writing[rank] = Writing()
            saves.drop_if_hopeless(save)
        name = f"checkpoint {shard.stage.step} rank {rank}"
        return partial(_start, name, self._write, save, shard, memory)

    def abandon(self, rank: int, stage: Stage | None = None) -> None:
        """Note that ``rank`` stages nothing of the save that it has begun.

        ``stage``: no rank's shard of that one counts; see ``AgentSaverClient.abandon``.
        """
        saves = self._saves
        for save in saves.give_up(rank) if stage is None else saves.call_off(rank, stage):
            _start(f"checkpoint {save.stage.step} end", self._end, save)

    def refuse(self, shard: StagedShard, problem: str) -> None:
        """Have a save come to nothing: a shard that was staged is not taken."""
        with self._changed:
            save = self._saves.save(shard.stage, shard.header.world_size)
            self._saves.drop(save, f"rank {shard.header.rank}: {problem}")
        start("refused shard", self._rules.failed, shard, problem)
        _start(f"checkpoint {shard.stage.step} end", self._clear, save)

    def leave(self, rank: int) -> None:
        """Note that ``rank`` has ended: no shard of it will be staged."""
        for save in self._saves.leave(rank):
            _start(f"checkpoint {save.stage.step} end", self._end, save)

    # ── reports of other nodes ────────────────────────────────────────────────────────────────────

    def written_elsewhere(self, stage: Stage, rank: int, world_size: int, manifest: bytes) -> None:
        """Note that another node has written the shard of ``rank`` and its manifest."""
        with self._changed:
            save = self._saves.save(stage, world_size)
            save.manifests[rank] = manifest
            commits = self._saves.take_commit(save)
            self._changed.notify_all()
        if commits:
            _start(f"checkpoint {stage.step} commit", self._commit, save)

    def committed_by_rank(self, done: Committed, seconds: float) -> None:
        """Note a checkpoint that rank 0 has written with the others and committed itself."""
        with self._changed:
            self._saves.count(done, seconds)

    def writing_elsewhere(self, stage: Stage, rank: int, world_size: int) -> None:
        """Note that another node still writes the shard of ``rank``."""
        with self._changed:
            self._saves.save(stage, world_size).reported[rank] = time.monotonic()

    def failed_elsewhere(self, stage: Stage, problem: str) -> None:
        """Note that a shard of ``stage`` will not come from another node."""
        with self._changed:
            save = self._saves.save(stage, 0)
            self._saves.drop(save, problem)
        _start(f"checkpoint {stage.step} end", self._clear, save)

    # ── the end of a round ───────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        """End the waits of ranks that have ended, so that their next requests are read."""
        with self._changed:
            self._saves.ending = True
            self._changed.notify_all()

    def settle(
        self, until: float, patient: bool = False, going_on: Collection[str] = ()
    ) -> Settled:
        """Wait until the saves in flight are written; no rank stages any more.

        A save is lost if it lacks the shard of an own rank, or if the storage has not taken it by
        ``until``, in monotonic seconds.

        ``patient``: wait for shards of other nodes and the commit, too. Without it both are left to
        the process that chooses the next checkpoint. ``going_on`` has the uuids of saves that are
        not waited for: the next round can load them from memory.
        """
        with self._changed:
            self._saves.gone |= self._rules.own_ranks()
            open_ = [save for save in self._saves.by_stage.values() if not save.done]
            hopeless = [save for save in open_ if self._saves.drop_if_hopeless(save)]
            open_ = [save for save in open_ if save.done or save.stage.uuid not in going_on]

            def settled() -> bool:
                return not any(s.busy or (patient and s.commits) for s in open_ if not s.done)

            self._changed.wait_for(settled, max(0.0, until - time.monotonic()))
            for save in open_:
                if save.busy:
                    self._saves.drop(save, "the storage has not taken it in time")
        for save in hopeless:
            _start(f"checkpoint {save.stage.step} end", self._end, save)
        done = tuple(save.committed for save in open_ if save.committed is not None)
        return Settled(done, tuple(f"{s.stage.final}: {s.problem}" for s in open_ if s.problem))

    def close(self, until: float) -> None:
        """Wait until the saves in flight are over, and what may go is removed."""
        self.settle(until, patient=True)
        saves = self._saves.by_stage.values()
        with self._changed:
            left = max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: not any(save.retiring for save in saves), left)

    def end_round(self, adopted: str = "", resumed: str = "", whole: bool = False) -> None:
        """Forget the round's ranks, and its saves that are still open.

        ``resumed`` is the name of the checkpoint that the next round resumes from, ``adopted`` the
        uuid of the save that it resumes from out of memory. That goes on, also where this process
        was done with it and is the one that commits from now on. ``whole``: workers were kept, and
        each save goes on of which all shards are here.
        """
        with self._changed:
            going_on = self._saves.end_round(adopted, resumed, whole)
            for save in going_on:
                save.commits = self._rules.commits(save.first_shard())
                save.done = save.committed is not None or not (save.commits or save.busy)
            commits = [save for save in going_on if self._saves.take_commit(save)]
            self._changed.notify_all()
        for save in commits:
            _start(f"checkpoint {save.stage.step} commit", self._commit, save)

    def send_manifests(self, uuid: str) -> None:
        """Send the manifests of a save's written shards to the nodes that commit it, once more."""
        with self._changed:
            known = [
                (save.shards[rank], manifest)
                for save in self._saves.by_stage.values()
                for rank, manifest in save.manifests.items()
                if save.stage.uuid == uuid and rank in save.shards
            ]
        for shard, manifest in known:
            self._rules.written(shard, manifest)

    def is_over(self, stage: Stage) -> bool:
        """Whether this process has committed a save, or given it up."""
        with self._changed:
            save = self._saves.by_stage.get(stage.name)
            return save is not None and (save.committed is not None or bool(save.problem))

    def is_well(self, rank: int, stage: Stage) -> bool:
        """Whether a save came to its end here, and ``rank`` has nothing to wait for or to raise."""
        with self._changed:
            save = self._saves.by_stage.get(stage.name)
            return save is not None and not save.problem and self._saves.is_idle(rank)

    def is_writing(self, uuids: Collection[str]) -> bool:
        """Whether this process still writes shards of one of these saves.

        A commit does not count: it may wait for the choice that waits for the shards.
        """
        with self._changed:
            saves = self._saves.by_stage.values()
            return any(save.writing for save in saves if save.stage.uuid in uuids)

    def await_rest(self, uuids: Collection[str]) -> None:
        """Wait until it does not, however long that is."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_writing(uuids))

    def is_open(self, stage: Stage) -> bool:
        """Whether something is still expected of a save."""
        with self._changed:
            save = self._saves.by_stage.get(stage.name)
            return save is not None and not save.done

    def is_written(self, stage: Stage, rank: int) -> bool:
        """Whether the shard of ``rank`` is known to be written, on any node."""
        with self._changed:
            save = self._saves.by_stage.get(stage.name)
            return save is not None and rank in save.manifests

    def idle_manifest(self, stage: Stage, rank: int) -> bytes | None:
        """Return the manifest of ``rank`` in a save that no thread works on; None without one."""
        with self._changed:
            save = self._saves.by_stage.get(stage.name)
            return None if save is None or save.busy else save.manifests.get(rank)

    def unfinished(self) -> tuple[str, ...]:
        """Return the names of the stages that threads of this process still write into.

        And those that lack shards which may come, as its ranks live. Complete stages that are being
        committed are left out: another process may take them over.
        """
        with self._changed:
            known, ending = self._saves.by_stage.items(), self._saves.ending
            due = {name for name, s in known if not (s.done or s.committing or ending)}
            return tuple(name for name, s in known if s.writing or s.adopting or name in due)

    # ── the threads ──────────────────────────────────────────────────────────────────────────────

    def _write(self, save: Save, shard: StagedShard, memory: memoryview) -> None:
        """Write one shard, and commit if it was the last."""
        rank, problem, manifest = shard.header.rank, "", b""
        writing = save.writing[rank]
        with self._reporting(shard, writing):
            try:
                try:
                    manifest = self._write_shard(shard, memory, writing)
                finally:
                    self._rules.released(shard)
                with self._changed:  # before it is sent: a round may begin meanwhile
                    save.manifests[rank] = manifest
                self._rules.written(shard, manifest)
            except Exception as error:  # whatever it is: the save fails, the job goes on
                problem = error_text(error, self.storage.place)
        with self._changed:
            del save.writing[rank]
            if problem:
                save.manifests.pop(rank, None)
            if problem and shard.header.copied:
                del save.shards[rank]
                name = save.stage.final
                log.warning("%s: the copy of rank %d's shard: %s", name, rank, problem)
            elif problem:
                self._saves.drop(save, f"rank {rank}: {problem}")
            commits = self._saves.take_commit(save)
            save.done = save.done or not (save.commits or save.busy or self._awaited(save))
            self._changed.notify_all()
        if problem and not shard.header.copied:
            self._rules.failed(shard, problem)
        if commits:
            self._commit(save)
        else:
            self._clear(save)
            self.on_over(save.stage)

    def _awaited(self, save: Save) -> bool:
        """Whether an own rank has yet to stage its shard."""
        ranks = (rank for rank in self._rules.own_ranks() if rank < save.world_size)
        return not save.adopted and bool(save.missing(ranks))

    def _reporting(self, shard: StagedShard, writing: Writing) -> AbstractContextManager[None]:
        """Report every REPORT_S to the nodes that commit that the shard is being written."""

        def report() -> None:
            if time.monotonic() - writing.moved > inflight.WRITE_DEADLINE_S:
                return
            try:
                self._rules.writing(shard)
            except (ElaunchError, OSError) as error:
                name, why = shard.stage.name, error_text(error)
                log.debug("%s: the node that commits has no report: %s", name, why)

        alone = shard.header.copied or shard.header.world_size <= len(self._rules.own_ranks())
        return nullcontext() if alone else repeatedly(report, REPORT_S, REPORT_S)

    def _write_shard(self, shard: StagedShard, memory: memoryview, beside: Writing) -> bytes:
        images = [
            Image(path, [memory[at : at + size] for at, size in extents], beside)
            for path, extents in shard.images
        ]
        try:
            return self.storage.write_shard(shard.stage, shard.header, images)
        except OSError as error:
            if error.errno not in FULL or not self._rules.make_room(shard):
                raise
        return self.storage.write_shard(shard.stage, shard.header, images)

    def _commit(self, save: Save) -> None:
        first, problem, done = save.first_shard(), "", None
        others = {r: one for r, one in save.manifests.items() if r not in save.shards}

        def fence() -> None:
            try:
                self._rules.fence(save.stage)
            except SaveError:
                save.stays = True  # the next choice of a checkpoint commits or clears it
                raise

        given: Mapping[str, Any] = first.extra.get("durations", {})
        durations = {**given, "write": round(time.monotonic() - save.began, 3)}
        try:
            if first.local:
                self.storage.adopt(save.stage, others)
            with self._changed:
                save.adopting = False
            done = self.storage.commit(save.stage, fence, {**first.extra, "durations": durations})
        except Exception as error:  # as for a shard
            problem = error_text(error, self.storage.place)
            save.stays = save.stays or (isinstance(error, SaveError) and error.stays)
        with self._changed:
            save.committing = save.adopting = False
            if done is not None:
                save.retiring = True
                self._saves.note_commit(save, done)
            self._saves.drop(save, problem)
            self._changed.notify_all()
        if done is not None:
            self.on_over(save.stage)
            try:
                self._rules.committed(first, done)
            finally:
                with self._changed:
                    save.retiring = False
                    self._changed.notify_all()
        else:
            self._clear(save)

    def _end(self, save: Save) -> None:
        """Report to other nodes that a save comes to nothing, and remove its stage."""
        if save.shards:
            self._rules.failed(save.first_shard(), save.problem)
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
            log.warning("%s cannot be removed: %s", save.stage.name, error_text(error))


def error_text(error: Exception, place: Location = "") -> str:
    """Return the text of an error as logs and messages have it; ``place``: what was written."""
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{refusal(error, place)}{where}"
    return str(error) if isinstance(error, ElaunchError) else f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """Do nothing, in place of the write of a shard that is not wanted any more."""


_start: Final = partial(start, behind=True)
