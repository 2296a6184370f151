"""``save``: a state, each rank its shard, in the format of torch.distributed.checkpoint.

=============  ===================================================================================
step           what the ranks send each other at its end
=============  ===================================================================================
``_offered``   the state is flattened, its values packed, digests taken; then step, plan, digests
               of what has to be equal, slots of the values, whether the save before is still in
               flight
``_planned``   nothing while a state keeps its shape; else the plan, made by all ranks together
block=True     elaunch.training.checkpoint.store: whether all shards are written, straight from the
               tensors' own memory; then what rank 0 has committed
block=False    each rank copies its shard into memory that its agent owns, and stages it; whether
               all have. On the return of any rank all shards are staged. The agents write and
               commit. Without agents it is ``block=True``
=============  ===================================================================================
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from elaunch.checkpoint.storage.storage import Committed, Image, Stage
from elaunch.checkpoint.writing.assemble import merge_metadata
from elaunch.errors import CheckpointError, CollectiveError, ContextError, SaveError
from elaunch.training.checkpoint import compare, store
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp import image as imaging
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp import plan as planning
from elaunch.training.checkpoint.handle import (
    LONGER_S,
    Busy,
    SaveHandle,
    SaveInFlight,
    await_saver,
)
from elaunch.training.checkpoint.parts import CallContext, Saving, metadata_of
from elaunch.training.checkpoint.state import tensors
from elaunch.training.checkpoint.state.digests import digest
from elaunch.training.checkpoint.state.flatten import Captured, Values, capture, slots_for
from elaunch.training.checkpoint.together import together
from elaunch.wire.saver import StagedShard

if TYPE_CHECKING:
    from elaunch.training.checkpoint.saver.agent import AgentSaverClient

__all__ = ["Sharded", "reserve", "save", "wait"]

BUSY: Final = ("wait", "skip")
Filled = tuple[imaging.Content, bytes | None]


_PLANS: Final = 4
"""Shapes of states whose plans are remembered."""

log = logging.getLogger("elaunch")


@dataclass
class PreparedPlan:
    """A plan, and the slots of the values: as this rank sent them, and all ranks' on rank 0."""

    plan: planning.WritePlan
    sent: dict[str, int]
    everyone: list[dict[str, int]]
    metadata: bytes = b""


class Sharded:
    """What one context remembers from save to save: plans, and the save in flight.

    CheckpointContext makes one and gives it to every call; it closes it before the saver.
    """

    def __init__(self) -> None:
        self.values = Values()
        self.pinning = tensors.Pinning()
        self.warned = False
        self._flight: SaveInFlight | None = None
        self._number = 0
        self._plans: list[tuple[planning.Signature, PreparedPlan]] = []

    def find(self, signature: planning.Signature) -> PreparedPlan | None:
        """Return the plan for states of this signature, if there is one."""
        for known, plan in self._plans:
            if known == signature:
                return plan
        return None

    def add(self, signature: planning.Signature, known: PreparedPlan) -> None:
        """Remember a plan."""
        others = [entry for entry in self._plans if entry[0] != signature]
        self._plans = [(signature, known), *others][:_PLANS]

    def next_number(self) -> int:
        """Return the next plan's number; plans are made by all ranks together."""
        self._number += 1
        return self._number

    @property
    def in_flight(self) -> SaveInFlight | None:
        """The save that may be in flight, as far as all ranks know; the same on all of them."""
        return None if self._flight is None or self._flight.is_settled else self._flight

    def begin(self, flight: SaveInFlight) -> SaveInFlight:
        """Note that all ranks have staged their shards of a save."""
        self._flight = flight
        return flight

    def close(self) -> None:
        """Let the memory go; before the saver is closed."""
        self.pinning.close()


@dataclass(frozen=True)
class Offer:
    """What a rank sends before anything is written; ``last``: what its saves have become."""

    step: int
    metadata: Mapping[str, Any]
    uuid: str
    plan: int | None
    slots: dict[str, int] | None
    digests: bytes
    busy: bool = False
    block: bool = True
    last: Committed | None = None


@dataclass(frozen=True)
class Ready:
    """A prepared state, to be planned."""

    captured: Captured
    packed: dict[str, bytes]
    signature: planning.Signature
    known: PreparedPlan | None
    slots: dict[str, int]
    digests: bytes
    offer: Offer


def save(
    parts: CallContext,
    sharded: Sharded,
    state: Mapping[str, Any],
    saving: Saving,
    block: bool = True,
    when_busy: Busy = "wait",
) -> Committed | SaveHandle:
    """Save ``state``; ALL ranks call it together.

    Args:
        parts: what the context works with.
        sharded: what it remembers.
        state: see elaunch.training.checkpoint.state.flatten.
        saving: step, metadata, what may go after the commit.
        block: return when it is committed; else when all ranks' shards are in their agents' memory.
        when_busy: if a save is in flight with ``block=False``: "wait" for it, or "skip" this one.

    Returns:
        What was committed; with ``block=False`` a handle of the save.

    Raises:
        SaveError: on all ranks, with the ranks and reasons: nothing was committed, or the save that
            was in flight came to nothing.
    """
    if when_busy not in BUSY:
        raise ContextError(f"when_busy={when_busy!r}: it is one of {', '.join(BUSY)}")
    if not block and not parts.foreground and parts.saver is not None:
        return _save_in_background(parts, sharded, state, saving, when_busy)
    if not block:
        _warn_once(parts, sharded)
    if sharded.in_flight is not None:
        wait(parts, sharded, saving.timeout)
    ready, offers = _offered(parts, sharded, state, saving, block=block)
    content, metadata = _planned(parts, sharded, ready, offers, saving)
    stage = store.new_stage(parts, saving.step, offers[0].uuid)
    done = _write(parts, saving, stage, imaging.images(content, parts.rank, metadata))
    return done if block else SaveHandle(saving.step, done)


def wait(parts: CallContext, sharded: Sharded, timeout: float | None) -> Committed | None:
    """Wait until no save is in flight; return the newest checkpoint that is known.

    ALL ranks call it together. Raises SaveError, on all of them, if it came to nothing.
    """
    if sharded.in_flight is not None:
        sharded.in_flight.result(timeout)
    elif parts.known.pending is not None and parts.saver is not None:
        await_saver(parts, parts.saver, timeout)
    else:
        with together(parts.distributed, "wait", timeout):
            pass
    return parts.known.latest()


def reserve(
    parts: CallContext, sharded: Sharded, state: Mapping[str, Any], timeout: float | None
) -> None:
    """Have plan and memory for ``save(state, block=False)`` ready, which else the first one gets.

    ALL ranks call it together. Raises SaveError, on all of them, if the memory is not to be had.
    """
    saving = Saving(0, metadata_of(0, None), None, timeout, "reserve")
    ready, offers = _offered(parts, sharded, state, saving)
    content, metadata = _planned(parts, sharded, ready, offers, saving)
    with together(parts.distributed, saving.what, timeout):
        if not parts.foreground and parts.saver is not None:
            _memory(parts.saver, sharded, content, metadata)


def _warn_once(parts: CallContext, sharded: Sharded) -> None:
    if not sharded.warned and parts.rank == 0:
        log.warning(
            "save(block=False) blocks until the checkpoint is committed: %s; under `elaunch run` "
            "the agents write it in the background",
            parts.foreground,
        )
    sharded.warned = True


# ── what is saved ────────────────────────────────────────────────────────────────────────────────


def _offered(
    parts: CallContext,
    sharded: Sharded,
    state: Mapping[str, Any],
    saving: Saving,
    *,
    waits: bool | None = None,
    block: bool = True,
) -> tuple[Ready, list[Offer]]:
    """Prepare a state, and receive what the others have. ALL ranks call it together.

    ``waits``: whether to wait for the save in flight; None if nothing will be staged. Where a
    rank is ``busy`` nothing is begun on any. ``block``: as the script gave it. Raises SaveError, on
    all ranks.
    """
    seconds, saver, begun = parts.seconds(saving.timeout), parts.saver, False
    try:
        with (
            _waiting(parts, sharded, waits, seconds),
            together(parts.distributed, saving.what, seconds + LONGER_S) as step,
        ):
            ready = _ready(parts, sharded, state, saving)
            step.sent = dataclasses.replace(ready.offer, block=block)
            if waits is not None and saver is not None:
                begun = _begun(parts, saver, sharded, waits, saving.timeout)
                last = saver.last if begun else None
                step.sent = dataclasses.replace(step.sent, busy=not begun, last=last)
        offers: list[Offer] = step.received
        _check_block(saving.what, [one.block for one in offers])
        store.check_steps(saving.what, [one.step for one in offers])
        # Now, and not when the agents commit: then it would be the next save's error.
        merge_metadata({rank: one.metadata for rank, one in enumerate(offers)})
    except (CheckpointError, CollectiveError) as error:
        if isinstance(error, SaveError) and error.lost and sharded.in_flight is not None:
            sharded.in_flight.settle(None, error)
        if begun:
            _give_up(parts)
        raise
    if begun and any(one.busy for one in offers):
        _give_up(parts)
    return ready, offers


def _waiting(
    parts: CallContext, sharded: Sharded, waits: bool | None, seconds: float
) -> AbstractContextManager[None]:
    """Return the section of a wait for a save in flight, on ranks that wait for others', too."""
    flies = sharded.in_flight is not None or parts.known.pending is not None
    return parts.awaiting(seconds) if waits and flies else nullcontext()


def _begun(
    parts: CallContext,
    saver: AgentSaverClient,
    sharded: Sharded,
    waits: bool,
    timeout: float | None,
) -> bool:
    """Begin with a shard when the save in flight is over; False: it is not yet.

    That is an error only if the script has given a ``timeout``.
    """
    if sharded.in_flight is not None:
        sharded.in_flight.raise_if_lost()
    seconds = parts.seconds(timeout)
    with parts.awaiting(seconds):
        begun = saver.begin(waits, seconds)
    if waits and not begun and timeout is not None:
        raise SaveError(f"the save before is still in flight after {seconds:g} s")
    return begun


def _check_block(what: str, given: list[bool]) -> None:
    """Raise SaveError unless all ranks wait for the commit, or none does."""
    if len(set(given)) > 1:
        told = ", ".join(f"{block} on rank {given.index(block)}" for block in (True, False))
        raise SaveError(f"{what}: block differs: {told}; all ranks make the same call")


def _ready(parts: CallContext, sharded: Sharded, state: Mapping[str, Any], saving: Saving) -> Ready:
    if parts.known.taken is not None:
        raise parts.known.taken
    planning.check_group(parts.distributed, saving.what)
    store.check_metadata(saving)
    if parts.rank == 0:
        store.check_new(parts, saving.step)
    captured = capture(state, parts.rank)
    packed = sharded.values.pack(captured)
    signature = planning.signature(captured)
    known = sharded.find(signature)
    slots = slots_for(packed, known.sent if known else {})
    changed = known is None or known.sent != slots
    digests = _digests(captured, packed)
    offer = Offer(
        saving.step,
        dict(saving.metadata),
        uuid.uuid4().hex,
        known.plan.number if known else None,
        slots if changed else None,
        known.plan.compared.summed(parts.rank, digests) if known else b"",
    )
    return Ready(captured, packed, signature, known, slots, digests, offer)


def _digests(captured: Captured, packed: Mapping[str, bytes]) -> bytes:
    keys = planning.compared_keys(captured)
    samples = compare.sampled(
        {key: captured.leaves[key].value for key in keys if key not in packed}
    )
    return b"".join(digest(packed[key]) if key in packed else samples[key] for key in keys)


def _planned(
    parts: CallContext, sharded: Sharded, ready: Ready, offers: list[Offer], saving: Saving
) -> Filled:
    """Return what this rank writes, and ``.metadata`` on rank 0. ALL ranks call it together.

    Raises SaveError, on all ranks; also where the digests of what has to be equal differ.
    """
    planner, distributed = planning.planner_of(ready.captured), parts.distributed
    known, summed = ready.known, [offer.digests for offer in offers]
    if known is None or any(offer.plan != known.plan.number for offer in offers):
        known = _planned_anew(parts, sharded, ready, planner, saving.timeout)
        own_sum = known.plan.compared.summed(parts.rank, ready.digests)
        summed = distributed.allgather(own_sum, saving.timeout)
    else:
        for rank, offer in enumerate(offers):
            if offer.slots is not None:
                known.everyone[rank], known.metadata = offer.slots, b""
    known.sent = ready.slots
    suspects = {}
    if not known.plan.compared.are_equal(summed):
        suspects = known.plan.compared.differing(
            distributed.allgather(ready.digests, saving.timeout)
        )
    own = (leaf.value for leaf in ready.captured.leaves.values() if not leaf.is_tensor)
    compare.settle(distributed, suspects, ready.packed, saving.timeout, own)
    content = imaging.Content(known.plan, planner, ready.packed, ready.slots)
    if known.plan.metadata is None:
        return content, None
    if not known.metadata:
        plan = known.plan
        known.metadata = imaging.metadata_file(plan.metadata, plan.world, known.everyone)
    return content, known.metadata


def _planned_anew(
    parts: CallContext, sharded: Sharded, ready: Ready, planner: Any, timeout: float | None
) -> PreparedPlan:
    number = sharded.next_number()
    plan = planning.make(parts.distributed, ready.captured, planner, number, timeout)
    everyone = parts.distributed.gather(ready.slots, timeout)
    known = PreparedPlan(plan, {}, everyone or [{} for _ in range(parts.distributed.size)])
    sharded.add(ready.signature, known)
    return known


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def _write(parts: CallContext, saving: Saving, stage: Stage, files: list[Image]) -> Committed:
    sized = dataclasses.replace(saving, size=sum(image.size for image in files))

    def write(stage: Stage) -> bytes:
        return parts.storage.write_shard(stage, store.header_of(parts, sized), files)

    return store.save_together(parts, sized, write, stage=stage)


# ── the agent's memory ───────────────────────────────────────────────────────────────────────────


def _save_in_background(
    parts: CallContext,
    sharded: Sharded,
    state: Mapping[str, Any],
    saving: Saving,
    when_busy: Busy,
) -> SaveHandle:
    """Have the agents save ``state``; return when all ranks' shards are staged."""
    saver = parts.saver
    assert saver is not None  # asked by the caller
    waits = when_busy == "wait"
    while True:  # the agents raise it when the storage takes nothing of the save before any more
        ready, offers = _offered(parts, sharded, state, saving, waits=waits, block=False)
        if not any(offer.busy for offer in offers):
            break
        if not waits:
            return SaveHandle(saving.step)
    if before := sharded.in_flight:
        before.settle(offers[0].last)
    try:
        filled = _planned(parts, sharded, ready, offers, saving)
    except (CheckpointError, CollectiveError):
        _give_up(parts)
        raise
    stage = store.new_stage(parts, saving.step, offers[0].uuid)
    try:
        with together(parts.distributed, f"{store.called(saving, stage)}, copying", saving.timeout):
            memory = _memory(saver, sharded, *filled)
            saver.staged(_copied(parts, saving, stage, filled, memory))
    except CheckpointError:
        _give_up(parts, stage)
        raise
    except CollectiveError:
        _give_up(parts)  # if all have staged, it counts all the same
        raise
    return sharded.begin(SaveInFlight(parts, saver, stage))


def _give_up(parts: CallContext, stage: Stage | None = None) -> None:
    """Report to this rank's agent that nothing comes of what was begun: ``abandon``.

    There is an error already that all ranks are about to raise: another one is only logged.
    """
    assert parts.saver is not None  # it has begun
    try:
        parts.saver.abandon(stage)
    except SaveError as problem:
        log.warning("rank %d's part of a save cannot be taken back: %s", parts.rank, problem)


def _memory(
    saver: AgentSaverClient, sharded: Sharded, content: imaging.Content, metadata: bytes | None
) -> memoryview:
    """Return memory for a shard: its file, and ``.metadata`` behind it."""
    size = _behind(content) + len(metadata or b"")
    sharded.pinning.make_way(size)
    memory = saver.memory(max(size, 1)).cast("B")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        sharded.pinning.pin(tensors.over(memory))
    return memory


def _behind(content: imaging.Content) -> int:
    return archives.aligned(imaging.size_of(content.plan.portion, content.slots))


def _copied(
    parts: CallContext, saving: Saving, stage: Stage, filled: Filled, memory: memoryview
) -> StagedShard:
    """Copy this rank's shard into its agent's memory, and return what lies there."""
    started, begun = time.time(), time.monotonic()
    content, metadata = filled
    imaging.fill(content, memory)
    files: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    if size := imaging.size_of(content.plan.portion, content.slots):
        files.append((imaging.data_file(parts.rank), ((0, size),)))
    if metadata is not None:
        at = _behind(content)
        memory[at : at + len(metadata)] = metadata
        files.append((stored.FILE, ((at, len(metadata)),)))
    store.flush(parts)
    durations = {"copy": round(time.monotonic() - begun, 6)}
    document = store.documented(parts, stage, {"started": started, "durations": durations})
    document.pop("committed", None)  # it is not, yet
    return StagedShard(
        stage,
        store.header_of(parts, saving),
        tuple(files),
        document,
        None if saving.keep is None else dataclasses.asdict(saving.keep),
        tuple(parts.known.protected()),
        parts.local,
        parts.known.loads,
    )
