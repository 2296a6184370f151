"""A checkpoint directory as ``elaunch checkpoints`` shows it: read, nothing is changed.

==============  ====================================================================================
state           is
==============  ====================================================================================
committed       in elaunch's own layout; its files were not read for the list
complete        in another format: as whole as its headers can tell
damaged         ``reason`` is what is wrong; no round resumes from it
quarantined     it failed verification and was put aside, with the reason
unfinished      a save that goes on, or whose writers are gone
==============  ====================================================================================

Its pages are the list, one checkpoint, and the verdicts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from elaunch.checkpoint import layout, shelves
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.records import Committed, Location, PassedOver
from elaunch.checkpoint.search import latest
from elaunch.checkpoint.search.latest import verify_candidate
from elaunch.checkpoint.storage.files import explain
from elaunch.checkpoint.storage.storage import Storage, open_storage
from elaunch.errors import CheckpointError
from elaunch.text import date, duration, one_line, size
from elaunch.views.layout import NOTHING, Cell, Column, Page, Paragraph, Part, fields, given, table

METRICS_SHOWN: Final = 4
FILES_SHOWN: Final = 200

# The colours of ``elaunch status`` (elaunch.views.layout) for the states shown here.
_COLOURS: Final = {
    "committed": "finished",
    "complete": "finished",
    "damaged": "failed",
    "quarantined": "failed",
    "unfinished": "ended",
    "good": "finished",
    "bad": "failed",
}


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
    candidate: latest.Candidate | None = None

    @property
    def age(self) -> tuple[int, int, str]:
        """Order entries from old to new."""
        step = -1 if self.step is None else self.step
        return (step, -1 if self.round is None else self.round, self.name)


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a directory or URL, the oldest first; live runs began from ``resumed``."""

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
    pinned = shelves.pinned(place)
    committed = {found.name: found for found in storage.listed()}
    entries = [_committed(found, found.name in pinned) for found in committed.values()]
    if isinstance(place, Path):
        entries += _others(place, glob, committed)
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


def _others(
    place: Path, glob: str | None, committed: Collection[str]
) -> Iterator[ListedCheckpoint]:
    """Yield what is not ``committed`` in elaunch's own layout: other formats, and damage."""
    entries, passed_over = latest.entries_below(place, glob)
    for passed in passed_over:
        if passed.path == place and os.path.lexists(place):
            raise CheckpointError(f"{place}: {passed.reason}")
    known = {os.path.join(place, name) for name in committed}
    for entry in latest.distinct(entries, place):
        if str(entry.path) in known:
            continue
        found = latest.classify(entry, globbed=glob is not None)
        if isinstance(found, PassedOver):
            yield ListedCheckpoint(
                _below(place, Path(found.path)), "damaged", "unknown", reason=found.reason
            )
        elif found is not None:
            judged = _judge(place, found)
            if judged is not None:
                yield judged


def _judge(place: Path, found: latest.Candidate) -> ListedCheckpoint | None:
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
    names = ("name", "state", "format", "step", "round", "size", "written", "pinned")
    said: dict[str, Any] = {name: getattr(entry, name) for name in names}
    said["reason"] = entry.reason or None
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


def list_page(listing: Listing, now: float) -> Page:
    """Return the page of a directory."""
    entries = (*listing.unfinished, *listing.quarantined, *listing.entries)
    if not entries:
        return (Paragraph((f"{one_line(str(listing.place))} has no checkpoints",)),)
    metrics = _metrics(listing.entries)
    columns = "NAME, STEP>, SIZE>, AGE>, FORMAT?, PINNED?, STATE~"
    rows = (_row(entry, listing, metrics, now) for entry in entries)
    more = [Column(one_line(name), right=True, spare=True) for name in metrics]
    return (fields([("directory", str(listing.place))]), table(columns, rows, more=more))


def _row(
    entry: ListedCheckpoint, listing: Listing, metrics: Sequence[str], now: float
) -> tuple[object, ...]:
    state = entry.state + (f": {one_line(entry.reason)}" if entry.reason else "")
    runs = listing.resumed.get(entry.name)
    if runs:
        state += f", {one_line(runs)} has resumed from it"
    values = entry.found.metrics if entry.found is not None else {}
    age = given(entry.written, lambda written: duration(max(0.0, now - written)))
    what = (entry.name, entry.step, given(entry.size, size), age, entry.format)
    shown = Cell(state, _COLOURS[entry.state])
    return *what, "yes" * entry.pinned, shown, *(_number(values.get(name)) for name in metrics)


def _metrics(entries: Sequence[ListedCheckpoint]) -> list[str]:
    names: dict[str, None] = {}
    for entry in reversed(entries):
        if entry.found is not None:
            names.update(dict.fromkeys(_once(entry.found.metrics)))
    return list(names)[:METRICS_SHOWN]


def _once(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return metrics without those ``group.name`` that are there as ``name``, too."""
    plain = {name: name.partition(".")[2] for name in metrics}
    return {
        name: value
        for name, value in metrics.items()
        if not (plain[name] in metrics and metrics[plain[name]] == value)
    }


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else NOTHING


def verdict_page(verdicts: Sequence[tuple[ListedCheckpoint, str]]) -> Page:
    """Return what ``verify`` has found: for each checkpoint that it is good, or why not."""
    rows = []
    for entry, problem in verdicts:
        good = "good" if entry.found is not None else "complete (its format has no checksums)"
        cell = Cell(one_line(problem), _COLOURS["bad"]) if problem else Cell(good, _COLOURS["good"])
        rows.append((entry.name, cell))
    return (table("NAME, VERDICT~", rows),)


def show_page(entry: ListedCheckpoint, files: Sequence[Mapping[str, Any]], now: float) -> Page:
    """Return the page of one checkpoint; ``files`` as the manifests list them."""
    parts: list[Part] = [fields(_facts(entry, now))]
    if files:
        rows = (
            (str(file["path"]), str(file["rank"]), size(file["size"]), str(file["checksum"]))
            for file in files[:FILES_SHOWN]
        )
        parts.append(table("FILE, RANK>, SIZE>, CHECKSUM~?", rows))
        if len(files) > FILES_SHOWN:
            more = len(files) - FILES_SHOWN
            parts.append(Paragraph((f"{more} more files: --json has all",)))
    return tuple(parts)


def _facts(entry: ListedCheckpoint, now: float) -> Iterator[tuple[str, str]]:
    yield "name", entry.name
    yield "state", entry.state + (f": {entry.reason}" if entry.reason else "")
    yield "format", entry.format
    if entry.step is not None:
        yield "step", str(entry.step)
    if entry.found is not None:
        yield from _committed_facts(entry.found)
    if entry.size is not None:
        yield "size", f"{size(entry.size)} ({entry.size:,} bytes)"
    if entry.written is not None:
        yield "written", f"{date(entry.written)}, {duration(max(0.0, now - entry.written))} ago"
    yield "pinned", "yes" if entry.pinned else "no"


def _committed_facts(found: Committed) -> Iterator[tuple[str, str]]:
    yield "round", str(found.round)
    yield "uuid", found.uuid
    yield "run", found.run_id or NOTHING
    yield "world size", str(found.world_size)
    said = found.document
    hosts, versions, spent = said.get("hosts"), said.get("versions"), said.get("durations")
    if isinstance(hosts, list):
        yield "hosts", ", ".join(map(str, hosts))
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{name} {value}" for name, value in versions.items())
    if isinstance(spent, Mapping) and spent:
        yield "took", ", ".join(f"{name} {_seconds(value)}" for name, value in spent.items())
    for name, value in _once(found.metrics).items():
        yield f"metric {name}", _number(value)
    for name, value in found.metadata.items():
        yield f"metadata {name}", json.dumps(value, default=str)


def _seconds(value: object) -> str:
    return duration(value) if isinstance(value, int | float) else str(value)
