"""Which rank writes what: torch's own planner, asked once for each shape of a state.

Each rank plans for itself (``create_local_plan``), rank 0 makes one plan of all
(``create_global_plan``) and sends each rank which of its own pieces to write. As long as no rank's
keys, shapes or placements change, the plan stays, and a save needs none of this.

Before torch plans, rank 0 leaves with the lowest rank what is that one's to write (``Share``);
torch spreads the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.state.compare import ALONE, ComparedKeys, key_of_piece
from elaunch.training.checkpoint.state.flatten import FlatState, KeyPath
from elaunch.training.checkpoint.together import together
from elaunch.training.distributed import for_purpose

if TYPE_CHECKING:
    from elaunch.training.distributed import DistributedContext

WHAT: Final = "planning a save"
Signature = tuple[Hashable, ...]
Box = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a piece of a tensor."""


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


@dataclass(frozen=True)
class Portion:
    """The share of one rank: pieces of tensors, then values, in the order of its file."""

    tensors: tuple[tuple[MetadataIndex, Box], ...]
    values: tuple[str, ...]

    def size(self, lengths: Mapping[str, int]) -> int:
        """Return about how many bytes it has; ``lengths`` are those of the values' archives."""
        boxes = [int(dtype.itemsize) * math.prod(shape) for _, (dtype, shape) in self.tensors]
        return sum(boxes) + sum(lengths[key] for key in self.values)


@dataclass(frozen=True)
class WritePlan:
    """A plan, as one rank knows it.

    Attributes:
        number: names it, the same on all ranks.
        items: the pieces that this rank writes.
        portion: the same pieces, and the values that it writes.
        compared: the keys that have to be equal where several ranks have them.
        world: what each rank writes; on rank 0 only.
        metadata: what ``.metadata`` says but for the places; on rank 0 only.
    """

    number: int
    items: tuple[WriteItem, ...]
    portion: Portion
    compared: ComparedKeys
    world: tuple[Portion, ...] = ()
    metadata: Metadata | None = None


@dataclass(frozen=True)
class _Proposal:
    """A rank's proposal, sent to rank 0: all that it could write."""

    local: SavePlan
    lowest: frozenset[str]
    compared: tuple[str, ...]
    paths: dict[str, KeyPath]


def signature(flat: FlatState) -> Signature:
    """Return what the plan depends on; equal for two saves that can share a plan."""
    return tuple((key, leaf.share, _shape(leaf.value)) for key, leaf in flat.leaves.items())


def _shape(value: Any) -> Hashable:
    if isinstance(value, DTensor):
        return (value.dtype, tuple(value.shape), value.device_mesh, value.placements)
    if not isinstance(value, torch.Tensor):
        return None
    if not hasattr(value, "local_shards"):
        return (value.dtype, tuple(value.shape))
    shards = [shard.metadata for shard in value.local_shards()]
    boxes = [(tuple(one.shard_offsets), tuple(one.shard_sizes)) for one in shards]
    return (value.dtype, tuple(value.size()), tuple(boxes))


def compared_keys(flat: FlatState) -> tuple[str, ...]:
    """Return the keys of what has to be equal on all ranks that have it."""
    return tuple(key for key, leaf in flat.leaves.items() if leaf.is_compared)


def make(
    distributed: DistributedContext,
    flat: FlatState,
    planner: DefaultSavePlanner,
    number: int,
    timeout: float | None,
) -> WritePlan:
    """Plan together. ALL ranks call it; raises SaveError on all of them if they contradict."""
    world: tuple[Portion, ...] = ()
    metadata: Metadata | None = None
    with together(distributed, WHAT, timeout):
        proposal = _propose(flat, planner)
    proposals = for_purpose(distributed, WHAT).gather(proposal, timeout)
    with together(distributed, WHAT, timeout) as step:
        if proposals is not None:
            chosen, compared, world, metadata = _decide(proposals)
            step.sent = (chosen, compared)
    chosen, compared = step.received[0]
    items = _chosen(proposal.local, chosen[distributed.rank])
    pieces = tuple(item for item in items if item.type != WriteItemType.BYTE_IO)
    return WritePlan(number, pieces, _portion(items), compared, world, metadata)


Chosen = list[list[tuple[int, int | None]]]
"""For each rank the positions of its items, and their hints."""


def _propose(flat: FlatState, planner: DefaultSavePlanner) -> _Proposal:
    leaves = flat.leaves
    local = planner.create_local_plan()
    places: dict[str, list[Any]] = {}
    for item in local.items:
        places.setdefault(item.index.fqn, []).append(item.index.offset)
    return _Proposal(
        local,
        frozenset(key for key, leaf in leaves.items() if leaf.is_left_to_the_lowest),
        tuple(
            key_of_piece(key, places.get(key, ()))
            if leaves[key].is_tensor and not leaves[key].is_whole_tensor
            else key
            for key in compared_keys(flat)
        ),
        {key: leaf.path for key, leaf in leaves.items()},
    )


def _decide(
    proposals: Sequence[_Proposal],
) -> tuple[Chosen, ComparedKeys, tuple[Portion, ...], Metadata]:
    """Return rank 0's plan: what each rank writes, and the fields of ``WritePlan``."""
    plans = [proposal.local for proposal in proposals]
    _check_kinds(plans)
    left: list[SavePlan] = []
    taken: set[str] = set()
    for proposal in proposals:
        items = [
            item
            for item in proposal.local.items
            if not (item.index.fqn in proposal.lowest and item.index.fqn in taken)
        ]
        taken |= {item.index.fqn for item in items}
        left.append(dataclasses.replace(proposal.local, items=items))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planned, metadata = planner.create_global_plan(left)
    paths = {key: path for proposal in proposals for key, path in proposal.paths.items()}
    return (
        [_positions(local, plan) for local, plan in zip(plans, planned, strict=True)],
        ComparedKeys.made(_shared([proposal.compared for proposal in proposals])),
        tuple(_portion(plan.items) for plan in planned),
        dataclasses.replace(metadata, planner_data=paths),
    )


def _shared(lists: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the keys of each rank, with ALONE for pieces that no other rank has."""
    holders = Counter(key for keys in lists for key in keys)
    return [tuple(key if holders[key] > 1 else ALONE for key in keys) for keys in lists]


def _check_kinds(plans: Sequence[SavePlan]) -> None:
    """Raise CheckpointError if one key is, on two ranks, of another kind, type or size."""
    first: dict[str, tuple[int, str]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            kind = _kind_of(item)
            other, before = first.setdefault(item.index.fqn, (rank, kind))
            if before != kind:
                raise CheckpointError(
                    f"{item.index.fqn} is {before} on rank {other} and {kind} on rank {rank}: put "
                    "elaunch.PerRank(…) around what each rank has of its own"
                )


def _kind_of(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "a value"
    kind = "a sharded tensor" if item.type == WriteItemType.SHARD else "a tensor"
    return f"{kind} of {data.properties.dtype} and size {tuple(data.size)}"


def _positions(local: SavePlan, planned: SavePlan) -> list[tuple[int, int | None]]:
    where = {item.index: position for position, item in enumerate(local.items)}
    return [(where[item.index], item.index.index) for item in planned.items]


def _chosen(local: SavePlan, chosen: Sequence[tuple[int, int | None]]) -> list[WriteItem]:
    items = []
    for position, hint in chosen:
        item = local.items[position]
        index = dataclasses.replace(item.index, index=hint)
        items.append(dataclasses.replace(item, index=index))
    return items


def _portion(items: Sequence[WriteItem]) -> Portion:
    tensors, values = [], []
    for item in items:
        data = item.tensor_data
        if data is None:
            values.append(item.index.fqn)
        else:
            tensors.append((item.index, (data.properties.dtype, tuple(data.chunk.sizes))))
    return Portion(tuple(tensors), tuple(values))
