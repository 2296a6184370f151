"""What a save knows before a byte is written: what this rank has, and what the others have.

===========  =====================================================================================
``offered``  the state is flattened, its values packed, digests taken; then one allgather: step,
             plan, digests of what has to be equal, slots of the values, whether the save before is
             still in flight. While a state keeps its shape this is all that is sent
``planned``  the plan, made by all ranks where some rank has none; an error if the digests differ
===========  =====================================================================================
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from elaunch.checkpoint.storage.storage import Stage
from elaunch.checkpoint.writing.merge import merge_metadata
from elaunch.errors import CheckpointError, CollectiveError, SaveError
from elaunch.training.checkpoint import store
from elaunch.training.checkpoint.dcp import image
from elaunch.training.checkpoint.dcp import plan as planning
from elaunch.training.checkpoint.parts import CallContext, Saving
from elaunch.training.checkpoint.state import tensors
from elaunch.training.checkpoint.state.flatten import Captured, capture
from elaunch.training.checkpoint.state.values import Values, slots_for
from elaunch.training.checkpoint.together import compare
from elaunch.training.checkpoint.together.agree import agree, attempt
from elaunch.training.checkpoint.together.guard import guarded
from elaunch.training.distributed import DistributedContext

MARGIN_S: Final = 10.0
"""Seconds that the ranks wait longer for each other than for the save before."""
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
    """What one context remembers from save to save: plans, and whether one is in flight.

    CheckpointContext makes one and gives it to every call; it closes it before the saver.
    """

    def __init__(self) -> None:
        self.values = Values()
        self.pinning = tensors.Pinning()
        self.in_flight = False
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

    def close(self) -> None:
        """Let the memory go; before the saver is closed."""
        self.pinning.close()


@dataclass(frozen=True)
class Offer:
    """What a rank sends before anything is written."""

    step: int
    metadata: Mapping[str, Any]
    uuid: str
    plan: int | None
    slots: dict[str, int] | None
    digests: bytes
    busy: bool = False
    block: bool = True


@dataclass(frozen=True)
class Ready:
    """A prepared state, to be planned."""

    captured: Captured
    packed: dict[str, bytes]
    signature: planning.Signature
    known: PreparedPlan | None
    slots: dict[str, int]
    offer: Offer


def check_group(distributed: DistributedContext, what: str) -> None:
    """Raise CheckpointError unless there is a process group where there are several ranks."""
    if distributed.size == 1:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise CheckpointError(
            f"{what}: {distributed.size} ranks and no process group: call "
            "torch.distributed.init_process_group() first. Without it torch takes each of them for "
            "the only one, and all would write the same"
        )
    if dist.get_world_size() != distributed.size:
        raise CheckpointError(
            f"{what}: the process group has {dist.get_world_size()} ranks, the job "
            f"{distributed.size}"
        )


def give_up(parts: CallContext, stage: Stage | None = None) -> None:
    """Report to this rank's saver that nothing comes of what was begun; see ``Saver.abandon``.

    There is an error already that all ranks are about to raise: another one is only logged.
    """
    problem = attempt(lambda: parts.saver.abandon(stage))[1]
    if problem is not None:
        log.warning("rank %d's part of a save cannot be taken back: %s", parts.rank, problem)


def offered(
    parts: CallContext,
    sharded: Sharded,
    state: Mapping[str, Any],
    saving: Saving,
    waits: bool | None,
) -> tuple[Ready, list[Offer]]:
    """Prepare a state, and receive what the others have. ALL ranks call it together.

    ``waits``: whether to wait for the save in flight; None if nothing will be staged. Where a
    rank is ``busy`` nothing is begun on any. Raises SaveError, on all ranks.
    """
    seconds = parts.seconds(saving.timeout)
    ready, problem = guarded(lambda: _ready(parts, sharded, state, saving), saving.what)
    begun = False
    if waits is not None:
        parts.saver.share(waits, seconds)
    if problem is None and waits is not None:
        with parts.awaiting(seconds):
            begun, problem = attempt(lambda: parts.saver.begin(waits, seconds))
        if problem is None and not begun and waits:
            problem = SaveError(f"the save before is still in flight after {seconds:g} s")
    offer = (
        None
        if ready is None
        else dataclasses.replace(
            ready.offer, busy=waits is not None and not begun, block=waits is None
        )
    )
    try:
        offers = agree(parts.distributed, saving.what, problem, offer, seconds + MARGIN_S)
        _check_block(saving.what, [one.block for one in offers])
        store.check_steps(saving.what, [one.step for one in offers])
        # Now, and not when the agents commit: then it would be the next save's error.
        merge_metadata({rank: one.metadata for rank, one in enumerate(offers)})
    except (CheckpointError, CollectiveError):
        if begun:
            give_up(parts)
        raise
    if begun and any(one.busy for one in offers):
        give_up(parts)
    assert ready is not None
    return ready, offers


def _check_block(what: str, given: list[bool]) -> None:
    """Raise SaveError unless all ranks wait for the commit, or none does."""
    if len(set(given)) > 1:
        told = ", ".join(f"{block} on rank {given.index(block)}" for block in (True, False))
        raise SaveError(f"{what}: block differs: {told}; all ranks make the same call")


def _ready(parts: CallContext, sharded: Sharded, state: Mapping[str, Any], saving: Saving) -> Ready:
    if parts.known.taken is not None:
        raise parts.known.taken
    check_group(parts.distributed, saving.what)
    store.check_metadata(saving)
    if parts.rank == 0:
        store.check_new(parts, saving.step)
    captured = capture(state, parts.rank)
    packed = sharded.values.pack(captured)
    signature = planning.signature(captured)
    known = sharded.find(signature)
    slots = slots_for(packed, known.sent if known else {})
    changed = known is None or known.sent != slots
    offer = Offer(
        saving.step,
        dict(saving.metadata),
        uuid.uuid4().hex,
        known.plan.number if known else None,
        slots if changed else None,
        _digests(captured, packed),
    )
    return Ready(captured, packed, signature, known, slots, offer)


def _digests(captured: Captured, packed: Mapping[str, bytes]) -> bytes:
    keys = planning.compared_keys(captured)
    samples = compare.sampled(
        {key: captured.leaves[key].value for key in keys if key not in packed}
    )
    return b"".join(compare.digest(packed[key]) if key in packed else samples[key] for key in keys)


def planned(
    parts: CallContext, sharded: Sharded, ready: Ready, offers: list[Offer], saving: Saving
) -> tuple[image.Content, bytes | None]:
    """Return what this rank writes, and ``.metadata`` on rank 0. ALL ranks call it together.

    Raises SaveError, on all ranks.
    """
    planner = planning.planner_of(ready.captured)
    known = ready.known
    if known is None or any(offer.plan != known.plan.number for offer in offers):
        known = _planned_anew(parts, sharded, ready, planner, saving.timeout)
    else:
        for rank, offer in enumerate(offers):
            if offer.slots is not None:
                known.everyone[rank], known.metadata = offer.slots, b""
    known.sent = ready.slots
    suspects = compare.differing(known.plan.compared, [offer.digests for offer in offers])
    own = (leaf.value for leaf in ready.captured.leaves.values() if not leaf.is_tensor)
    compare.settle(parts.distributed, suspects, ready.packed, saving.timeout, own)
    content = image.Content(known.plan, planner, ready.packed, ready.slots)
    if known.plan.metadata is None:
        return content, None
    if not known.metadata:
        known.metadata = image.metadata_file(known.plan.metadata, known.plan.world, known.everyone)
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
