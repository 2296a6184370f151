"""``check_same``: every bit of what data parallel ranks should have in common.

Compared are plain tensors (parameters, optimizer states, tensors of the state), pieces of sharded
tensors that several ranks hold, and values. Not compared are buffers of modules, which DDP makes
equal only at the next forward, and what is marked by ``elaunch.PerRank``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.distributed.checkpoint.planner import WriteItemType

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.dcp import plan
from elaunch.training.checkpoint.state import tensors
from elaunch.training.checkpoint.state.flatten import BUFFER, OWN, Captured, capture
from elaunch.training.checkpoint.state.values import Values
from elaunch.training.checkpoint.together.agree import agree
from elaunch.training.checkpoint.together.guard import guarded
from elaunch.training.distributed import DistributedContext

WHAT: Final = "check_same"


def check_same(
    distributed: DistributedContext, state: Mapping[str, Any], timeout: float | None
) -> None:
    """Raise CheckpointError, on all ranks, unless all have the same state.

    ALL ranks call it together. The error names the ranks that differ from most, and the first key.
    """
    digests, problem = guarded(lambda: dict(_digests(capture(state, distributed.rank))), WHAT)
    everyone = agree(distributed, WHAT, problem, digests, timeout, CheckpointError)
    for key in dict.fromkeys(key for held in everyone for key in held):
        own = {rank: held[key] for rank, held in enumerate(everyone) if key in held}
        most = Counter(own.values()).most_common(1)[0][0]
        if strange := [rank for rank, told in own.items() if told != most]:
            ranks = f"rank{'s' * (len(strange) > 1)} {', '.join(map(str, strange))}"
            raise CheckpointError(
                f"{WHAT}: {ranks} of {len(everyone)}: {key.split(chr(0))[0]} is not what "
                f"{'the others have' if len(own) > 2 * len(strange) else 'rank 0 has'}"
            )


def _digests(captured: Captured) -> Iterator[tuple[str, bytes]]:
    leaves = captured.leaves
    for key, packed in Values().pack(captured).items():
        if leaves[key].share != OWN:
            yield key, hashlib.sha256(packed).digest()
    planner = plan.planner_of(captured)
    for item in planner.create_local_plan().items:
        key = item.index.fqn
        if item.type == WriteItemType.BYTE_IO or leaves[key].share in (BUFFER, OWN):
            continue
        data = planner.resolve_data(item)
        told = f"{data.dtype} {tuple(data.shape)}".encode()
        content = tensors.memory_of(data)
        offset = "" if item.type == WriteItemType.TENSOR else f"\0{item.index.offset}"
        yield f"{key}{offset}", hashlib.sha256(told + hashlib.sha256(content).digest()).digest()
