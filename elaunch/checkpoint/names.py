"""Names of files and directories: is it unfinished, and of which step?"""

from __future__ import annotations

import re
from pathlib import PurePath

_STEP = re.compile(r"step[^0-9a-z]{0,3}([0-9]+)|steps[^0-9a-z]{0,3}([0-9]+)", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+")
_CHECKPOINT = re.compile(r"step|checkpoint|ckpt|\A[0-9]+\Z", re.IGNORECASE)


def is_temporary(name: str) -> bool:
    """Tell whether a name is one that writers use before they rename: hidden, tmp*, *.tmp*."""
    return name.startswith((".", "tmp")) or ".tmp" in name


def sounds_like_checkpoint(name: str) -> bool:
    """Tell whether people would take this for a checkpoint's name."""
    return _CHECKPOINT.search(name) is not None


def step_in_name(name: str, *, is_file: bool) -> int | None:
    """Return the step in a name: the last number behind "step", else the last number, else None.

    Numbers in a file's extension (``.pt2``) count only if there is no other.
    """
    steps = _STEP.findall(name)
    if steps:
        return int(steps[-1][0] or steps[-1][1])
    numbers = _NUMBER.findall(PurePath(name).stem) if is_file else []
    numbers = numbers or _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None
