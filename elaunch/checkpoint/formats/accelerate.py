"""Verification of what Accelerate's ``save_state(DIR)`` leaves, a directory for ``load_state``.

==========================================  ====================================================
file                                        must be
==========================================  ====================================================
``random_states_<rank>.pkl``                there for each rank up to the highest, and whole;
                                            every rank writes its own, as the last of its files
``model*.safetensors``, ``optimizer*.bin``  whole, and so every other file of a known format
… , ``custom_checkpoint_*.pkl``
``pytorch_model_fsdp_0/``, ``optimizer_0/`` whole DCP directories
``latest`` and ``pytorch_model/``           what DeepSpeed wrote, whole
==========================================  ====================================================

Models may be written by hooks of the script's own, so no name of theirs is demanded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from elaunch.checkpoint.formats import filetree
from elaunch.checkpoint.formats.archives import number_inside
from elaunch.errors import CheckpointError

FORMAT = "accelerate"
AUTOMATIC = "checkpoints/checkpoint_*"
"""Where ``automatic_checkpoint_naming`` puts them, below the project's directory."""

_RANDOM = re.compile(r"random_states_([0-9]+)\.pkl")


def looks_like(names: Iterable[str]) -> bool:
    """Tell from the names in a directory whether ``save_state`` wrote there."""
    return any(_RANDOM.fullmatch(name) for name in names)


def step_inside(path: Path) -> int:
    """Return the steps that Accelerate itself has counted; the script may count others."""
    states = sorted(name for name in os.listdir(path) if _RANDOM.fullmatch(name))
    return number_inside(path / states[0], "step") or 0


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file is whole and no rank's is missing in between."""
    ranks = {int(found[1]) for name in os.listdir(path) if (found := _RANDOM.fullmatch(name))}
    # With a directory on each node the first ranks may be elsewhere.
    expected = range(min(ranks), min(ranks) + len(ranks))
    if missing := set(expected) - ranks:
        raise CheckpointError(f"missing: random_states_{min(missing)}.pkl: the save did not finish")
    filetree.check(path, (*filetree.TORCH, ".bin", ".pkl"))
