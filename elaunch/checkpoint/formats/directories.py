"""The format of a directory, recognised by its content, in this order.

===============  ===============================================  =============================
format           a directory of it has                            a round is given
===============  ===============================================  =============================
``accelerate``   ``random_states_0.pkl``, no trainer_state.json   it
``huggingface``  ``trainer_state.json``, or is ``checkpoint-120``  it
``dcp``          ``.metadata`` or ``.distcp`` files               it
``deepspeed``    ``…_model_states.pt``, or ``latest`` names one   what has ``latest`` in it
``directory``    any files, where ``--checkpoint-glob`` picks it  it
===============  ===============================================  =============================
"""

from __future__ import annotations

import os
from pathlib import Path

from elaunch.checkpoint.formats import accelerate, dcp, deepspeed, filetree, huggingface
from elaunch.checkpoint.search.candidates import Candidate
from elaunch.errors import CheckpointError


def format_of(path: Path, picked: bool) -> str | None:
    """Return the format of a directory, None if it has none; ``picked``: a pattern names it."""
    names = frozenset(os.listdir(path))
    if huggingface.STATE not in names and accelerate.looks_like(names):
        return accelerate.FORMAT
    if huggingface.looks_like(path, names):
        return huggingface.FORMAT
    if dcp.looks_like(names):
        return dcp.FORMAT
    if deepspeed.looks_like(path, names):
        return deepspeed.FORMAT
    return filetree.FORMAT if picked and names else None


def known_format(candidate: Candidate) -> str | None:
    """Return a directory's format; CheckpointError where its name promises one."""
    format_ = format_of(candidate.path, candidate.picked)
    if format_ is None and candidate.reported:
        there = os.listdir(candidate.path)
        raise CheckpointError(
            "no checkpoint of a known format is in it" if there else "it is empty"
        )
    return format_


def verify(path: Path, step: int, format_: str) -> None:
    """Raise CheckpointError unless a directory of this format is a complete checkpoint."""
    if format_ == accelerate.FORMAT:
        accelerate.verify(path)
    elif format_ == huggingface.FORMAT:
        huggingface.verify(path, step)
    elif format_ == dcp.FORMAT:
        dcp.verify(path)
    elif format_ == deepspeed.FORMAT:
        deepspeed.verify(path)
    else:
        filetree.verify(path)
