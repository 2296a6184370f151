"""Pins: the checkpoints that retention leaves alone because a person has pinned them.

``DIR/.pins/step-00000120.r3`` is an empty file; the checkpoint of that name stays until it is
unpinned. A pin says nothing about the content: what is damaged is quarantined all the same. On a
URL the pins are empty objects under the same names.
"""

from __future__ import annotations

import contextlib
import os

from elaunch.checkpoint import layout
from elaunch.checkpoint.records import Location
from elaunch.checkpoint.storage.durable import sync_directory
from elaunch.checkpoint.storage.objects import Objects
from elaunch.errors import CheckpointError


def pinned(place: Location) -> frozenset[str]:
    """Return the names that are pinned at a directory or URL; OSError if they cannot be read."""
    if isinstance(place, str):
        names = Objects(place).names(layout.PINS)
    else:
        try:
            names = os.listdir(place / layout.PINS)
        except FileNotFoundError:
            return frozenset()
    return frozenset(name for name in names if layout.parse_step_name(name) is not None)


def pin(place: Location, name: str) -> None:
    """Have retention leave the checkpoint ``name`` alone; a second time does nothing.

    Raises CheckpointError for a name that no checkpoint of elaunch's layout has.
    """
    _check(name)
    if isinstance(place, str):
        Objects(place).put(f"{layout.PINS}/{name}", b"")
        return
    directory = place / layout.PINS
    directory.mkdir(exist_ok=True)
    (directory / name).touch()
    for changed in (directory, place):
        sync_directory(changed)


def unpin(place: Location, name: str) -> None:
    """Let retention decide about ``name`` again; a second time does nothing."""
    _check(name)
    if isinstance(place, str):
        Objects(place).delete(f"{layout.PINS}/{name}")
        return
    with contextlib.suppress(FileNotFoundError):
        (place / layout.PINS / name).unlink()
        sync_directory(place / layout.PINS)


def _check(name: str) -> None:
    if layout.parse_step_name(name) is None:
        raise CheckpointError(
            f"{name!r} cannot be pinned: only checkpoints in elaunch's own layout can, whose names "
            "are as step-00000120.r3"
        )
