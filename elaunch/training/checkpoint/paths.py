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
file where another rank has a directory, nothing is committed (elaunch.checkpoint.assemble).

``stage_path`` and ``commit`` are for files that other people's code writes. They are linked into
the stage, or copied where the disks differ. Where they were written they are removed when the
checkpoint is committed, and not before. A file that cannot be removed is copied: a later write to
it would change the checkpoint. Of a symbolic link the link alone is removed. Ranks that give the
same directory, and see the same there, have one shard together: the lowest of them lists it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from elaunch.checkpoint.layout import TEMPORARY
from elaunch.checkpoint.probe import unseen_in
from elaunch.checkpoint.storage.durable import list_files
from elaunch.checkpoint.storage.storage import Committed, Stage
from elaunch.errors import CheckpointError, CollectiveError, ContextError, SaveError
from elaunch.training.checkpoint.callcontext import CallContext, SaveRequest
from elaunch.training.checkpoint.collective import (
    begin,
    called,
    check_new,
    check_request,
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
from elaunch.training.checkpoint.together import agree, problem_text, together

log = logging.getLogger("elaunch")

SEEN_S: Final = 1.0
"""Seconds until an entry that another node made is seen in a directory that both share."""


def open_path(call: CallContext, request: SaveRequest) -> Path:
    """Begin a save and return the directory that all ranks that share it write to."""
    stage = begin(call, request)
    with together(call.distributed, called(request, stage), request.timeout):
        path = call.storage.open_stage(stage)
    call.known.staged[str(path)] = stage
    return path


def commit_path(call: CallContext, path: str | os.PathLike[str], request: SaveRequest) -> Committed:
    """Commit what lies at ``path``. ALL ranks call it together.

    Raises SaveError, on all ranks, and leaves the files where they are.
    """
    with together(call.distributed, request.what, request.timeout, everyone=True) as step:
        check_request(request)
        source = Path(path).absolute()
        stage = call.known.staged.get(str(source))
        step.sent = (stage, request.step)
    kinds = step.received
    check_steps(request.what, [number for _, number in kinds])
    if any(kind != kinds[0][0] for kind, _ in kinds):
        raise SaveError(
            f"{request.what}: some ranks give the path of stage_path() and others another one"
        )
    if stage is not None:
        return _commit_staged(call, source, stage, request)
    return _commit_other(call, source, request)


def _commit_staged(call: CallContext, root: Path, stage: Stage, request: SaveRequest) -> Committed:
    """Commit a stage into which the script has written itself."""
    if stage.step != request.step:
        raise SaveError(f"{root} was opened for step {stage.step}, not for {request.step}")
    lists = call.rank == 0
    if isinstance(call.storage.place, str):
        lists = True
    elif call.local:
        lists = call.is_node_chief

    def write() -> bytes:
        # All have written: commit_path has just met all ranks.
        files = call.storage.own_files(stage) if lists else []
        return call.storage.write_manifest(stage, header_of(call, request), files)

    call.known.staged.pop(str(root))
    return finish(call, request, stage, write)


def _commit_other(call: CallContext, source: Path, request: SaveRequest) -> Committed:
    leads = _leads(call, source, request)
    stage = begin(call, request)

    def write() -> bytes:
        files: list[str] = []
        own = call.storage.open_stage(stage, call.rank)
        if leads:
            files = _link(source, own)
        return call.storage.write_manifest(stage, header_of(call, request), files, below=own)

    committed = finish(call, request, stage, write)
    # A rank that writes to the same path again must not meet its removal.
    with together(call.distributed, f"{called(request, stage)}, tidying up", request.timeout):
        if leads:
            _remove(source)
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


def _leads(call: CallContext, source: Path, request: SaveRequest) -> bool:
    """Return whether this rank lists the files at ``source``: the lowest of those who see the same.

    Ranks with one path see the same if they find what the lowest of them has put there. A rank
    that finds nothing there has nothing to list.
    """
    what = f"{request.what}, looking at what was written"
    with together(call.distributed, what, request.timeout, everyone=True) as step:
        step.sent = mine = (str(source), source.exists(), uuid.uuid4().hex)
    found = step.received
    if not any(exists for _, exists, _ in found):
        raise SaveError(f"{request.what}: nothing is at {found[0][0]}, on no rank")
    first = next((rank for rank, each in enumerate(found) if each[:2] == (mine[0], True)), None)
    mark, left, sees = None, False, False
    try:
        with together(call.distributed, what, request.timeout, everyone=True) as step:
            if first is not None:
                above = source if source.is_dir() else source.parent
                mark = above / f"{TEMPORARY}{found[first][2]}"
            step.sent = left = mark is not None and first == call.rank and _left(mark)
        marked = any(step.received)
        with together(call.distributed, what, request.timeout, everyone=True) as step:
            sees = marked and mark is not None and mine[1] and _sees(mark)
            step.sent = view = (mine[0], call.distributed.cross_rank, mine[1], sees)
        views = step.received
    finally:
        if mark is not None and left:
            mark.unlink(missing_ok=True)
    leader = first if sees else views.index(view)
    return mine[1] and leader == call.rank


def _left(mark: Path) -> bool:
    """Put a mark, if that can be: else ranks of one node see the same, and of others do not."""
    try:
        mark.touch()
    except OSError as error:
        log.debug("no mark can be left at %s: %s", mark, error)
        return False
    return True


def _sees(mark: Path) -> bool:
    return not unseen_in(mark.parent, {mark.name}, SEEN_S)


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
            "shard"
        )


@contextlib.contextmanager
def store_alone(call: CallContext, request: SaveRequest) -> Iterator[tuple[Path, str]]:
    """Store what rank 0 writes in the block; no other rank takes part."""
    if call.known.read_only is not None:
        raise call.known.read_only
    check_request(request)
    check_new(call, request.step)
    stage = new_stage(call, request.step)
    try:
        path = call.storage.open_stage(stage)
        yield path, stage.uuid
        with _as_save_error(called(request, stage)):
            flush(call)
            files = call.storage.own_files(stage, below=path)  # nothing of elaunch's is there yet
            call.storage.write_manifest(stage, header_of(call, request, writers=1), files)
            committed = commit_alone(call, stage, documented(call, stage, {}))
    except BaseException:
        discard(call, stage, agreed=True)
        raise
    call.known.note_own(committed)
    if call.distributed.size == 1:
        call.known.note(committed)
    keep_by_rule(call, request.keep, committed)


@contextlib.contextmanager
def _as_save_error(what: str) -> Iterator[None]:
    try:
        yield
    except SaveError:
        raise
    except (CheckpointError, OSError) as error:
        raise SaveError(f"{what}: {problem_text(error)}") from error


@contextlib.contextmanager
def store_together(call: CallContext, request: SaveRequest) -> Iterator[tuple[Path, str]]:
    """Store what all ranks write in the block, each in the directory that it gets."""
    stage = begin(call, request)
    try:
        own = call.storage.open_stage(stage, call.rank)
        yield own, stage.uuid
    except Exception as error:
        _report_failure(call, request, stage, error)
        raise
    except BaseException:
        discard(call, stage, agreed=False)  # the process is about to end: the others see that
        raise
    storage = call.storage

    def write() -> bytes:
        files = storage.own_files(stage, below=own)
        return storage.write_manifest(stage, header_of(call, request), files, below=own)

    finish(call, request, stage, write)


def _report_failure(
    call: CallContext, request: SaveRequest, stage: Stage, error: Exception
) -> None:
    """Report to all ranks that this one's block failed; the caller raises its own exception."""
    agreed = False
    with contextlib.suppress(CollectiveError, CheckpointError, ContextError):
        try:
            sent = (call.distributed.cross_rank, None)
            agree(call.distributed, writing(request, stage), error, sent, request.timeout)
        except CheckpointError:
            agreed = True
            raise
    discard(call, stage, agreed)
