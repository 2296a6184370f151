"""``ctx.checkpoint``: one object per context; opens its directory when it is first used.

====================================  ============================================================
call                                  made by
====================================  ============================================================
store_path(shard=True), commit,       ALL ranks together, in the same order
stage_path, save, load,
restore_path, reserve, wait,
check_same
store_path(shard=False)               rank 0 alone
latest, list, get_metadata, delete,   any rank, alone
pin, unpin, quarantine
====================================  ============================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from elaunch.checkpoint import shelves
from elaunch.checkpoint.records import Begun, Keep
from elaunch.checkpoint.storage.storage import Committed, Location
from elaunch.errors import ContextError
from elaunch.training import liveness
from elaunch.training.checkpoint import collective, paths, restore
from elaunch.training.checkpoint.callcontext import LOADS, SECTION, as_given, at_step
from elaunch.training.checkpoint.handle import Busy, Every, SaveHandle, Schedule
from elaunch.training.checkpoint.restore import Which
from elaunch.training.checkpoint.session import CheckpointSession
from elaunch.training.gone import Renamed, refuse_gone

if TYPE_CHECKING:
    from torch import Tensor

    from elaunch.training.checkpoint.callcontext import CallContext
    from elaunch.training.checkpoint.save import SaveCache
    from elaunch.training.launch import Info

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _in_section(
    call: Callable[Concatenate[CheckpointContext, Given], Result],
) -> Callable[Concatenate[CheckpointContext, Given], Result]:
    """Make a section of a call: storage, and the other ranks, may take longer than a step."""

    @functools.wraps(call)
    def made(self: CheckpointContext, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        refuse_gone(call.__name__, kwargs)
        with self._section(call.__name__ in LOADS):
            return call(self, *args, **kwargs)

    return made


class CheckpointContext(Renamed):
    """A script's checkpoints; part of the context, as ``ctx.checkpoint``.

    A checkpoint is there for readers when all of it is: every rank's files are written, fsynced and
    listed with their checksums before it gets its name. Where anything goes wrong, every rank gets
    an error that says so, and what was there before is untouched.

    Every call of all ranks blocks until all have come and it is done. A call that one rank makes
    alone blocks while the storage answers.

    ``timeout`` is, everywhere, the seconds that each wait for the other ranks may take; None: those
    of ``elaunch.init()``. ``keep`` says which older checkpoints may go after the commit, as in
    ``keep=elaunch.Keep(last=3)``; None: as the command's flags say.
    ``which`` names a checkpoint: by its name, its uuid, its path or URL, or by what ``latest()``,
    ``list()``, ``load()`` or ``save()`` returned. A checkpoint that is only read may be anywhere;
    others are in ``directory``.

    Calls of all ranks raise CollectiveTimeout and PeerLost, which name the ranks that did not come;
    the others' errors are CheckpointErrors, the same on all ranks, after which the next call works.
    """

    def __init__(self, session: CheckpointSession) -> None:
        self._session = session
        self._save_cache: SaveCache | None = None
        self._schedule = Schedule(session.directory)

    def move(self, info: Info) -> None:
        """Go on among other ranks, or in another round; the elaunch context calls it.

        Saves in flight go on without this rank's doing.
        """
        if self._save_cache is not None:
            self._save_cache.close()
            self._save_cache = None
        self._session = self._session.moved(info)
        self._schedule.move()

    def pack(self, state: Mapping[str, Any]) -> tuple[bytes, Tensor]:
        """Return ``state`` as :meth:`unpack` takes it on other ranks."""
        from elaunch.training.checkpoint.dcp import transfer

        return transfer.pack(state)

    def unpack(self, state: Mapping[str, Any], metadata: bytes, file: Tensor) -> None:
        """Put what another rank has packed into ``state``; CheckpointError if that is another."""
        from elaunch.training.checkpoint.dcp import transfer

        ranks = self._session.distributed
        transfer.unpack(state, metadata, file, (ranks.rank, ranks.size))

    @property
    def schedule(self) -> tuple[Any, ...]:
        """When the next save is due, for :meth:`follow` on other ranks."""
        return self._schedule.measured()

    def follow(self, schedule: Sequence[Any], earliest: int = 0) -> None:
        """Have the next save due when it is on another rank, at step ``earliest`` or later."""
        every, due, last, steps = schedule
        self._schedule.follow(every, max(due, earliest), last, steps)

    @property
    def directory(self) -> Location:
        """The directory (a Path) or URL (a str) in which the checkpoints are."""
        return self._session.place

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def store_path(
        self,
        metadata: Mapping[str, Any],
        *,
        shard: bool = False,
        keep: Keep | None = None,
        timeout: float | None = None,
    ) -> Iterator[tuple[Path, str]]:
        """Store what is written in the block of ``with …store_path(metadata) as (path, uuid)``.

        With ``shard=True`` ALL ranks enter and leave together, and each writes to a ``path`` of its
        own; the checkpoint holds the files of all. Else rank 0 alone enters, and waits for nobody.
        The checkpoint is committed when the block ends; an exception in the block, on any rank,
        leaves nothing.

        Args:
            metadata: ``steps_completed``, the number of steps done, and more for JSON. What the
                ranks give is merged; different values for one key are an error.
            shard: whether all ranks write.
            keep: see the class.
            timeout: see the class. The others also wait that long for a rank that is in its block.

        Raises:
            ContextError: at once, on other ranks than 0 without ``shard``.
            SaveError: nothing was committed. The rank whose block raised gets its own exception.
        """
        if not shard:
            paths.refuse_unless_chief(self._session.distributed.rank)
        request = as_given(metadata, keep, timeout)
        store = paths.store_together if shard else paths.store_alone
        with self._section():
            call = self._session.together(timeout) if shard else self._session.alone()
            with store(call, request) as given:
                yield given

    @_in_section
    def stage_path(
        self,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Path:
        """Return a directory for another writer, such as ``dcp.save``; then :meth:`commit` it.

        ALL ranks call it together. It is one directory for all ranks that share storage; each
        checkpoint needs a new one. A directory that is not committed is removed with the job.
        """
        call = self._session.together(timeout)
        return paths.open_path(call, at_step(step, metadata, None, timeout, "stage_path"))

    @_in_section
    def commit(
        self,
        path: str | os.PathLike[str],
        step: int,
        metadata: Mapping[str, Any] | None = None,
        *,
        keep: Keep | None = None,
        timeout: float | None = None,
    ) -> Committed:
        """Make a checkpoint of what another writer has written to :meth:`stage_path`; return it.

        ALL ranks call it together, when all have written.

        Raises:
            SaveError: nothing was committed, and what was written is gone.
            ContextError: ``path`` is another one.
        """
        call = self._session.together(timeout)
        request = at_step(step, metadata, keep, timeout, "commit")
        return paths.commit_path(call, path, request)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    @_in_section
    @contextlib.contextmanager
    def restore_path(
        self, which: Which | None = None, *, timeout: float | None = None
    ) -> Iterator[Path]:
        """Give the directory of a checkpoint, by default the latest, to read from.

        ALL ranks enter it together, and read on their own. Nobody deletes the checkpoint meanwhile.

        Args:
            which: see the class; the latest without, or what --init-from names if there is none.

        Raises:
            CheckpointError: on all ranks; there is none, it is damaged, or a rank cannot reach it.
        """
        what = "restore_path"
        with self._section(loads=True), contextlib.ExitStack() as stack:
            call, wanted = restore.wanted(self._session, which, None, timeout=timeout, what=what)
            paths = []

            def use(there: CallContext, found: Committed) -> None:
                opened = restore.opened(there, found, timeout=timeout, what=what)
                paths.append(stack.enter_context(opened))

            if restore.read(call, wanted, True, use) is None:
                raise restore.not_there(what)
            yield paths[0]

    @_in_section
    def latest(self) -> Committed | None:
        """Return the newest checkpoint, None if there is none; the same on all ranks.

        It is what the round resumed from, or what calls of all ranks have committed since; it does
        not change by what others commit meanwhile. If it is deleted, put aside or damaged, the next
        :meth:`load` or :meth:`restore_path` takes the newest that is whole, and so does this. Any
        rank may ask, alone: with ``--checkpoint-dir`` the agents have chosen it before the round,
        else ``elaunch.init()`` has looked for it.

        Raises:
            CheckpointError: the checkpoint that the round resumes from cannot be read any more.
        """
        return self._session.latest()

    @_in_section
    def get_metadata(self, which: Which | None = None) -> dict[str, Any]:
        """Return the metadata of a checkpoint; of the latest without ``which``.

        Any rank may call it. Raises CheckpointError, with what is there, if it is not.
        """
        if which is not None:
            return dict(restore.find(self._session.storage, which, anywhere=True).metadata)
        found = self.latest()
        if found is None:
            raise restore.not_there("get_metadata")
        return dict(found.metadata)

    @_in_section
    def list(self) -> list[Committed]:
        """Return the committed checkpoints, from old to new; any rank may call it."""
        return self._session.storage.listed()

    # ── sharded, by torch.distributed.checkpoint ─────────────────────────────────────────────────

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        metadata: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
        block: bool | None = None,
        every: Every | None = None,
        when_busy: Busy = "wait",
        timeout: float | None = None,
    ) -> SaveHandle:
        """Save ``state``, each rank its shard, in the format of torch.distributed.checkpoint.

        ALL ranks call it together. It blocks until the checkpoint is committed, with
        ``block=False`` until each rank's shard is copied into memory that its agent owns: the
        agents write it, whatever becomes of the workers. One such save is in flight at most.
        Without agents, as under torchrun, it blocks until the commit either way.

        Args:
            state: modules (plain, DDP, FSDP, tensor parallel), their optimizers, others with
                ``state_dict``, tensors, plain values, dicts and lists of them;
                ``elaunch.PerRank`` for what each rank has of its own.
            step: the last step done, which ``load`` gives back.
            metadata: more for JSON, beside ``steps_completed``.
            block: return when it is committed (by default, without ``every``), or in memory.
            every: save only when this many steps have passed since the last save, or since the
                checkpoint that the round began with; ``"auto"``: as many as lose least time by
                saves and failures. At other steps the call returns at once, and asks nobody.
            when_busy: with ``block=False``, while the save before is in flight: ``wait`` for it,
                or ``skip`` this one, as ``every="auto"`` does.

        Returns a handle, which has what was ``committed``, or was ``skipped``; after
        ``block=False`` its ``result()`` waits for the commit.

        Raises:
            SaveError: nothing was committed; or, once, that a save in the background was not.
            CheckpointError: the state cannot be saved so that it can be loaded; says what to do.
            ContextError: ``every`` is no interval; or it is ``"auto"``, and all checkpoints stay.
        """
        from elaunch.training.checkpoint import save as saves

        request = at_step(step, metadata, keep, timeout, "save")
        request = dataclasses.replace(request, when_busy=when_busy)
        if every is not None and not self._schedule.is_due(every, request, self.latest):
            return SaveHandle(step)
        block = every is None if block is None else block
        with self._section():
            call, cache = self._session.together(timeout), self._cache()
            if every == "auto":
                request = dataclasses.replace(
                    request, choose=self._schedule.choose, when_busy="skip"
                )
                self._schedule.prepare(lambda: saves.reserve(call, cache, state, timeout))
            self._schedule.begin(step)
            handle = saves.save(call, cache, state, request, block)
            self._schedule.note(call, handle)
            return handle

    @_in_section
    def load(
        self,
        state: Mapping[str, Any],
        *,
        which: Which | None = None,
        source: str | os.PathLike[str] | None = None,
        strict: bool = True,
        timeout: float | None = None,
    ) -> Committed:
        """Load what :meth:`save` saved into the objects of ``state``, and return what was found.

        ALL ranks call it together; there may be more or fewer of them than saved. Shards that
        living agents still have in memory are not read from the disk.

        Args:
            state: as for :meth:`save`.
            which: see the class; the latest without.
            source: path or URL of another run's checkpoint, or of a directory with some, to begin
                from while this run has none of its own; by default what --init-from names.
            strict: refuse what is missing in the checkpoint, and what only it has.

        Returns the checkpoint, with its ``step`` and the ``next_step`` to go on with. Both are 0
        where a run begins: after ``source``, and where there is nothing, which is false.

        Raises:
            CheckpointError: on all ranks; names keys and ranks.
            ContextError: which and source were given.
        """
        from elaunch.training.checkpoint import load as loading

        call, wanted = restore.wanted(
            self._session, which, source, timeout=timeout, what=loading.WHAT
        )
        return loading.load(call, wanted, state, strict) or Begun.of(None)

    @_in_section
    def reserve(self, state: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Have the memory for ``save(state, block=False)`` mapped before the first one.

        ALL ranks call it together. Raises SaveError if it would be over --checkpoint-memory.
        """
        from elaunch.training.checkpoint import save as saves

        call = self._session.together(timeout)
        saves.reserve(call, self._cache(), state, timeout)

    @_in_section
    def wait(self, *, timeout: float | None = None) -> Committed | None:
        """Wait until no save is in flight, and return the newest checkpoint of this context.

        ALL ranks call it together. Raises SaveError if a save in flight came to nothing.
        """
        from elaunch.training.checkpoint import save as saves

        call = self._session.together(timeout)
        return saves.wait(call, self._cache(), timeout)

    @_in_section
    def check_same(self, state: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Check that all ranks have the same state, as after a load in data parallel training.

        ALL ranks call it together. Raises CheckpointError that names the ranks that differ and the
        first key.
        """
        from elaunch.training.checkpoint.state import compare

        compare.check_same(self._session.distributed, state, timeout)

    # ── retention ────────────────────────────────────────────────────────────────────────────────

    @_in_section
    def delete(self, which: Which) -> None:
        """Delete a checkpoint; one rank calls it.

        Raises:
            CheckpointError: it is not there; or it is pinned, or being read, or the round resumed
                from it and has no newer one, and so it stays.
        """
        storage = self._session.storage
        collective.delete_one(storage, self._session.known, restore.find(storage, which))

    @_in_section
    def pin(self, which: Which) -> None:
        """Have retention leave a checkpoint alone; any rank may call it."""
        shelves.pin(self.directory, restore.find(self._session.storage, which).name)

    @_in_section
    def unpin(self, which: Which) -> None:
        """Take back :meth:`pin`; any rank may call it."""
        shelves.unpin(self.directory, restore.find(self._session.storage, which).name)

    @_in_section
    def quarantine(self, which: Which, reason: str) -> None:
        """Take a checkpoint away from all readers, and keep it with the reason; one rank calls it.

        Raises:
            CheckpointError: it is not there.
            ContextError: there is no reason.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise ContextError(
                f"quarantine() needs a reason in words, for who finds it there; this is {reason!r}"
            )
        storage = self._session.storage
        storage.quarantine(restore.find(storage, which), reason)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    @_in_section
    def close(self, patient: bool = True) -> None:
        """Wait for the saves in flight, and give the directory's lock back; the context calls it.

        Args:
            patient: wait, half an hour at most; without it, as after an exception, the agent goes
                on with them while the round ends.

        Raises:
            SaveError: a save in flight came to nothing.
        """
        if self._save_cache is not None:
            self._save_cache.close()
        self._session.close(patient)

    def _cache(self) -> SaveCache:
        """Return what is remembered from one sharded save to the next."""
        from elaunch.training.checkpoint import save as saves

        if self._save_cache is None:
            self._save_cache = saves.SaveCache()
        return self._save_cache

    def _section(self, loads: bool = False) -> contextlib.AbstractContextManager[None]:
        return liveness.section(self._session.page, SECTION, kind="load" if loads else "save")
