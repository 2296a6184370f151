"""Lightning's ``.ckpt``: one file by torch.save, or a directory (sharded strategies).

The directory form is a DCP directory with ``meta.pt`` beside it, which holds everything that is
no tensor. The step is in the name as ``step=120``; where it is not (``last.ckpt``), it is
``global_step`` in the archive.
"""

from __future__ import annotations

import re
from pathlib import Path

from elaunch.checkpoint.formats import dcp
from elaunch.checkpoint.formats.archives import check_zip, number_inside

FORMAT = "lightning"
SUFFIX = ".ckpt"
META = "meta.pt"

_STEP = re.compile(r"step=([0-9]+)")


def step_in_name(name: str) -> int | None:
    """Return the number behind the last ``step=`` of a name, or None."""
    found = _STEP.findall(name)
    return int(found[-1]) if found else None


def step_inside(path: Path) -> int | None:
    """Return the ``global_step`` that the archive holds, or None.

    Raises CheckpointError where the archive is not whole, OSError where it cannot be read.
    """
    return number_inside(path / META if path.is_dir() else path, "global_step")


def verify_directory(path: Path) -> None:
    """Raise CheckpointError unless both the DCP files and ``meta.pt`` are whole."""
    dcp.verify(path)
    check_zip(path / META)
