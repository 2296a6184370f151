"""What is in a checkpoint directory, as ``elaunch checkpoints`` shows it: read, nothing changed.

==============  ====================================================================================
state           is
==============  ====================================================================================
committed       in elaunch's own layout; its files were not read for the list
complete        in another format: as whole as its headers can tell
damaged         ``reason`` is what is wrong; no round resumes from it
quarantined     it failed verification and was put aside, with the reason
unfinished      a save that goes on, or whose writers are gone
==============  ====================================================================================
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.records import Committed, Location, PassedOver
from elaunch.checkpoint.retention import pins
from elaunch.checkpoint.search import candidates
from elaunch.checkpoint.search.latest import verify_candidate
from elaunch.checkpoint.storage.files import explain
from elaunch.checkpoint.storage.storage import Storage, open_storage
from elaunch.errors import CheckpointError


@dataclass(frozen=True)
class ListedCheckpoint:
    """One line of the list; times in seconds since 1970, sizes in bytes, None where not known."""

    name: str
    state: str
    format: str = own.FORMAT
    step: int | None = None
    round: int | None = None
    size: int | None = None
    written: float | None = None
    pinned: bool = False
    reason: str = ""
    found: Committed | None = None
    candidate: candidates.Candidate | None = None

    @property
    def age(self) -> tuple[int, int, str]:
        """Order entries from old to new."""
        step = -1 if self.step is None else self.step
        return (step, -1 if self.round is None else self.round, self.name)


@dataclass(frozen=True)
class Listing:
    """What a directory or URL holds, from old to new; ``resumed`` is what live runs began from."""

    place: Location
    storage: Storage
    entries: tuple[ListedCheckpoint, ...]
    quarantined: tuple[ListedCheckpoint, ...] = ()
    unfinished: tuple[ListedCheckpoint, ...] = ()
    resumed: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> ListedCheckpoint | None:
        """The newest that a round could resume from, as far as that was looked at."""
        usable = [entry for entry in self.entries if entry.state in ("committed", "complete")]
        return usable[-1] if usable else None


def look(place: Location, glob: str | None = None) -> Listing:
    """Return what is at a directory or URL; nothing big is read.

    Raises:
        CheckpointError, OSError: it cannot be read.
    """
    storage = open_storage(place)
    pinned = pins.pinned(place)
    committed = {found.name: found for found in storage.listed()}
    entries = [_committed(found, found.name in pinned) for found in committed.values()]
    if isinstance(place, Path):
        entries += [entry for entry in _others(place, glob) if entry.name not in committed]
        entries = [replace(entry, pinned=entry.name in pinned) for entry in entries]
    aside = tuple(_aside(name, reason) for name, reason in storage.quarantined())
    unfinished = tuple(_unfinished(place)) if isinstance(place, Path) else ()
    ordered = tuple(sorted(entries, key=lambda entry: entry.age))
    return Listing(place, storage, ordered, aside, unfinished)


def problem_of(storage: Storage, entry: ListedCheckpoint) -> str:
    """Read a checkpoint as far as its format can be checked; return what is wrong, or ""."""
    if entry.state in ("damaged", "quarantined", "unfinished"):
        return entry.reason
    try:
        if entry.found is not None:
            storage.verify(entry.found)
        elif entry.candidate is not None:
            verify_candidate(entry.candidate, None)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return explain(error, Path(str(error.filename or entry.name)))
    return ""


def _committed(found: Committed, pinned: bool) -> ListedCheckpoint:
    return ListedCheckpoint(
        found.name,
        "committed",
        step=found.step,
        round=found.round,
        size=found.size,
        written=found.committed or None,
        pinned=pinned,
        found=found,
    )


def _others(place: Path, glob: str | None) -> Iterator[ListedCheckpoint]:
    """Yield what is no committed checkpoint of elaunch's own: other formats, and damage."""
    entries, passed_over = candidates.entries_below(place, glob)
    for passed in passed_over:
        if passed.path == place and os.path.lexists(place):
            raise CheckpointError(f"{place}: {passed.reason}")
    for entry in candidates.distinct(entries, place):
        found = candidates.classify(entry, globbed=glob is not None)
        if isinstance(found, PassedOver):
            yield ListedCheckpoint(
                _below(place, Path(found.path)), "damaged", "unknown", reason=found.reason
            )
        elif found is not None:
            judged = _judge(place, found)
            if judged is not None:
                yield judged


def _judge(place: Path, found: candidates.Candidate) -> ListedCheckpoint | None:
    name = _below(place, found.path)
    entry = ListedCheckpoint(name, "complete", step=found.step, round=found.round, candidate=found)
    entry = replace(entry, size=size_of(found.path), written=_changed(found.path))
    entry = replace(entry, format=found.format or "unknown")
    try:
        if found.format == own.FORMAT:
            own.read_documents(found.path, None)
            raise CheckpointError(f"{layout.METADATA} cannot be understood")
        format_ = verify_candidate(found, None)
    except CheckpointError as error:
        return replace(entry, state="damaged", reason=str(error))
    except OSError as error:
        return replace(entry, state="damaged", reason=explain(error, found.path))
    return None if format_ is None else replace(entry, format=format_)


def _below(place: Path, path: Path) -> str:
    try:
        return str(path.relative_to(place))
    except ValueError:
        return str(path)


def _aside(name: str, reason: str) -> ListedCheckpoint:
    parsed = layout.parse_step_name(".".join(name.split(".")[:2]))
    step, round_ = parsed or (None, None)
    return ListedCheckpoint(name, "quarantined", step=step, round=round_, reason=reason)


def _unfinished(place: Path) -> Iterator[ListedCheckpoint]:
    try:
        names = sorted(os.listdir(place / layout.STAGE))
    except OSError:
        return
    for name in names:
        parsed = layout.parse_stage_name(name.partition(".commit-")[0])
        if parsed is not None:
            path = place / layout.STAGE / name
            yield ListedCheckpoint(
                name,
                "unfinished",
                step=parsed[0],
                round=parsed[1],
                size=size_of(path),
                written=_changed(path),
                reason="not committed: it is being written, or its writers are gone",
            )


def size_of(path: Path) -> int | None:
    """Return the bytes of a file, or of all files below a directory; None if it is gone."""
    try:
        if not path.is_dir():
            return path.stat().st_size
        return sum(map(_file_size, (Path(root, n) for root, _, ns in os.walk(path) for n in ns)))
    except OSError:
        return None


def _file_size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def document(listing: Listing) -> dict[str, Any]:
    """Return a listing as JSON-able data."""
    return {
        "schema": 1,
        "directory": str(listing.place),
        "newest": None if listing.newest is None else listing.newest.name,
        "checkpoints": [entry_document(entry) for entry in listing.entries],
        "quarantined": [entry_document(entry) for entry in listing.quarantined],
        "unfinished": [entry_document(entry) for entry in listing.unfinished],
        "resumed_from": dict(listing.resumed),
    }


def entry_document(entry: ListedCheckpoint) -> dict[str, Any]:
    """Return one entry as JSON-able data."""
    said: dict[str, Any] = {
        "name": entry.name,
        "state": entry.state,
        "format": entry.format,
        "step": entry.step,
        "round": entry.round,
        "size": entry.size,
        "written": entry.written,
        "pinned": entry.pinned,
        "reason": entry.reason or None,
    }
    found = entry.found
    if found is not None:
        said |= {
            "uuid": found.uuid,
            "run_id": found.run_id,
            "world_size": found.world_size,
            "metadata": dict(found.metadata),
            "metrics": dict(found.metrics),
            "path": str(found.place),
        }
    return said
