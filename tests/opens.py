"""Which files are opened, and directories listed, below a directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_EVENTS = ("open", "os.listdir", "os.scandir")
_places: dict[str, list[str]] = {}


@contextmanager
def opened_below(place: Path) -> Iterator[list[str]]:
    """Yield the names of what is opened or listed below ``place``, by any thread, in the block."""
    _hook()
    counted = _places[str(place)] = []
    try:
        yield counted
    finally:
        del _places[str(place)]


@cache
def _hook() -> None:
    sys.addaudithook(_note)  # for good: a hook cannot be taken away


def _note(event: str, args: tuple[object, ...]) -> None:
    if not _places or event not in _EVENTS or not isinstance(args[0], str | os.PathLike):
        return
    path = os.fspath(args[0])
    for place, counted in _places.items():
        if isinstance(path, str) and path.startswith(place):
            counted.append(os.path.relpath(path, place))
