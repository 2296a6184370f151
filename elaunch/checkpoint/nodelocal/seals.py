"""Manifests that nodes with directories of their own send each other between two rounds.

A node commits a stage when it has the manifests of all ranks. Where the round ended before they
came, the shards may be on the disks all the same, and another node may have committed already. So
before stages are finished or cleared, every node receives the manifests of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.storage.commit import read_stage
from elaunch.checkpoint.storage.storage import open_storage

Seals = Mapping[str, Mapping[int, bytes]]
"""The name of a stage → rank → the bytes of its manifest."""

NEWEST: Final = 10
"""Committed checkpoints that a node lists by name."""


def staged(root: Path) -> dict[str, dict[int, bytes]]:
    """Return the manifests in the stages that are here; raises OSError."""
    found = {}
    for stage in _stages(root):
        with contextlib.suppress(FileNotFoundError):  # it is discarded just now
            found[stage.name] = read_stage(root / layout.STAGE / stage.name)
    return found


def committed(root: Path) -> dict[str, Path]:
    """Return where the newest committed checkpoints are, by the names that their stages had."""
    if not (root / layout.RUN).exists():
        return {}
    newest = open_storage(root, local=True).listed()[-NEWEST:]
    return {Stage(one.step, one.round, one.uuid).name: Path(one.place) for one in newest}


def merge(all_seals: Iterable[Seals]) -> dict[str, dict[int, bytes]]:
    """Return the manifests of all nodes; of one rank's manifests the first counts."""
    merged: dict[str, dict[int, bytes]] = {}
    for seals in all_seals:
        for name, manifests in seals.items():
            known = merged.setdefault(name, {})
            for rank, content in manifests.items():
                known.setdefault(rank, content)
    return merged


def adopt(root: Path, seals: Seals) -> None:
    """Put into the stages that are here the manifests that other nodes have; raises OSError."""
    for stage in _stages(root):
        with contextlib.suppress(FileNotFoundError):  # as above
            own = read_stage(root / layout.STAGE / stage.name)
            lacking = {r: said for r, said in seals.get(stage.name, {}).items() if r not in own}
            if own and lacking:
                open_storage(root, local=True).adopt(stage, lacking)


def _stages(root: Path) -> list[Stage]:
    stages = root / layout.STAGE
    parsed = [layout.parse_stage_name(path.name) for path in sorted(stages.glob("step-*"))]
    return [Stage(*one) for one in parsed if one is not None]
