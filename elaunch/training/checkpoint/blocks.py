"""Checkpoints whose files a script writes itself: ``store_path``, ``stage_path`` and ``commit``.

``store_path`` is a block; at its end what is in its directory is a checkpoint.

=============  ==================================================================================
``shard=``     what happens
=============  ==================================================================================
False          rank 0 alone enters, writes and commits; nobody waits for it
True           all ranks enter. Each gets a directory of its own, so that nobody's file takes the
               place of another's before it is seen; at the end the files are put together
=============  ==================================================================================

The same file with the same content from several ranks is one file. With different content, or a
file where another rank has a directory, nothing is committed (elaunch.checkpoint.writing.assemble).

``stage_path`` and ``commit`` are for what other people's code writes. The files are linked into the
stage, or copied where the disks differ; where they were they are removed when the checkpoint is
committed, and not before. A file that cannot be removed is copied: a later write to it would change
the checkpoint. Of a symbolic link the link alone is removed. Ranks that give the same directory,
and see the same there, have one shard together: the lowest of them lists it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from elaunch.checkpoint.layout import TEMPORARY
from elaunch.checkpoint.storage.durable import list_files
from elaunch.checkpoint.storage.storage import Committed, Stage
from elaunch.errors import CheckpointError, CollectiveError, ContextError, SaveError
from elaunch.training.checkpoint.parts import CallContext, Saving
from elaunch.training.checkpoint.store import (
    begin,
    called,
    check_metadata,
    check_new,
    check_steps,
    commit_alone,
    discard,
    documented,
    finish,
    flush,
    header_of,
    keep_by_rule,
    new_stage,
    writing,
)
from elaunch.training.checkpoint.together import agree, in_words

log = logging.getLogger("elaunch")

SEEN_S: Final = 1.0
"""Seconds until an entry that another node made is seen in a directory that both share."""


def open_path(parts: CallContext, saving: Saving) -> Path:
    """Begin a save and return the directory that all ranks that share it write to."""
    stage = begin(parts, saving)
    path = parts.storage.open_stage(stage)
    parts.known.staged[str(path)] = stage
    return path


def commit_path(parts: CallContext, path: str | os.PathLike[str], saving: Saving) -> Committed:
    """Commit what lies at ``path``. ALL ranks call it together.

    Raises SaveError, on all ranks, and leaves the files where they are.
    """
    source = Path(path).absolute()
    stage = parts.known.staged.get(str(source))
    kinds = agree(parts.distributed, saving.what, None, (stage, saving.step), saving.timeout)
    check_steps(saving.what, [step for _, step in kinds])
    if any(kind != kinds[0][0] for kind, _ in kinds):
        raise SaveError(
            f"{saving.what}: some ranks give the path of stage_path() and others another one"
        )
    if stage is not None:
        return _commit_staged(parts, source, stage, saving)
    return _commit_other(parts, source, saving)


def _commit_staged(parts: CallContext, root: Path, stage: Stage, saving: Saving) -> Committed:
    """Commit a stage into which the script has written itself."""
    if stage.step != saving.step:
        raise SaveError(f"{root} was opened for step {stage.step}, not for {saving.step}")
    lists = parts.rank == 0
    if isinstance(parts.storage.place, str):
        lists = True
    elif parts.local:
        lists = parts.is_node_chief
    # Nobody lists before all have written.
    try:
        parts.distributed.barrier(saving.timeout)
    except CollectiveError:
        discard(parts, stage, agreed=False)
        raise

    def write() -> bytes:
        files = parts.storage.own_files(stage) if lists else []
        return parts.storage.write_manifest(stage, header_of(parts, saving), files)

    parts.known.staged.pop(str(root))
    return finish(parts, saving, stage, write)


def _commit_other(parts: CallContext, source: Path, saving: Saving) -> Committed:
    leads = _leads(parts, source, saving)
    stage = begin(parts, saving)

    def write() -> bytes:
        files: list[str] = []
        own = parts.storage.open_stage(stage, parts.rank)
        if leads:
            files = _link(source, own)
        return parts.storage.write_manifest(stage, header_of(parts, saving), files, below=own)

    committed = finish(parts, saving, stage, write)
    if leads:
        _remove(source)
    # A rank that writes to the same path again must not meet its removal.
    parts.distributed.barrier(saving.timeout)
    return committed


def _link(source: Path, own: Path) -> list[str]:
    """Put what is at ``source`` into this rank's directory of the stage, and return what it is."""
    put = shutil.copyfile if source.is_symlink() else _link_file
    if not source.is_dir():
        put(source, own / source.name)
        return [source.name]
    if own.resolve().is_relative_to(source.resolve()):
        raise SaveError(
            f"{source} holds the directory in which checkpoints are kept: commit what one save has "
            "written, in a directory of its own"
        )
    files = list_files(source, staged=False)
    for path in files:
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        put(source / path, own / path)
    return files


def _link_file(source: Path, target: Path) -> None:
    """Put a file there too, without a copy if the disk can and the file can be removed here."""
    if os.access(source.parent, os.W_OK | os.X_OK):
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _leads(parts: CallContext, source: Path, saving: Saving) -> bool:
    """Return whether this rank lists the files at ``source``: the lowest of those who see the same.

    Ranks with one path see the same if they find what the lowest of them has put there. A rank
    that finds nothing there has nothing to list.
    """
    what = f"{saving.what}, looking at what was written"
    mine = (str(source), source.exists(), uuid.uuid4().hex)
    said = agree(parts.distributed, what, None, mine, saving.timeout)
    if not any(exists for _, exists, _ in said):
        raise SaveError(f"{saving.what}: nothing is at {said[0][0]}, on no rank")
    first = next((rank for rank, each in enumerate(said) if each[:2] == (mine[0], True)), None)
    mark, left = None, False
    if first is not None:
        mark = (source if source.is_dir() else source.parent) / f"{TEMPORARY}{said[first][2]}"
    try:
        left = mark is not None and first == parts.rank and _left(mark)
        marked = any(agree(parts.distributed, what, None, left, saving.timeout))
        sees = marked and mark is not None and mine[1] and _sees(mark)
        place = (mine[0], parts.distributed.cross_rank, mine[1], sees)
        places: list[Any] = agree(parts.distributed, what, None, place, saving.timeout)
    finally:
        if mark is not None and left:
            mark.unlink(missing_ok=True)
    leader = first if sees else places.index(place)
    return mine[1] and leader == parts.rank


def _left(mark: Path) -> bool:
    """Put a mark, if that can be: else ranks of one node see the same, and of others do not."""
    try:
        mark.touch()
    except OSError as error:
        log.debug("no mark can be left at %s: %s", mark, error)
        return False
    return True


def _sees(mark: Path) -> bool:
    """Look for an entry that another rank has made, twice: a network's cache may be old."""
    for pause in (0.0, SEEN_S / 4, SEEN_S):
        time.sleep(pause)
        if mark.parent.is_dir() and mark.name in os.listdir(mark.parent):
            return True
    return False


def _remove(source: Path) -> None:
    """Remove what was committed from where it was; a copy of it stays if that cannot be."""
    if source.is_dir() and not source.is_symlink():
        shutil.rmtree(source, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        source.unlink()


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
            parts.storage.write_manifest(stage, header_of(parts, saving, writers=1), files)
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

    def write() -> bytes:
        files = storage.own_files(stage, below=own)
        return storage.write_manifest(stage, header_of(parts, saving), files, below=own)

    finish(parts, saving, stage, write)


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
