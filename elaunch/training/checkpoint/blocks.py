"""``store_path``: a block in which the script writes files; at its end they are a checkpoint.

=============  ==================================================================================
``shard=``     what happens
=============  ==================================================================================
False          rank 0 alone enters, writes and commits; nobody waits for it
True           all ranks enter. Each gets a directory of its own, so that nobody's file takes the
               place of another's before it is seen; at the end the files are put together
=============  ==================================================================================

The same file with the same content from several ranks is one file. With different content, or a
file where another rank has a directory, nothing is committed (elaunch.checkpoint.writing.merge).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from elaunch.checkpoint.storage.storage import Stage
from elaunch.errors import CheckpointError, CollectiveError, ContextError, SaveError
from elaunch.training.checkpoint.parts import CallContext, Saving
from elaunch.training.checkpoint.store import (
    begin,
    called,
    check_metadata,
    check_new,
    commit_alone,
    discard,
    documented,
    finish,
    flush,
    keep_by_rule,
    new_stage,
    part_of,
    writing,
)
from elaunch.training.checkpoint.together.agree import agree, in_words


def refuse_unless_chief(rank: int) -> None:
    """Raise ContextError on any rank that may not store by itself."""
    if rank != 0:
        raise ContextError(
            f"store_path(shard=False) on rank {rank}: only rank 0 may save by itself; put it under "
            "`if ctx.distributed.rank == 0:`, or give shard=True on all ranks, and each writes its "
            "part"
        )


@contextlib.contextmanager
def store_alone(parts: CallContext, saving: Saving) -> Iterator[tuple[Path, str]]:
    """Store what rank 0 writes in the block; no other rank takes part."""
    if parts.known.taken is not None:
        raise parts.known.taken
    check_metadata(saving)
    check_new(parts, saving.step)
    stage = new_stage(parts, saving.step)
    try:
        path = parts.storage.open_stage(stage)
        yield path, stage.uuid
        with _as_save_error(called(saving, stage)):
            flush(parts)
            files = parts.storage.own_files(stage, below=path)  # nothing of elaunch's is there yet
            parts.storage.seal(stage, part_of(parts, saving, writers=1), files)
            committed = commit_alone(parts, stage, documented(parts, stage, {}))
    except BaseException:
        discard(parts, stage, agreed=True)
        raise
    parts.known.note_own(committed)
    if parts.distributed.size == 1:
        parts.known.note(committed)
    keep_by_rule(parts, saving.keep, committed)


@contextlib.contextmanager
def _as_save_error(what: str) -> Iterator[None]:
    try:
        yield
    except SaveError:
        raise
    except (CheckpointError, OSError) as error:
        raise SaveError(f"{what}: {in_words(error)}") from error


@contextlib.contextmanager
def store_together(parts: CallContext, saving: Saving) -> Iterator[tuple[Path, str]]:
    """Store what all ranks write in the block, each in the directory that it gets."""
    stage = begin(parts, saving)
    try:
        own = parts.storage.open_stage(stage, parts.rank)
        yield own, stage.uuid
    except Exception as error:
        _tell_others(parts, saving, stage, error)
        raise
    except BaseException:
        discard(parts, stage, agreed=False)  # the process is about to end: the others see that
        raise
    storage = parts.storage

    def seal() -> bytes:
        files = storage.own_files(stage, below=own)
        return storage.seal(stage, part_of(parts, saving), files, below=own)

    finish(parts, saving, stage, seal)


def _tell_others(parts: CallContext, saving: Saving, stage: Stage, error: Exception) -> None:
    """Make all ranks know that this one's block failed; its own exception goes on to the caller."""
    agreed = False
    with contextlib.suppress(CollectiveError, CheckpointError):
        try:
            said = (parts.distributed.cross_rank, None)
            agree(parts.distributed, writing(saving, stage), error, said, saving.timeout)
        except CheckpointError:
            agreed = True
            raise
    discard(parts, stage, agreed)
