"""``.safetensors`` files: is the file whole?

8 bytes with the header's length (little-endian), the header in JSON, then the tensors' bytes. The
header gives each tensor's range; the largest end is the file's end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elaunch.checkpoint.storage.files import open_regular, parse_json, regular_size
from elaunch.errors import CheckpointError

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError unless the file has exactly the bytes that its header announces."""
    name = path.name
    size = regular_size(path)
    with open_regular(path) as file:
        length_field = file.read(8)
        length = int.from_bytes(length_field, "little")
        if len(length_field) < 8 or length > min(HEADER_LIMIT, size - 8):
            raise CheckpointError(f"{name} is truncated or damaged: {size} bytes, no whole header")
        header = parse_json(file.read(length), f"{name}: header")
    wanted = 8 + length + _data_size(header, name)
    if size < wanted:
        raise CheckpointError(f"truncated: {name} has {size} bytes, its header wants {wanted}")
    if size > wanted:
        raise CheckpointError(f"damaged: {name} has {size} bytes, its header wants {wanted}")


def _data_size(header: dict[str, Any], name: str) -> int:
    end = 0
    for tensor, entry in header.items():
        if tensor == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[1]) is not int:
            raise CheckpointError(f"{name}: header: {tensor} has no data_offsets")
        end = max(end, offsets[1])
    return end
