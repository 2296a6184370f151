"""``save``: a state, each rank its shard, in the format of torch.distributed.checkpoint.

======================  ==========================================================================
step                    what the ranks send each other
======================  ==========================================================================
prepare, plan           elaunch.training.checkpoint.prepare
block=True              (elaunch.training.checkpoint.store) files over the tensors' own memory,
                        fsynced, manifests written, committed
block=False             each rank copies its shard into memory that its agent owns; one allgather
                        that all have; each stages its shard; one barrier, so that on the return
                        of any rank all shards are staged. The agents write and commit
======================  ==========================================================================
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch

from elaunch.checkpoint.storage.storage import Committed, Image, Stage
from elaunch.errors import CheckpointError, CollectiveError, ContextError
from elaunch.training.checkpoint import request, store
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp import image as imaging
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.parts import CallContext, Saving
from elaunch.training.checkpoint.prepare import MARGIN_S, Sharded, give_up, offered, planned
from elaunch.training.checkpoint.state import tensors
from elaunch.training.checkpoint.together.agree import agree, attempt
from elaunch.training.checkpoint.together.guard import guarded
from elaunch.wire.saver import Handed

__all__ = ["Busy", "Sharded", "reserve", "save", "wait"]

Busy = Literal["wait", "skip"]
BUSY: Final = ("wait", "skip")
Filled = tuple[imaging.Content, bytes | None]


def save(
    parts: CallContext,
    sharded: Sharded,
    state: Mapping[str, Any],
    saving: Saving,
    block: bool = True,
    when_busy: Busy = "wait",
) -> Committed | None:
    """Save ``state``; ALL ranks call it together.

    Args:
        parts: what the context works with.
        sharded: what it remembers.
        state: see elaunch.training.checkpoint.state.flatten.
        saving: step, metadata, what may go after the commit.
        block: return when it is committed; else when all ranks' shards are in their agents' memory.
        when_busy: if a save is in flight with ``block=False``: "wait" for it, or "skip" this one.

    Returns:
        What was committed; None with ``block=False``, and if the save was skipped.

    Raises:
        SaveError: on all ranks, with the ranks and reasons: nothing was committed, or the save that
            was in flight came to nothing.
    """
    if when_busy not in BUSY:
        raise ContextError(f"when_busy={when_busy!r}: it is one of {', '.join(BUSY)}")
    if block and sharded.in_flight:
        wait(parts, sharded, saving.timeout)
    ready, offers = offered(parts, sharded, state, saving, None if block else when_busy == "wait")
    if any(offer.busy for offer in offers):
        return None
    if block:
        content, metadata = planned(parts, sharded, ready, offers, saving)
        return _write(parts, saving, imaging.images(content, parts.rank, metadata))
    try:
        filled = planned(parts, sharded, ready, offers, saving)
        stage = store.new_stage(parts, saving.step, offers[0].uuid)
        handed = _copied(parts, sharded, saving, stage, filled)
    except (CheckpointError, CollectiveError):
        give_up(parts)
        raise
    _hand_over(parts, sharded, saving, handed)
    return None


def wait(parts: CallContext, sharded: Sharded, timeout: float | None) -> Committed | None:
    """Wait until no save is in flight; return the newest checkpoint that is known.

    ALL ranks call it together. Raises SaveError, on all of them, if it came to nothing.
    """
    seconds = parts.seconds(timeout)
    parts.saver.share(True, seconds)
    with parts.awaiting(seconds):
        found, problem = attempt(lambda: parts.saver.wait(seconds))
    sharded.in_flight = False
    said = agree(parts.distributed, "wait", problem, found, seconds + MARGIN_S)
    if said[0] is not None:
        parts.known.note(said[0])
    return parts.known.latest()


def reserve(
    parts: CallContext, sharded: Sharded, state: Mapping[str, Any], timeout: float | None
) -> None:
    """Have plan and memory for ``save(state, block=False)`` ready, which else the first one gets.

    ALL ranks call it together. Raises SaveError, on all of them, if the memory is not to be had.
    """
    saving = Saving(0, request.metadata_of(0, None), None, timeout, "reserve")
    ready, offers = offered(parts, sharded, state, saving, None)
    content, metadata = planned(parts, sharded, ready, offers, saving)
    problem = guarded(lambda: _memory(parts, sharded, content, metadata), saving.what)[1]
    agree(parts.distributed, saving.what, problem, None, timeout)


def _write(parts: CallContext, saving: Saving, files: list[Image]) -> Committed:
    sized = dataclasses.replace(saving, size=sum(image.size for image in files))

    def write(stage: Stage) -> bytes:
        return parts.storage.write_part(stage, store.part_of(parts, sized), files)

    return store.save_together(parts, sized, write)


def _memory(
    parts: CallContext, sharded: Sharded, content: imaging.Content, metadata: bytes | None
) -> memoryview:
    """Return memory for a shard: its file, and ``.metadata`` behind it."""
    size = _behind(content) + len(metadata or b"")
    sharded.pinning.make_way(size)
    memory = parts.saver.memory(max(size, 1)).cast("B")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        sharded.pinning.pin(tensors.over(memory))
    return memory


def _behind(content: imaging.Content) -> int:
    return archives.aligned(imaging.size_of(content.plan.portion, content.slots))


def _copied(
    parts: CallContext, sharded: Sharded, saving: Saving, stage: Stage, filled: Filled
) -> Handed:
    """Copy this rank's shard into the saver's memory. ALL ranks call it together."""
    started, begun = time.time(), time.monotonic()
    content, metadata = filled
    what = store.called(saving, stage)

    def copy() -> None:
        memory = _memory(parts, sharded, content, metadata)
        imaging.fill(content, memory)
        if metadata is not None:
            at = _behind(content)
            memory[at : at + len(metadata)] = metadata

    problem = guarded(copy, saving.what)[1]
    store.flush(parts)
    agree(parts.distributed, f"{what}, copying", problem, None, saving.timeout)
    times = {"started": started, "durations": {"copy": round(time.monotonic() - begun, 6)}}
    return _handed(parts, saving, stage, filled, times)


def _hand_over(parts: CallContext, sharded: Sharded, saving: Saving, handed: Handed) -> None:
    """Stage this rank's shard. ALL ranks call it together."""
    problem = attempt(lambda: parts.saver.staged(handed))[1]
    sharded.in_flight = True
    what = f"{store.called(saving, handed.stage)}, handed over"
    try:
        agree(parts.distributed, what, problem, None, saving.timeout)
    except CheckpointError:
        give_up(parts, handed.stage)
        raise
    except CollectiveError:
        give_up(parts)  # if all have staged, it counts all the same
        raise


def _handed(
    parts: CallContext, saving: Saving, stage: Stage, filled: Filled, times: Mapping[str, Any]
) -> Handed:
    content, metadata = filled
    files: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    if size := imaging.size_of(content.plan.portion, content.slots):
        files.append((imaging.data_file(parts.rank), ((0, size),)))
    if metadata is not None:
        files.append((stored.FILE, ((_behind(content), len(metadata)),)))
    document = store.documented(parts, stage, times)
    document.pop("committed", None)  # it is not, yet
    return Handed(
        stage,
        store.part_of(parts, saving),
        tuple(files),
        document,
        None if saving.keep is None else dataclasses.asdict(saving.keep),
        tuple(parts.known.protected()),
        parts.local,
    )
