"""Verification of a ``torch.distributed.checkpoint`` directory.

``.metadata``, written last, is a pickle of a ``Metadata`` object; its ``storage_data`` gives for
every piece of a tensor the file, the offset and the length. The checkpoint is whole if each file
reaches to the end of its last piece. torch keeps no checksums, so flipped bits are not seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

from elaunch.checkpoint.formats.pickles import PICKLE_LIMIT, attribute, load_inert, mapping
from elaunch.checkpoint.storage.files import inside, read_limited, regular_size
from elaunch.errors import CheckpointError

FORMAT = "dcp"
METADATA = ".metadata"
METADATA_STAGED = ".metadata.tmp"
DATA_SUFFIX = ".distcp"


def looks_like(names: Iterable[str]) -> bool:
    """Tell from the names in a directory whether torch.distributed.checkpoint wrote there."""
    return any(name in (METADATA, METADATA_STAGED) or name.endswith(DATA_SUFFIX) for name in names)


def verify(path: Path) -> None:
    """Raise CheckpointError unless ``.metadata`` is readable and all that it names is there."""
    try:
        size = regular_size(path / METADATA)
    except FileNotFoundError:
        path.stat()  # the whole directory may be gone, which is another error
        raise CheckpointError(f"{METADATA} is missing: the save did not finish") from None
    if size == 0:
        # torch syncs the file before it writes to it, so a power cut can leave it empty.
        raise CheckpointError(f"{METADATA} is empty")
    for name, wanted in wanted_sizes(path).items():
        size = regular_size(inside(path, name, METADATA))
        if size < wanted:
            raise CheckpointError(f"truncated: {name} has {size} bytes, {METADATA} wants {wanted}")


def verify_below(path: Path, name: str) -> None:
    """Verify the directory ``name`` in ``path`` and name it in the reason."""
    try:
        verify(path / name)
    except CheckpointError as error:
        where = "" if name == os.curdir else f"{name}{os.sep}: "
        raise CheckpointError(f"{where}{error}") from None


def wanted_sizes(path: Path) -> dict[str, int]:
    """Return each file that ``.metadata`` names, and up to which byte it must reach.

    Raises CheckpointError where it cannot be read as what torch writes.
    """
    loaded = load_inert(read_limited(path / METADATA, PICKLE_LIMIT), METADATA)
    pieces = attribute(loaded, "storage_data")
    found = mapping(pieces)
    if found is None:
        raise CheckpointError(f"{METADATA} has no storage_data that names files")
    wanted: dict[str, int] = {}
    for piece in found.values():
        name = attribute(piece, "relative_path")
        offset, length = attribute(piece, "offset"), attribute(piece, "length")
        if not isinstance(name, str) or not _is_size(offset) or not _is_size(length):
            raise CheckpointError(f"{METADATA} has a piece without file, offset and length")
        wanted[name] = max(wanted.get(name, 0), offset + length)
    return wanted


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < 2**63
