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

``stage_path`` and ``commit`` are for files that other people's code writes: it gets the stage.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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


def open_path(call: CallContext, request: SaveRequest) -> Path:
    """Begin a save and return the directory that all ranks that share it write to."""
    stage = begin(call, request)
    with together(call.distributed, called(request, stage), request.timeout):
        path = call.storage.open_stage(stage)
    call.known.staged[str(path)] = stage
    return path


def commit_path(call: CallContext, path: str | os.PathLike[str], request: SaveRequest) -> Committed:
    """Commit the stage that others' code has written to. ALL ranks call it together.

    Raises SaveError, on all ranks; ContextError for a path that is not :func:`open_path`'s.
    """
    with together(call.distributed, request.what, request.timeout, everyone=True) as step:
        check_request(request)
        root = Path(path).absolute()
        stage = call.known.staged.get(str(root))
        if stage is None:
            raise ContextError(
                f"{root} is no path of stage_path() that waits for its commit: have files written "
                "there, or write them in the block of store_path()"
            )
        step.sent = request.step
    check_steps(request.what, step.received)
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
