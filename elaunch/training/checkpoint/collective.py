"""One save by all ranks together: begin, each rank's shard, commit.

================  ================================================================================
step              what the ranks send each other at its end
================  ================================================================================
``begin``         step and metadata as each wants them; rank 0's uuid names the stage (``save``
                  has this in its own first step)
                  whether each can write there: nobody begins where another cannot
(the shards)      written and fsynced by each rank, then its manifest
``finish``        whether each manifest is written; a problem of one is an error of all
                  what rank 0 has committed: it asks its agent whether the round is still on (the
                  fence), checks all shards, writes COMMIT, renames
================  ================================================================================

If anything fails before the commit, rank 0 removes the stage, and nothing else has changed. If rank
0 is killed, a stage is left behind. The process that chooses the checkpoint of the next round
commits it if it is complete, and else clears it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from elaunch import __version__, text
from elaunch.checkpoint import layout, manifests, retention, shelves
from elaunch.checkpoint.assemble import in_the_way
from elaunch.checkpoint.records import Committed, Keep, ShardHeader, Stage
from elaunch.checkpoint.storage.storage import Storage
from elaunch.errors import CheckpointError, CollectiveError, ContextError, SaveError
from elaunch.proc import lacks_inodes
from elaunch.training.checkpoint.callcontext import CallContext, KnownCheckpoints, SaveRequest
from elaunch.training.checkpoint.together import FULL, together

FLUSH_S: Final = 0.5
"""Seconds that a save waits for metrics: no disk of theirs holds the training up."""
BUSY: Final = ("wait", "skip")
Write = Callable[[Stage], bytes | None]

log = logging.getLogger("elaunch")


def save_together(
    call: CallContext,
    request: SaveRequest,
    write: Write,
    *,
    stage: Stage | None = None,
) -> Committed:
    """Begin, write, commit; where a disk is full, make room and do it once more.

    ALL ranks call it together. ``write(stage)`` writes this rank's shard and manifest and
    returns the manifest, None if it has none; it may be called twice. ``stage``: what the ranks
    have agreed on already.

    Raises:
        SaveError: nothing was committed; on all ranks, with the ranks and their reasons.
        CollectiveTimeout, PeerLost: a rank did not come; names it.
    """
    try:
        return _save_once(call, request, write, stage)
    except SaveError as full:
        if not full.no_room or not _make_room(call, request):
            raise
        log.warning("%s; older checkpoints were removed, trying again", full)
    return _save_once(call, request, write)


def begin(call: CallContext, request: SaveRequest) -> Stage:
    """Agree on a save, and return its stage, which all ranks can write to.

    ALL ranks call it together. Raises SaveError on all of them if the steps differ, if some rank's
    metadata cannot be, if the checkpoint is there already, or if some rank cannot write.
    """
    what = request.what
    with together(call.distributed, what, request.timeout, everyone=True) as step:
        if call.known.read_only is not None:
            raise call.known.read_only
        check_request(request)
        if call.rank == 0:
            check_new(call, request.step)
        step.sent = (request.step, uuid.uuid4().hex)
    check_steps(what, [number for number, _ in step.received])
    stage = new_stage(call, request.step, step.received[0][1])
    try:
        with (
            together(call.distributed, called(request, stage), request.timeout),
            _naming_room(call),
        ):
            call.storage.open_stage(stage)
    except (CheckpointError, CollectiveError):
        discard(call, stage, agreed=False)
        raise
    return stage


def finish(
    call: CallContext,
    request: SaveRequest,
    stage: Stage,
    write: Callable[[], bytes | None],
    extra: Mapping[str, Any] | None = None,
) -> Committed:
    """Have each rank write its manifest, then commit the stage; return what was committed.

    ALL ranks call it together. ``write()`` writes what is still to be written of this rank's shard,
    and returns its manifest. Raises as :func:`save_together`; the stage is gone then.
    """
    try:
        about = call.distributed, writing(request, stage), request.timeout
        with together(*about, everyone=call.local) as step:
            with _naming_room(call, request.size):
                manifest = write()
            step.sent = (call.distributed.cross_rank, manifest) if call.local else None
            flush(call)
        found = _commit(call, request, stage, step.received, dict(extra or {}))
    except CheckpointError:
        discard(call, stage, agreed=True)
        raise
    except CollectiveError:
        discard(call, stage, agreed=False)
        raise
    call.known.note(found)
    if call.acts:
        keep_by_rule(call, request.keep, found)
    return found


def _commit(
    call: CallContext, request: SaveRequest, stage: Stage, written: list[Any], extra: dict[str, Any]
) -> Committed:
    """Have rank 0 commit, and with a directory per node every node after it."""
    ranks, what, timeout = call.distributed, called(request, stage), request.timeout
    if call.local:
        with together(ranks, f"{what}, adopted", timeout):
            if call.is_node_chief:
                others = [one for one in enumerate(written) if one[1][0] != ranks.cross_rank]
                call.storage.adopt(stage, {rank: doc for rank, (_, doc) in others if doc})
    with together(ranks, what, timeout) as step:
        if call.rank == 0:
            extra = documented(call, stage, extra)
            step.sent = (commit_alone(call, stage, extra), extra)
    found: Committed
    found, extra = step.received[0]
    if not call.local:
        return found
    own = found if call.rank == 0 else None
    try:
        with together(ranks, f"{what}, on all nodes", timeout), _naming_room(call):
            if call.is_node_chief and call.rank != 0:
                own = call.storage.commit(stage, lambda: None, extra)
    except SaveError:
        if own is not None:
            call.storage.remove(own)  # what not all nodes have is no checkpoint
        raise
    return found


def documented(call: CallContext, stage: Stage, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of metadata.json beside those of the shards; the same on every node."""
    now = time.time()
    return {
        "started": now,
        "committed": now,
        "durations": {},
        "versions": versions(),
        "metrics": call.train.metrics_at(stage.step),
        **extra,
    }


def new_stage(call: CallContext, step: int, uuid_: str = "") -> Stage:
    """Return a stage of this round; with a random uuid where none is given."""
    return Stage(step, call.round, uuid_ or uuid.uuid4().hex)


def commit_alone(call: CallContext, stage: Stage, extra: Mapping[str, Any]) -> Committed:
    """Commit a complete stage if the round is still on; rank 0 does, without the others."""
    saver = call.saver

    def fence() -> None:
        if saver is not None:  # else only the process that started the round knows that it is over
            saver.fence(call.round)

    with _naming_room(call):
        done = call.storage.commit(stage, fence, extra)
    call.count(done, max(0.0, time.time() - extra["started"]))
    return done


def header_of(call: CallContext, request: SaveRequest, writers: int | None = None) -> ShardHeader:
    """Return the header of this rank's manifest; ``writers``: how many ranks have a shard."""
    world_size = call.distributed.size if writers is None else writers
    keep = None if request.keep is None else asdict(request.keep)
    return ShardHeader(call.rank, world_size, call.run_id, dict(request.metadata), keep=keep)


def called(request: SaveRequest, stage: Stage) -> str:
    """Return the name of a save in errors."""
    return f"{request.what} of step {stage.step}"


def writing(request: SaveRequest, stage: Stage) -> str:
    """Return the name, in errors, of what each rank does by itself in a save."""
    return f"{called(request, stage)}, writing"


def discard(call: CallContext, stage: Stage, agreed: bool) -> None:
    """Remove a stage whose save has failed; ``agreed``: all ranks know, so nobody writes there."""
    if not call.acts and not (agreed and isinstance(call.storage.place, str)):
        return
    try:
        call.storage.discard(stage)
    except (OSError, CheckpointError) as error:
        log.warning("the stage %s is left behind: %s", stage.name, error)


def keep_by_rule(call: CallContext, keep: Keep | None, committed: Committed) -> None:
    """Remove the checkpoints that may go now that ``committed`` is there; rank 0 does."""
    call.retiring.apply(keep, {*call.known.protected(), committed.name})


def delete_one(storage: Storage, known: KnownCheckpoints, found: Committed) -> None:
    """Delete a checkpoint; raise CheckpointError if it is to stay. One rank calls it."""
    if found.name in shelves.pinned(storage.place):
        raise CheckpointError(f"{found.name} stays: it is pinned; unpin() it first")
    needed = known.resumed is not None and known.resumed.name == found.name
    if needed and next(storage.newest_first(), found).name == found.name:
        raise CheckpointError(
            f"{found.name} stays: this round resumed from it, and would again; store a newer one "
            "first"
        )
    with retention.claimed(found.place) as free:
        if not free:
            raise CheckpointError(f"{found.name} stays: a process is reading it just now")
        storage.remove(found)


def check_request(request: SaveRequest) -> None:
    """Raise SaveError unless its metadata is a dict for JSON with ``steps_completed``, the step.

    Raises ContextError for options that mean nothing.
    """
    _ = request.keep
    if request.when_busy not in BUSY:
        raise ContextError(f"when_busy={request.when_busy!r}: it is one of {', '.join(BUSY)}")
    if not isinstance(request.metadata, Mapping):
        raise SaveError(f"metadata is {request.metadata!r}: give a dict with steps_completed")
    step = request.metadata.get(layout.STEPS_COMPLETED)
    if step is None:
        raise SaveError(
            f"metadata has no {layout.STEPS_COMPLETED!r}: give the number of steps that are done, "
            f'as in {{"{layout.STEPS_COMPLETED}": 120}}'
        )
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise SaveError(
            f"{layout.STEPS_COMPLETED} is {step!r}, a {type(step).__name__}: give a whole number, "
            "0 or more, as int(step) is"
        )
    if step != request.step:
        raise SaveError(f"{layout.STEPS_COMPLETED} is {step}, but the step is {request.step}")
    try:
        manifests.check_metadata(request.metadata)
    except CheckpointError as error:
        raise SaveError(str(error)) from None


def check_new(call: CallContext, step: int) -> None:
    """Raise SaveError if this round has committed that step already."""
    name = layout.step_name(step, call.round)
    place = call.storage.place
    if not isinstance(place, str) and os.path.exists(f"{place}/{name}"):
        raise in_the_way(place, name)


def check_steps(what: str, steps: list[int]) -> None:
    """Raise SaveError, the same on all ranks, unless all are at one step."""
    if len(set(steps)) > 1:
        given = ", ".join(text.on_ranks(enumerate(steps)))
        raise SaveError(
            f"{what}: {layout.STEPS_COMPLETED} differs: {given}; all ranks save the same step"
        )


def versions() -> dict[str, str]:
    """Return what this process runs with."""
    found = {"elaunch": __version__, "python": platform.python_version()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def flush(call: CallContext) -> None:
    """Write the metrics before the checkpoint, which is ahead of them only if that takes long."""
    if not call.train.flush(FLUSH_S):
        log.debug("a checkpoint is committed before the metrics of its steps are written")


def _save_once(
    call: CallContext, request: SaveRequest, write: Write, stage: Stage | None = None
) -> Committed:
    durations: dict[str, float] = {}
    times = {"started": time.time(), "durations": durations}
    agreed = stage or begin(call, request)

    def write_timed() -> bytes | None:
        begun = time.monotonic()
        try:
            manifest = write(agreed)
        except (KeyboardInterrupt, SystemExit):
            discard(call, agreed, agreed=False)
            raise
        durations["write"] = round(time.monotonic() - begun, 6)
        return manifest

    return finish(call, request, agreed, write_timed, times)


def _make_room(call: CallContext, request: SaveRequest) -> bool:
    """Have rank 0 remove what may go; return on all ranks whether anything went."""
    what, timeout = f"{request.what}, making room", request.timeout
    with together(call.distributed, what, timeout, everyone=True) as step:
        step.sent = request.size
    needed = sum(step.received)
    with together(call.distributed, what, timeout, everyone=True) as step:
        if call.acts:
            newest = call.known.newest
            needed = max(needed, 0 if newest is None else newest.size)
            step.sent = call.retiring.make_room(request.keep, needed, call.known.protected())
    return any(step.received)


@contextlib.contextmanager
def _naming_room(call: CallContext, size: int = 0) -> Iterator[None]:
    """Raise a full disk's error with the room that is left and needed; others as they are."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        place = call.storage.place
        needs = f"needs about {text.size(size)}, " if size else ""
        has = text.size(retention.free_bytes(place))
        reason = f"no space left on {place}: {needs}has {has}"
        if not isinstance(place, str) and lacks_inodes(place):
            reason = f"no inodes left on {place}, so it takes no more files; {has} are free"
        raise OSError(problem.errno, reason, problem.filename) from problem
