"""``save``: a state, each rank its shard, in the format of torch.distributed.checkpoint.

=============  ===================================================================================
step           what the ranks send each other at its end
=============  ===================================================================================
``offer``      the state is flattened, its values packed, digests taken; then step, plan, digests
               of what has to be equal, lengths of the values, whether the save before is still in
               flight
``plan``       nothing while a state keeps its shape; else the plan, made by all ranks together
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
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from elaunch import text
from elaunch.checkpoint.assemble import merge_metadata
from elaunch.checkpoint.storage.storage import Committed, Stage
from elaunch.errors import CheckpointError, CollectiveError, SaveError
from elaunch.training.checkpoint import collective
from elaunch.training.checkpoint.callcontext import MISSING, CallContext, SaveRequest, metadata_of
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
    plan: int | None = None
    lengths: dict[str, int] | None = None
    digests: bytes = b""
    busy: bool = False
    block: bool = True
    last: Committed | None = None


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
    saving = _Saving(call, cache, state, request)
    if not block and not call.foreground and call.saver is not None:
        return saving.in_background(call.saver)
    if not block and not cache.warned and call.rank == 0 and call.foreground != MISSING:
        log.warning(
            "save(block=False) blocks until the checkpoint is committed: %s; under `elaunch run` "
            "the agents write it in the background",
            call.foreground,
        )
    cache.warned |= not block
    if cache.in_flight is not None:
        wait(call, cache, request.timeout)
    return saving.in_foreground(block)


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
    saving = _Saving(call, cache, state, request)
    saving.plan(saving.offer())
    with together(call.distributed, request.what, timeout):
        if not call.foreground and call.saver is not None:
            saving.memory(call.saver, *saving.filled())


class _Saving:
    """One save of a rank, step by step; ``known`` is what all ranks write by once it is planned.

    ALL ranks call :meth:`offer`, :meth:`plan` and what begins with ``in_`` together; these raise
    SaveError on all of them.
    """

    flat: FlatState
    planner: DefaultSavePlanner
    packed: dict[str, bytes]
    lengths: dict[str, int]
    known: PreparedPlan

    def __init__(
        self, call: CallContext, cache: SaveCache, state: Mapping[str, Any], request: SaveRequest
    ) -> None:
        self._call = call
        self._cache = cache
        self._state = state
        self._request = request

    def in_foreground(self, block: bool) -> SaveHandle:
        """Save by all ranks together; ``block`` as the script gave it."""
        call, request = self._call, self._request
        offers = self.offer(block=block)
        self.plan(offers)

        def write(stage: Stage) -> bytes:
            content, metadata = self.filled()
            images = shardfile.images(content, call.rank, metadata)
            return call.storage.write_shard(stage, collective.header_of(call, request), images)

        request = dataclasses.replace(request, size=self.known.plan.portion.size(self.lengths))
        stage = collective.new_stage(call, request.step, offers[0].uuid)
        return SaveHandle(request.step, collective.save_together(call, request, write, stage=stage))

    def in_background(self, saver: AgentSaverClient) -> SaveHandle:
        """Have the agents save; return when all ranks' shards are staged."""
        call, cache, request = self._call, self._cache, self._request
        waits = request.when_busy != "skip"
        while True:
            offers = self.offer(waits=waits, block=False)
            if not any(offer.busy for offer in offers):
                break
            if not waits:
                return SaveHandle(request.step)
            wait(call, cache, request.timeout)  # an error where storage hangs, or a node gave up
        if before := cache.in_flight:
            before.settle(offers[0].last)
        stage: Stage | None = None
        try:
            self.plan(offers)
            stage = collective.new_stage(call, request.step, offers[0].uuid)
            what = f"{collective.called(request, stage)}, copying"
            with together(call.distributed, what, request.timeout) as step:
                saver.staged(self._copied(saver, stage))
                step.sent = request.choose() if request.choose and call.rank == 0 else None
        except CheckpointError:
            give_up(saver, stage)
            raise
        except CollectiveError:
            give_up(saver)  # if all have staged, it counts all the same
            raise
        return cache.begin(SaveInFlight(call, saver, stage, step.received[0]))

    # ── what is saved ────────────────────────────────────────────────────────────────────────────

    def offer(self, *, waits: bool | None = None, block: bool = True) -> list[Offer]:
        """Prepare the state, and return what the ranks have.

        ``waits``: whether to wait for the save in flight; None if nothing will be staged. Where a
        rank is ``busy`` nothing is begun on any. ``block``: as the script gave it.
        """
        call, cache, request = self._call, self._cache, self._request
        seconds, saver, begun = call.seconds(request.timeout), call.saver, False
        flies = cache.in_flight is not None or call.known.pending is not None
        try:
            with (
                # On all ranks: they wait for each other's save in flight, too.
                call.awaiting(seconds) if waits and flies else nullcontext(),
                together(call.distributed, request.what, seconds + LONGER_S, everyone=True) as step,
            ):
                step.sent = dataclasses.replace(self._prepared(), block=block)
                if waits is not None and saver is not None:
                    begun = self._begin(saver, waits)
                    last = saver.last if begun else None
                    step.sent = dataclasses.replace(step.sent, busy=not begun, last=last)
            offers: list[Offer] = step.received
            if len({one.block for one in offers}) > 1:
                values = ", ".join(text.on_ranks(enumerate(one.block for one in offers)))
                what = f"{request.what}: block differs: {values}"
                raise SaveError(f"{what}; all ranks make the same call")
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
        return offers

    def _begin(self, saver: AgentSaverClient, waits: bool) -> bool:
        """Begin with a shard when the save in flight is over; False: it is not yet.

        That is an error only if the script has given a timeout.
        """
        if self._cache.in_flight is not None:
            self._cache.in_flight.raise_if_lost()
        timeout, seconds = self._request.timeout, self._call.seconds(self._request.timeout)
        with nullcontext() if saver.is_over else self._call.awaiting(seconds):
            begun = saver.begin(waits, alone(seconds, timeout))
        if waits and not begun and timeout is not None:
            raise SaveError(f"the save before is still in flight after {seconds:g} s")
        return begun

    def _prepared(self) -> Offer:
        """Prepare the state; return this rank's offer."""
        call, request = self._call, self._request
        if call.known.read_only is not None:
            raise call.known.read_only
        writeplan.check_group(call.distributed, request.what)
        collective.check_request(request)
        if call.rank == 0:
            collective.check_new(call, request.step)
        self.flat = flat = flatten(self._state, call.rank)
        self.packed, self.planner = self._cache.values.pack(flat), flat.planner()
        known = self._cache.find(writeplan.signature(flat))
        self.lengths = lengths_for(self.packed, known.sent if known else {})
        offer = Offer(request.step, dict(request.metadata), uuid.uuid4().hex, lengths=self.lengths)
        if known is None:
            return offer
        self.known = known
        lengths = None if known.sent == self.lengths else self.lengths
        return dataclasses.replace(
            offer, plan=known.plan.number, lengths=lengths, digests=self._summed()
        )

    def _digests(self) -> bytes:
        """Return the digests of what is compared, joined; zeros for what no other rank has."""
        flat, packed = self.flat, self.packed
        keys = writeplan.compared_keys(flat)
        names = zip(keys, self.known.plan.compared.of(self._call.rank), strict=True)
        alone = {key for key, name in names if name == compare.ALONE}
        values = {
            key: flat.leaves[key].value for key in keys if key not in packed and key not in alone
        }
        samples = {key: bytes(compare.LENGTH) for key in alone} | compare.sampled(values)
        return b"".join(samples.get(key) or compare.digest(packed[key]) for key in keys)

    def _summed(self) -> bytes:
        return self.known.plan.compared.summed(self._call.rank, self._digests())

    def plan(self, offers: list[Offer]) -> None:
        """Have the plan that all ranks write by.

        Raises SaveError also where the digests of what has to be equal differ.
        """
        ranks, timeout = self._call.distributed, self._request.timeout
        about = ranks, f"{self._request.what}, comparing", timeout
        summed, mine = [offer.digests for offer in offers], offers[self._call.rank]
        if mine.plan is None or any(offer.plan != mine.plan for offer in offers):
            number = self._cache.next_number()
            plan = writeplan.make(ranks, self.flat, self.planner, number, timeout)
            everyone = for_purpose(ranks, writeplan.WHAT).gather(self.lengths, timeout)
            self.known = PreparedPlan(plan, {}, everyone or [{} for _ in range(ranks.size)])
            self._cache.add(writeplan.signature(self.flat), self.known)
            with together(*about, everyone=True) as step:
                step.sent = self._summed()
            summed = step.received
        else:
            for rank, offer in enumerate(offers):
                if offer.lengths is not None:
                    self.known.everyone[rank], self.known.metadata = offer.lengths, b""
        self.known.sent = self.lengths
        compared = self.known.plan.compared
        if not compared.are_equal(summed):
            own = (leaf.value for leaf in self.flat.leaves.values() if not leaf.is_tensor)
            with together(*about, everyone=True) as step:
                step.sent = self._digests()
            differing = compared.differing(step.received)
            compare.settle(ranks, differing, self.packed, timeout, own)

    def filled(self) -> tuple[shardfile.Content, bytes | None]:
        """Return the content of this rank's shard, and ``.metadata`` on rank 0."""
        known, plan = self.known, self.known.plan
        content = shardfile.Content(plan, self.planner, self.packed, self.lengths)
        if plan.metadata is None:
            return content, None
        if not known.metadata:
            known.metadata = shardfile.metadata_file(plan.metadata, plan.world, known.everyone)
        return content, known.metadata

    # ── the agent's memory ───────────────────────────────────────────────────────────────────────

    def memory(
        self, saver: AgentSaverClient, content: shardfile.Content, metadata: bytes | None
    ) -> memoryview:
        """Return memory for a shard: its file, and ``.metadata`` behind it."""
        size = archives.aligned(content.size) + len(metadata or b"")
        self._cache.pinning.make_way(size)
        memory = saver.memory(max(size, 1)).cast("B")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._cache.pinning.pin(tensors.over(memory))
        return memory

    def _copied(self, saver: AgentSaverClient, stage: Stage) -> StagedShard:
        """Copy this rank's shard into its agent's memory, and return what lies there."""
        call, (content, metadata) = self._call, self.filled()
        memory = self.memory(saver, content, metadata)
        started, begun = time.time(), time.monotonic()
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
            collective.header_of(call, self._request),
            tuple(files),
            document,
            tuple(call.known.protected()),
            call.local,
            call.known.loads,
        )
