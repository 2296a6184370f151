"""Verification of what Accelerate's ``save_state(DIR)`` leaves, a directory for ``load_state``.

==========================================  ====================================================
file                                        must be
==========================================  ====================================================
``random_states_<rank>.pkl``                there for each rank up to the highest, and whole;
                                            every rank writes its own, as the last of its files,
                                            and rank 0 has the large ones to write before it
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
from elaunch.checkpoint.storage.files import is_temporary
from elaunch.errors import CheckpointError, RankFileMissing

FORMAT = "accelerate"
AUTOMATIC = "checkpoints/checkpoint_*"
"""Where ``automatic_checkpoint_naming`` puts them, below the project's directory."""

_UNFINISHED = ": the save did not finish"
_RANDOM = re.compile(r"random_states_([0-9]+)\.pkl")


def looks_like(names: Iterable[str]) -> bool:
    """Tell from the names in a directory whether ``save_state`` wrote there."""
    return any(_RANDOM.fullmatch(name) for name in names)


def step_inside(path: Path) -> int:
    """Return the steps that Accelerate itself has counted; the script may count others."""
    states = sorted(name for name in os.listdir(path) if _RANDOM.fullmatch(name))
    return number_inside(path / states[0], "step") or 0


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file is whole and no rank's is missing in between.

    RankFileMissing where there are all kinds of files of higher ranks than the first: with a
    directory on each node the first ones may be elsewhere.
    """
    names = [name for name in os.listdir(path) if not is_temporary(name)]
    ranks = {int(found[1]) for name in names if (found := _RANDOM.fullmatch(name))}
    expected = range(min(ranks), min(ranks) + len(ranks))
    if missing := set(expected) - ranks:
        raise CheckpointError(f"missing: random_states_{min(missing)}.pkl{_UNFINISHED}")
    filetree.check(path, (*filetree.TORCH, ".bin", ".pkl"))
    if 0 not in ranks:
        error = CheckpointError if len(ranks) == len(names) else RankFileMissing
        raise error(f"missing: random_states_0.pkl{_UNFINISHED}")
