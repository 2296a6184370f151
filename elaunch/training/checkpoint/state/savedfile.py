"""One file of ``torch.save``: what ``--init-from`` may name, and ``save_ddp()`` once wrote.

Its keys are those of the state. Under each stands a ``state_dict()``, a dict of these, or a value;
for an ``elaunch.PerRank`` every rank's, in a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from elaunch.errors import CheckpointError
from elaunch.text import listed
from elaunch.training.checkpoint.state import kinds, modules
from elaunch.training.checkpoint.state.perrank import PerRank

FILE: Final = "state.pt"
_PER_RANK: Final = "elaunch.per_rank"


def load(place: Path, state: Any, rank: int, strict: bool) -> None:
    """Fill a state from the file, or that in a directory; raises CheckpointError unless it fits."""
    file = place if place.is_file() else place / FILE
    _fill(state, torch.load(file, map_location="cpu", weights_only=True), rank, strict)


def _fill(state: Any, saved: Any, rank: int, strict: bool) -> None:
    own, held = dict(kinds.members(state)), dict(kinds.members(saved))
    if strict and (odd := own.keys() ^ held.keys()):
        raise CheckpointError(
            f"only the state or only the file has {listed(sorted(map(str, odd)))}"
        )
    for key in filter(held.__contains__, own):  # in one order on all ranks: FSDP1 makes calls
        marked, target, new = own[key], own[key], held[key]
        if isinstance(marked, PerRank):
            target, new = marked.value, new[_PER_RANK][rank % len(new[_PER_RANK])]
        if isinstance(target, torch.nn.Module):
            names = modules.state_of(target)
            new = {
                name if name in names else name.removeprefix("module."): new[name] for name in new
            }
            modules.set_state(target, new if strict else {**names, **new})
        elif kinds.is_stateful(target):
            target.load_state_dict(new)
        elif isinstance(target, torch.Tensor):
            target.detach().copy_(new)
        elif isinstance(target, Mapping | list) and kinds.holds_more(target):
            _fill(target, new, rank, strict)
        elif isinstance(marked, PerRank):
            marked.value = new
        else:
            state[key] = new
