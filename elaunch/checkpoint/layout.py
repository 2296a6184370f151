"""elaunch's own checkpoint layout: every file name and every document of it.

::

    CHECKPOINT_DIR/
      .stage/step-00000120.r3.<random>/    being written in round 3; nobody reads it
      .quarantine/                         what failed verification; nobody reads it
      step-00000120.r3/                    step 120, written in round 3, committed
        …                                  what the script wrote
        manifest.rank-00000.json           one per rank
        metadata.json
        COMMIT                             written last

    manifest   {"schema": 1, "rank": 0, "host": "a",
                "files": [{"path": "model.pt", "size": 4096, "checksum": "sha256:<hex>"}]}
    metadata   {"schema": 1, "step": 120, "round": 3, "run_id": "digits", "world_size": 2, …}
    COMMIT     {"schema": 1, "digest": "sha256:<hex>"}

A path in a manifest is relative to the checkpoint's directory and stays inside it. The digest is
the SHA-256 of the manifests' bytes, one after the other in the order of their names: what
``cat manifest.rank-*.json | sha256sum`` prints in the C locale. Readers ignore keys that they do
not know and refuse another ``schema``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

SCHEMA = 1
STAGE = ".stage"
QUARANTINE = ".quarantine"
COMMIT = "COMMIT"
METADATA = "metadata.json"
CHECKSUM = "sha256"

_STEP = re.compile(r"step-([0-9]+)\.r([0-9]+)")
_MANIFEST = re.compile(r"manifest\.rank-([0-9]+)\.json")


def step_name(step: int, round_: int) -> str:
    """Return the directory name of the checkpoint of ``step`` that ``round_`` wrote."""
    return f"step-{step:08d}.r{round_}"


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Return (step, round) of a directory name of this layout, or None for any other name."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"manifest.rank-{rank:05d}.json"


def parse_manifest_name(name: str) -> int | None:
    """Return the rank whose manifest has this name, or None for any other name."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def digest(manifests: Mapping[str, bytes]) -> str:
    """Return COMMIT's digest of the manifests, given as name → bytes."""
    total = hashlib.sha256()
    for name in sorted(manifests):
        total.update(manifests[name])
    return f"{CHECKSUM}:{total.hexdigest()}"
