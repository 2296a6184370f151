"""The walk for ``--checkpoint-glob``: which paths below a directory match a pattern.

``*``, ``?`` and ``[…]`` match within one name, ``**`` matches any number of directories. Compared
with the standard library's: ``**`` never follows a symbolic link, so no link can make a circle;
what cannot be listed is reported instead of skipped; temporary and hidden names match only where
a directory of the pattern spells them out; ``.stage`` and ``.quarantine`` are never entered.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.names import is_temporary
from elaunch.checkpoint.records import PassedOver
from elaunch.checkpoint.storage.files import explain
from elaunch.errors import UsageError

_ANY_DEPTH = "**"
_CLOSED = (layout.STAGE, layout.QUARANTINE)


@dataclass(frozen=True)
class Match:
    """A file or directory that matches; ``linked`` if a symbolic link is on the way to it."""

    path: Path
    is_dir: bool
    linked: bool


@dataclass(frozen=True)
class _GlobDirectory:
    """A directory to list, and how much of the pattern led to it."""

    directory: Path
    matched: int
    linked: bool


def check_glob(glob: str) -> None:
    """Raise UsageError unless the pattern is a relative one that stays below its directory."""
    parts = [part for part in glob.split("/") if part not in ("", ".")]
    if not parts:
        reason = "is empty"
    elif glob.startswith("/"):
        reason = "is absolute; give it relative to --checkpoint-dir, such as 'step_*.pt'"
    elif ".." in parts:
        reason = "leaves --checkpoint-dir by '..'"
    else:
        return
    raise UsageError(f"--checkpoint-glob {glob!r} {reason}")


def find(root: Path, pattern: str) -> tuple[list[Match], list[PassedOver]]:
    """Return what matches below ``root``, and the directories that could not be listed.

    A root that does not exist has no matches. Raises UsageError for what ``check_glob`` refuses.
    """
    check_glob(pattern)
    parts = _parts(pattern)
    found: dict[Path, Match] = {}
    unreadable: list[PassedOver] = []
    places = [_GlobDirectory(root, 0, False)]
    listed = set()
    while places:
        place = places.pop()
        if place in listed:
            continue
        listed.add(place)
        try:
            entries = list(os.scandir(place.directory))
        except FileNotFoundError:
            continue
        except OSError as error:
            unreadable.append(PassedOver(place.directory, explain(error, place.directory)))
            continue
        for entry in _matching(entries, parts, place, places):
            found.setdefault(entry.path, entry)
    return list(found.values()), unreadable


def _parts(pattern: str) -> list[str]:
    parts: list[str] = []
    for part in pattern.split("/"):
        if part in ("", ".") or (part == _ANY_DEPTH and parts[-1:] == [_ANY_DEPTH]):
            continue
        parts.append(part)
    return [*parts, "*"] if parts[-1] == _ANY_DEPTH else parts


def _matching(
    entries: list[os.DirEntry[str]],
    parts: list[str],
    place: _GlobDirectory,
    places: list[_GlobDirectory],
) -> Iterator[Match]:
    """Yield the full matches among a directory's entries; add the directories to list next."""
    part = parts[place.matched]
    if part == _ANY_DEPTH:
        places.append(_GlobDirectory(place.directory, place.matched + 1, place.linked))
        places.extend(
            _GlobDirectory(Path(entry.path), place.matched, place.linked)
            for entry in entries
            if not entry.is_symlink() and not is_temporary(entry.name) and _is_dir(entry)
        )
        return
    matches = re.compile(fnmatch.translate(part)).match
    last = place.matched + 1 == len(parts)
    for entry in entries:
        # A directory that the pattern spells out may be called tmp or .cache.
        spelt_out = not last and entry.name == part and part not in _CLOSED
        if not spelt_out and (is_temporary(entry.name) or not matches(entry.name)):
            continue
        is_dir = _is_dir(entry)
        linked = place.linked or entry.is_symlink()
        if last and is_dir is not None:
            yield Match(Path(entry.path), is_dir, linked)
        elif is_dir:
            places.append(_GlobDirectory(Path(entry.path), place.matched + 1, linked))


def _is_dir(entry: os.DirEntry[str]) -> bool | None:
    """Tell a directory from a file; None for broken links, devices and what cannot be asked."""
    try:
        return True if entry.is_dir() else False if entry.is_file() else None
    except OSError:
        return None
