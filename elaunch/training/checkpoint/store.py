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

If anything goes wrong before the commit, rank 0 removes the stage, and nothing else has changed. A
rank 0 that is killed leaves a stage: the choice of the next round's checkpoint clears it away, or
commits it if it is complete.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from elaunch import __version__, text
from elaunch.checkpoint import layout
from elaunch.checkpoint.retention import delete, readers, shelves
from elaunch.checkpoint.storage.storage import Committed, ShardHeader, Stage, Storage
from elaunch.checkpoint.writing import manifests
from elaunch.checkpoint.writing.assemble import in_the_way
from elaunch.errors import CheckpointError, CollectiveError, RunDirError, SaveError
from elaunch.training.checkpoint.parts import CallContext, KnownCheckpoints, Saving
from elaunch.training.checkpoint.together import FULL, together

FLUSH_S: Final = 10.0
Write = Callable[[Stage], bytes | None]

log = logging.getLogger("elaunch")


def save_together(
    parts: CallContext,
    saving: Saving,
    write: Write,
    *,
    extra: Mapping[str, Any] | None = None,
    stage: Stage | None = None,
) -> Committed:
    """Begin, write, commit; where a disk is full, make room and do it once more.

    ALL ranks call it together. ``write(stage)`` writes this rank's shard and manifest and
    returns the manifest, None if it has none; it may be called twice. ``extra`` goes into
    metadata.json. ``stage``: what the ranks have agreed on already.

    Raises:
        SaveError: nothing was committed; on all ranks, with the ranks and their reasons.
        CollectiveTimeout, PeerLost: a rank did not come; names it.
    """
    try:
        return _save_once(parts, saving, write, extra, stage)
    except SaveError as full:
        if not full.no_room or not _make_room(parts, saving):
            raise
        log.warning("%s; older checkpoints were removed, trying again", full)
    return _save_once(parts, saving, write, extra)


def begin(parts: CallContext, saving: Saving) -> Stage:
    """Agree on a save, and return its stage, which all ranks can write to.

    ALL ranks call it together. Raises SaveError on all of them if the steps differ, if some rank's
    metadata cannot be, if the checkpoint is there already, or if some rank cannot write.
    """
    what = saving.what
    with together(parts.distributed, what, saving.timeout) as step:
        if parts.known.taken is not None:
            raise parts.known.taken
        check_metadata(saving)
        if parts.rank == 0:
            check_new(parts, saving.step)
        step.sent = (saving.step, uuid.uuid4().hex)
    check_steps(what, [number for number, _ in step.received])
    stage = new_stage(parts, saving.step, step.received[0][1])
    try:
        with together(parts.distributed, called(saving, stage), saving.timeout):
            parts.storage.open_stage(stage)
    except (CheckpointError, CollectiveError):
        discard(parts, stage, agreed=False)
        raise
    return stage


def finish(
    parts: CallContext,
    saving: Saving,
    stage: Stage,
    write: Callable[[], bytes | None],
    extra: Mapping[str, Any] | None = None,
) -> Committed:
    """Have each rank write its manifest, then commit the stage; return what was committed.

    ALL ranks call it together. ``write()`` writes what is still to be written of this rank's shard,
    and returns its manifest. Raises as :func:`save_together`; the stage is gone then.
    """
    try:
        with together(parts.distributed, writing(saving, stage), saving.timeout) as step:
            with _told_of_room(parts, saving):
                manifest = write()
            step.sent = (parts.distributed.cross_rank, manifest) if parts.local else None
            flush(parts)
        found = _commit(parts, saving, stage, step.received, dict(extra or {}))
    except CheckpointError:
        discard(parts, stage, agreed=True)
        raise
    except CollectiveError:
        discard(parts, stage, agreed=False)
        raise
    parts.known.note(found)
    if parts.acts:
        keep_by_rule(parts, saving.keep, found)
    return found


def _commit(
    parts: CallContext, saving: Saving, stage: Stage, written: list[Any], extra: dict[str, Any]
) -> Committed:
    """Have rank 0 commit, and with a directory per node every node after it."""
    ranks, what, timeout = parts.distributed, called(saving, stage), saving.timeout
    if parts.local:
        with together(ranks, f"{what}, adopted", timeout):
            if parts.is_node_chief:
                _adopt(parts, stage, written)
    with together(ranks, what, timeout) as step:
        if parts.rank == 0:
            extra = documented(parts, stage, extra)
            step.sent = (commit_alone(parts, stage, extra), extra)
    found: Committed
    found, extra = step.received[0]
    if not parts.local:
        return found
    own = found if parts.rank == 0 else None
    try:
        with together(ranks, f"{what}, on all nodes", timeout):
            if parts.is_node_chief and parts.rank != 0:
                own = parts.storage.commit(stage, lambda: None, extra)
    except SaveError:
        if own is not None:
            parts.storage.remove(own)  # what not all nodes have is no checkpoint
        raise
    return found


def _adopt(parts: CallContext, stage: Stage, written: list[tuple[int, bytes | None]]) -> None:
    """Put the other nodes' manifests beside those of this node."""
    node = parts.distributed.cross_rank
    others = {r: one[1] for r, one in enumerate(written) if one[0] != node and one[1]}
    parts.storage.adopt(stage, {rank: content for rank, content in others.items() if content})


def documented(parts: CallContext, stage: Stage, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what metadata.json says beside the shards; the same on every node."""
    now = time.time()
    return {
        "started": now,
        "committed": now,
        "durations": {},
        "versions": versions(),
        "metrics": parts.train.metrics_at(stage.step),
        **extra,
    }


def new_stage(parts: CallContext, step: int, uuid_: str = "") -> Stage:
    """Return a stage of this round; with a random uuid where none is given."""
    return Stage(step, parts.round, uuid_ or uuid.uuid4().hex)


def commit_alone(parts: CallContext, stage: Stage, extra: Mapping[str, Any]) -> Committed:
    """Commit a complete stage if the round is still on; rank 0 does, without the others."""
    saver = parts.saver

    def fence() -> None:
        if saver is not None:  # else only the process that started the round knows that it is over
            saver.fence(parts.round)

    done = parts.storage.commit(stage, fence, extra)
    parts.count(done, max(0.0, time.time() - extra["started"]))
    return done


def header_of(parts: CallContext, saving: Saving, writers: int | None = None) -> ShardHeader:
    """Return what this rank's manifest says beside the files; ``writers``: ranks with a shard."""
    world_size = parts.distributed.size if writers is None else writers
    return ShardHeader(parts.rank, world_size, parts.run_id, dict(saving.metadata))


def called(saving: Saving, stage: Stage) -> str:
    """Return how errors call a save."""
    return f"{saving.what} of step {stage.step}"


def writing(saving: Saving, stage: Stage) -> str:
    """Return how errors call what each rank does on its own in a save."""
    return f"{called(saving, stage)}, writing"


def discard(parts: CallContext, stage: Stage, agreed: bool) -> None:
    """Remove a stage whose save has failed; ``agreed``: all ranks know, so nobody writes there."""
    if not parts.acts and not (agreed and isinstance(parts.storage.place, str)):
        return
    try:
        parts.storage.discard(stage)
    except (OSError, CheckpointError) as error:
        log.warning("the stage %s is left behind: %s", stage.name, error)


def keep_by_rule(parts: CallContext, keep: delete.Keep | None, committed: Committed) -> None:
    """Remove the checkpoints that may go now that ``committed`` is there; rank 0 does."""
    parts.retiring.apply(keep, {*parts.known.protected(), committed.name})


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
    with readers.claimed(found.place) as free:
        if not free:
            raise CheckpointError(f"{found.name} stays: a process is reading it just now")
        storage.remove(found)


def check_metadata(saving: Saving) -> None:
    """Raise SaveError unless it is a dict for JSON with ``steps_completed``, which is the step."""
    if not isinstance(saving.metadata, Mapping):
        raise SaveError(f"metadata is {saving.metadata!r}: give a dict with steps_completed")
    step = saving.metadata.get(layout.STEPS_COMPLETED)
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
    if step != saving.step:
        raise SaveError(f"{layout.STEPS_COMPLETED} is {step}, but the step is {saving.step}")
    try:
        manifests.check_metadata(saving.metadata)
    except CheckpointError as error:
        raise SaveError(str(error)) from None


def check_new(parts: CallContext, step: int) -> None:
    """Raise SaveError if this round has committed that step already."""
    name = layout.step_name(step, parts.round)
    place = parts.storage.place
    if not isinstance(place, str) and (place / name).exists():
        raise in_the_way(place, name)


def check_steps(what: str, steps: list[int]) -> None:
    """Raise SaveError, the same on all ranks, unless all are at one step."""
    first: dict[int, int] = {}
    for rank, step in enumerate(steps):
        first.setdefault(step, rank)
    if len(first) > 1:
        told = ", ".join(f"{step} on rank {rank}" for step, rank in first.items())
        raise SaveError(
            f"{what}: {layout.STEPS_COMPLETED} differs: {told}; all ranks save the same step"
        )


def versions() -> dict[str, str]:
    """Return what this process runs with."""
    found = {"elaunch": __version__, "python": platform.python_version()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def flush(parts: CallContext) -> None:
    """Have the metrics on disk before the checkpoint is: it is not to be ahead of them."""
    try:
        parts.train.flush(FLUSH_S)
    except RunDirError as error:
        log.warning("a checkpoint is committed before the metrics of its steps: %s", error)


def _save_once(
    parts: CallContext,
    saving: Saving,
    write: Write,
    extra: Mapping[str, Any] | None,
    stage: Stage | None = None,
) -> Committed:
    durations: dict[str, float] = {}
    times = {"started": time.time(), "durations": durations}
    agreed = stage or begin(parts, saving)

    def write_timed() -> bytes | None:
        begun = time.monotonic()
        try:
            manifest = write(agreed)
        except (KeyboardInterrupt, SystemExit):
            discard(parts, agreed, agreed=False)
            raise
        durations["write"] = round(time.monotonic() - begun, 6)
        return manifest

    return finish(parts, saving, agreed, write_timed, {**times, **dict(extra or {})})


def _make_room(parts: CallContext, saving: Saving) -> bool:
    """Have rank 0 remove what may go; return on all ranks whether anything went."""
    removed: list[str] = []
    needed = sum(parts.distributed.allgather(saving.size, saving.timeout))
    if parts.acts:
        newest = parts.known.newest
        needed = max(needed, 0 if newest is None else newest.size)
        removed = parts.retiring.make_room(saving.keep, needed, parts.known.protected())
    return any(parts.distributed.allgather(bool(removed), saving.timeout))


@contextlib.contextmanager
def _told_of_room(parts: CallContext, saving: Saving) -> Iterator[None]:
    """Raise a full disk's error with what there is and what was needed; others as they are."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        place = parts.storage.place
        needs = f"needs about {text.size(saving.size)}, " if saving.size else ""
        has = text.size(delete.free_bytes(place))
        told = f"no space left on {place}: {needs}has {has}"
        raise OSError(problem.errno, told, problem.filename) from problem
