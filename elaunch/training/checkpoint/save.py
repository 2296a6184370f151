"""``save``: a state, each rank its shard, in the format of torch.distributed.checkpoint.

=============  ===================================================================================
step           what the ranks send each other at its end
=============  ===================================================================================
``_offered``   the state is flattened, its values packed, digests taken; then step, plan, digests
               of what has to be equal, lengths of the values, whether the save before is still in
               flight
``_planned``   nothing while a state keeps its shape; else the plan, made by all ranks together
block=True     (``collective``) whether all shards are written, straight from the tensors' own
               memory; then what rank 0 has committed
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

from elaunch import text
from elaunch.checkpoint.assemble import merge_metadata
from elaunch.checkpoint.storage.storage import Committed, Stage
from elaunch.errors import CheckpointError, CollectiveError, SaveError
from elaunch.training.checkpoint import collective
from elaunch.training.checkpoint.callcontext import CallContext, SaveRequest, metadata_of
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp import image as shardfile
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp import plan as writeplan
from elaunch.training.checkpoint.handle import (
    LONGER_S,
    SaveHandle,
    SaveInFlight,
    alone,
    await_saver,
    give_up,
)
from elaunch.training.checkpoint.state import compare, tensors
from elaunch.training.checkpoint.state.flatten import FlatState, Values, flatten, lengths_for
from elaunch.training.checkpoint.together import together
from elaunch.training.distributed import for_purpose
from elaunch.wire.worker import StagedShard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from elaunch.training.checkpoint.saver import AgentSaverClient

__all__ = ["SaveCache", "reserve", "save", "wait"]

Filled = tuple[shardfile.Content, bytes | None]
_PLANS: Final = 4
"""Shapes of states whose plans are remembered."""

log = logging.getLogger("elaunch")


@dataclass
class PreparedPlan:
    """A plan, and how long the values' archives are: this rank's as sent, on rank 0 everyone's."""

    plan: writeplan.WritePlan
    sent: dict[str, int]
    everyone: list[dict[str, int]]
    metadata: bytes = b""


class SaveCache:
    """A context's cache from save to save: plans, packed values, and the save in flight.

    CheckpointContext makes one and gives it to every call; it closes it before the saver.
    """

    def __init__(self) -> None:
        self.values = Values()
        self.pinning = tensors.Pinning()
        self.warned = False
        self._flight: SaveInFlight | None = None
        self._number = 0
        self._plans: list[tuple[writeplan.Signature, PreparedPlan]] = []

    def find(self, signature: writeplan.Signature) -> PreparedPlan | None:
        """Return the plan for states of this signature, if there is one."""
        for known, plan in self._plans:
            if known == signature:
                return plan
        return None

    def add(self, signature: writeplan.Signature, known: PreparedPlan) -> None:
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
    """A rank's message before anything is written; ``last``: its newest committed checkpoint."""

    step: int
    metadata: Mapping[str, Any]
    uuid: str
    plan: int | None
    lengths: dict[str, int] | None
    digests: bytes
    busy: bool = False
    block: bool = True
    last: Committed | None = None


@dataclass(frozen=True)
class PreparedState:
    """A prepared state, to be planned."""

    flat: FlatState
    planner: DefaultSavePlanner
    packed: dict[str, bytes]
    signature: writeplan.Signature
    known: PreparedPlan | None
    lengths: dict[str, int]
    offer: Offer


def save(
    call: CallContext,
    cache: SaveCache,
    state: Mapping[str, Any],
    request: SaveRequest,
    block: bool = True,
) -> SaveHandle:
    """Save ``state``; ALL ranks call it together.

    Args:
        call: the call's context.
        cache: what is remembered from save to save.
        state: see elaunch.training.checkpoint.state.flatten.
        request: step, metadata, what may go after the commit.
        block: return when it is committed; else when all ranks' shards are in their agents' memory.

    Returns:
        A handle of the save.

    Raises:
        SaveError: on all ranks, with the ranks and reasons: nothing was committed, or the save that
            was in flight came to nothing.
    """
    if not block and not call.foreground and call.saver is not None:
        return _save_in_background(call, cache, state, request)
    if not block:
        _warn_once(call, cache)
    if cache.in_flight is not None:
        wait(call, cache, request.timeout)
    ready, offers = _offered(call, cache, state, request, block=block)
    known = _planned(call, cache, ready, offers, request)

    def write(stage: Stage) -> bytes:
        content, metadata = _filled(ready, known)
        images = shardfile.images(content, call.rank, metadata)
        return call.storage.write_shard(stage, collective.header_of(call, request), images)

    request = dataclasses.replace(request, size=known.plan.portion.size(ready.lengths))
    stage = collective.new_stage(call, request.step, offers[0].uuid)
    return SaveHandle(request.step, collective.save_together(call, request, write, stage=stage))


def wait(call: CallContext, cache: SaveCache, timeout: float | None) -> Committed | None:
    """Wait until no save is in flight; return the newest checkpoint that is known.

    ALL ranks call it together. Raises SaveError, on all of them, if it came to nothing.
    """
    if cache.in_flight is not None:
        cache.in_flight.result(timeout)
    elif call.known.pending is not None and call.saver is not None:
        await_saver(call, call.saver, timeout)
    else:
        with together(call.distributed, "wait", timeout):
            pass
    return call.known.latest()


def reserve(
    call: CallContext, cache: SaveCache, state: Mapping[str, Any], timeout: float | None
) -> None:
    """Have plan and memory for ``save(state, block=False)`` ready, which else the first one gets.

    ALL ranks call it together. Raises SaveError, on all of them, if the memory is not to be had.
    """
    request = SaveRequest(0, metadata_of(0, None), None, timeout, "reserve")
    ready, offers = _offered(call, cache, state, request)
    known = _planned(call, cache, ready, offers, request)
    with together(call.distributed, request.what, timeout):
        if not call.foreground and call.saver is not None:
            _memory(call.saver, cache, *_filled(ready, known))


def _warn_once(call: CallContext, cache: SaveCache) -> None:
    if not cache.warned and call.rank == 0:
        log.warning(
            "save(block=False) blocks until the checkpoint is committed: %s; under `elaunch run` "
            "the agents write it in the background",
            call.foreground,
        )
    cache.warned = True


# ── what is saved ────────────────────────────────────────────────────────────────────────────────


def _offered(
    call: CallContext,
    cache: SaveCache,
    state: Mapping[str, Any],
    request: SaveRequest,
    *,
    waits: bool | None = None,
    block: bool = True,
) -> tuple[PreparedState, list[Offer]]:
    """Prepare a state, and receive what the others have. ALL ranks call it together.

    ``waits``: whether to wait for the save in flight; None if nothing will be staged. Where a
    rank is ``busy`` nothing is begun on any. ``block``: as the script gave it. Raises SaveError, on
    all ranks.
    """
    seconds, saver, begun = call.seconds(request.timeout), call.saver, False
    try:
        with (
            _waiting(call, cache, waits, seconds),
            together(call.distributed, request.what, seconds + LONGER_S, everyone=True) as step,
        ):
            ready = _prepared(call, cache, state, request)
            step.sent = dataclasses.replace(ready.offer, block=block)
            if waits is not None and saver is not None:
                begun = _begun(call, saver, cache, waits, request.timeout)
                last = saver.last if begun else None
                step.sent = dataclasses.replace(step.sent, busy=not begun, last=last)
        offers: list[Offer] = step.received
        _check_block(request.what, [one.block for one in offers])
        collective.check_steps(request.what, [one.step for one in offers])
        # Now, and not when the agents commit: then it would be the next save's error.
        merge_metadata({rank: one.metadata for rank, one in enumerate(offers)})
    except (CheckpointError, CollectiveError) as error:
        if isinstance(error, SaveError) and error.lost and cache.in_flight is not None:
            cache.in_flight.settle(None, error)
        if begun and saver is not None:
            give_up(saver)
        raise
    if begun and saver is not None and any(one.busy for one in offers):
        give_up(saver)
    return ready, offers


def _waiting(
    call: CallContext, cache: SaveCache, waits: bool | None, seconds: float
) -> AbstractContextManager[None]:
    """Return the section of a wait for a save in flight, on ranks that wait for others', too."""
    flies = cache.in_flight is not None or call.known.pending is not None
    return call.awaiting(seconds) if waits and flies else nullcontext()


def _begun(
    call: CallContext,
    saver: AgentSaverClient,
    cache: SaveCache,
    waits: bool,
    timeout: float | None,
) -> bool:
    """Begin with a shard when the save in flight is over; False: it is not yet.

    That is an error only if the script has given a ``timeout``.
    """
    if cache.in_flight is not None:
        cache.in_flight.raise_if_lost()
    seconds = call.seconds(timeout)
    with nullcontext() if saver.is_over else call.awaiting(seconds):
        begun = saver.begin(waits, alone(seconds, timeout))
    if waits and not begun and timeout is not None:
        raise SaveError(f"the save before is still in flight after {seconds:g} s")
    return begun


def _check_block(what: str, given: list[bool]) -> None:
    """Raise SaveError unless all ranks wait for the commit, or none does."""
    if len(set(given)) > 1:
        values = ", ".join(text.on_ranks(enumerate(given)))
        raise SaveError(f"{what}: block differs: {values}; all ranks make the same call")


def _prepared(
    call: CallContext, cache: SaveCache, state: Mapping[str, Any], request: SaveRequest
) -> PreparedState:
    if call.known.read_only is not None:
        raise call.known.read_only
    writeplan.check_group(call.distributed, request.what)
    collective.check_request(request)
    if call.rank == 0:
        collective.check_new(call, request.step)
    flat = flatten(state, call.rank)
    packed = cache.values.pack(flat)
    signature = writeplan.signature(flat)
    known = cache.find(signature)
    lengths = lengths_for(packed, known.sent if known else {})
    changed = known is None or known.sent != lengths
    summed = b""
    if known is not None:
        summed = known.plan.compared.summed(call.rank, _digests(flat, packed, known, call.rank))
    offer = Offer(
        request.step,
        dict(request.metadata),
        uuid.uuid4().hex,
        known.plan.number if known else None,
        lengths if changed else None,
        summed,
    )
    return PreparedState(flat, flat.planner(), packed, signature, known, lengths, offer)


def _digests(flat: FlatState, packed: Mapping[str, bytes], known: PreparedPlan, rank: int) -> bytes:
    """Return the digests of what is compared, joined; zeros for what no other rank has."""
    keys = writeplan.compared_keys(flat)
    names = zip(keys, known.plan.compared.of(rank), strict=True)
    alone = {key for key, name in names if name == compare.ALONE}
    values = {key: flat.leaves[key].value for key in keys if key not in packed and key not in alone}
    samples = {key: bytes(compare.LENGTH) for key in alone} | compare.sampled(values)
    return b"".join(samples.get(key) or compare.digest(packed[key]) for key in keys)


def _planned(
    call: CallContext,
    cache: SaveCache,
    ready: PreparedState,
    offers: list[Offer],
    request: SaveRequest,
) -> PreparedPlan:
    """Return the plan that all ranks write by. ALL ranks call it.

    Raises SaveError, on all ranks; also where the digests of what has to be equal differ.
    """
    distributed, timeout = call.distributed, request.timeout
    known, summed = ready.known, [offer.digests for offer in offers]
    if known is None or any(offer.plan != known.plan.number for offer in offers):
        known = _planned_anew(call, cache, ready, timeout)
        with together(distributed, f"{request.what}, comparing", timeout, everyone=True) as step:
            digests = _digests(ready.flat, ready.packed, known, call.rank)
            step.sent = known.plan.compared.summed(call.rank, digests)
        summed = step.received
    else:
        for rank, offer in enumerate(offers):
            if offer.lengths is not None:
                known.everyone[rank], known.metadata = offer.lengths, b""
    known.sent = ready.lengths
    if not known.plan.compared.are_equal(summed):
        own = (leaf.value for leaf in ready.flat.leaves.values() if not leaf.is_tensor)
        with together(distributed, f"{request.what}, comparing", timeout, everyone=True) as step:
            step.sent = _digests(ready.flat, ready.packed, known, call.rank)
        every = step.received
        compare.settle(
            distributed, known.plan.compared.differing(every), ready.packed, timeout, own
        )
    return known


def _filled(ready: PreparedState, known: PreparedPlan) -> Filled:
    """Return the content of this rank's shard, and ``.metadata`` on rank 0."""
    plan = known.plan
    content = shardfile.Content(plan, ready.planner, ready.packed, ready.lengths)
    if plan.metadata is None:
        return content, None
    if not known.metadata:
        known.metadata = shardfile.metadata_file(plan.metadata, plan.world, known.everyone)
    return content, known.metadata


def _planned_anew(
    call: CallContext, cache: SaveCache, ready: PreparedState, timeout: float | None
) -> PreparedPlan:
    plan = writeplan.make(call.distributed, ready.flat, ready.planner, cache.next_number(), timeout)
    everyone = for_purpose(call.distributed, writeplan.WHAT).gather(ready.lengths, timeout)
    known = PreparedPlan(plan, {}, everyone or [{} for _ in range(call.distributed.size)])
    cache.add(ready.signature, known)
    return known


# ── the agent's memory ───────────────────────────────────────────────────────────────────────────


def _save_in_background(
    call: CallContext,
    cache: SaveCache,
    state: Mapping[str, Any],
    request: SaveRequest,
) -> SaveHandle:
    """Have the agents save ``state``; return when all ranks' shards are staged."""
    saver = call.saver
    assert saver is not None  # asked by the caller
    waits = request.when_busy != "skip"
    while True:
        ready, offers = _offered(call, cache, state, request, waits=waits, block=False)
        if not any(offer.busy for offer in offers):
            break
        if not waits:
            return SaveHandle(request.step)
        wait(call, cache, request.timeout)  # an error where the storage hangs, or a node gave up
    if before := cache.in_flight:
        before.settle(offers[0].last)
    try:
        known = _planned(call, cache, ready, offers, request)
    except (CheckpointError, CollectiveError):
        give_up(saver)
        raise
    stage = collective.new_stage(call, request.step, offers[0].uuid)
    try:
        what = f"{collective.called(request, stage)}, copying"
        with together(call.distributed, what, request.timeout) as step:
            filled = _filled(ready, known)
            memory = _memory(saver, cache, *filled)
            saver.staged(_copied(call, request, stage, filled, memory))
            step.sent = request.choose() if request.choose and call.rank == 0 else None
    except CheckpointError:
        give_up(saver, stage)
        raise
    except CollectiveError:
        give_up(saver)  # if all have staged, it counts all the same
        raise
    return cache.begin(SaveInFlight(call, saver, stage, step.received[0]))


def _memory(
    saver: AgentSaverClient, cache: SaveCache, content: shardfile.Content, metadata: bytes | None
) -> memoryview:
    """Return memory for a shard: its file, and ``.metadata`` behind it."""
    size = archives.aligned(content.size) + len(metadata or b"")
    cache.pinning.make_way(size)
    memory = saver.memory(max(size, 1)).cast("B")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cache.pinning.pin(tensors.over(memory))
    return memory


def _copied(
    call: CallContext, request: SaveRequest, stage: Stage, filled: Filled, memory: memoryview
) -> StagedShard:
    """Copy this rank's shard into its agent's memory, and return what lies there."""
    started, begun = time.time(), time.monotonic()
    content, metadata = filled
    shardfile.fill(content, memory)
    files: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    if content.size:
        files.append((shardfile.data_file(call.rank), ((0, content.size),)))
    if metadata is not None:
        at = archives.aligned(content.size)
        memory[at : at + len(metadata)] = metadata
        files.append((stored.FILE, ((at, len(metadata)),)))
    collective.flush(call)
    durations = {"copy": round(time.monotonic() - begun, 6)}
    document = collective.documented(call, stage, {"started": started, "durations": durations})
    document.pop("committed", None)  # it is not, yet
    return StagedShard(
        stage,
        collective.header_of(call, request),
        tuple(files),
        document,
        tuple(call.known.protected()),
        call.local,
        call.known.loads,
    )
