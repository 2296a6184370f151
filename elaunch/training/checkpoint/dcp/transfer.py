"""A state, from one rank to others that have none: a checkpoint of one rank, in memory.

So it holds what a checkpoint holds, and is put where a load would put it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elaunch import text
from elaunch.errors import CheckpointError
from elaunch.training.checkpoint import load as loading
from elaunch.training.checkpoint.dcp import image, plan
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp.sources import Source
from elaunch.training.checkpoint.state.flatten import Values, flatten, lengths_for
from elaunch.training.distributed import DistributedContext


def pack(state: Mapping[str, Any]) -> tuple[bytes, torch.Tensor]:
    """Return ``.metadata`` and the file of a rank alone, for :func:`unpack` on other ranks."""
    flat = flatten(state, 0)
    planner, packed = flat.planner(), Values().pack(flat)
    made = plan.make(DistributedContext(), flat, planner, 1, None)
    lengths = lengths_for(packed, {})
    content = image.Content(made, planner, packed, lengths)
    assert made.metadata is not None  # this is rank 0 of one
    file = torch.empty(content.size, dtype=torch.uint8)
    image.fill(content, memoryview(file.numpy()))
    return image.metadata_file(made.metadata, made.world, [lengths]), file


def unpack(
    state: Mapping[str, Any], metadata: bytes, file: torch.Tensor, place: tuple[int, int]
) -> None:
    """Put what another rank has packed into the objects of ``state``; ``place``: rank and size.

    Raises CheckpointError if this state is another one.
    """
    what = "the state of another rank"
    found = Source(what)
    found.hold({image.data_file(0): memoryview(file.numpy())})
    try:
        own = stored.Stored(stored.read(metadata, what), place[1])
        flat = flatten(state, place[0], own)
        if lacks := {*flat.leaves, *own.claimed} ^ own.keys | {*flat.missing}:
            raise CheckpointError(f"only one of the two has {text.listed(sorted(lacks))}")
        with torch.no_grad():
            loading.fill(found, flat, loading.planned(flat, own))
            for restore in flat.restores:
                restore()
    finally:
        found.close()
