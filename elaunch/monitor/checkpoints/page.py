"""What ``elaunch checkpoints`` prints, as pages: the list, one checkpoint, the verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from elaunch.checkpoint.records import Committed
from elaunch.monitor.amounts import clean, date, duration, memory
from elaunch.monitor.checkpoints.view import ListedCheckpoint, Listing
from elaunch.monitor.page import Cell, Column, Fields, Page, Paragraph, Part, Table

NOTHING: Final = "-"
METRICS_SHOWN: Final = 4
FILES_SHOWN: Final = 200

# The colours of ``elaunch status`` (elaunch.monitor.render) for the states shown here.
_COLOURS: Final = {
    "committed": "finished",
    "complete": "finished",
    "damaged": "failed",
    "quarantined": "failed",
    "unfinished": "ended",
    "good": "finished",
    "bad": "failed",
}


def list_page(listing: Listing, now: float) -> Page:
    """Return the page of a directory."""
    entries = (*listing.unfinished, *listing.quarantined, *listing.entries)
    if not entries:
        return (Paragraph((f"{clean(str(listing.place))} has no checkpoints",)),)
    metrics = _metrics(listing.entries)
    columns = (
        Column("NAME"),
        Column("STEP", right=True),
        Column("SIZE", right=True),
        Column("AGE", right=True),
        Column("FORMAT", spare=True),
        Column("PINNED", spare=True),
        Column("STATE", elastic=True),
        *(Column(clean(name), right=True, spare=True) for name in metrics),
    )
    rows = [_row(entry, listing, metrics, now) for entry in entries]
    return (
        Fields((("directory", clean(str(listing.place))),)),
        Table(columns, tuple(rows)),
    )


def _row(
    entry: ListedCheckpoint, listing: Listing, metrics: Sequence[str], now: float
) -> tuple[Cell, ...]:
    state = entry.state + (f": {clean(entry.reason)}" if entry.reason else "")
    runs = listing.resumed.get(entry.name)
    if runs:
        state += f", {clean(runs)} has resumed from it"
    values = entry.found.metrics if entry.found is not None else {}
    return (
        Cell(clean(entry.name)),
        Cell(NOTHING if entry.step is None else str(entry.step)),
        Cell(NOTHING if entry.size is None else memory(entry.size)),
        Cell(NOTHING if entry.written is None else duration(max(0.0, now - entry.written))),
        Cell(clean(entry.format)),
        Cell("yes" if entry.pinned else NOTHING),
        Cell(state, _COLOURS[entry.state]),
        *(Cell(_number(values.get(name))) for name in metrics),
    )


def _metrics(entries: Sequence[ListedCheckpoint]) -> list[str]:
    names: dict[str, None] = {}
    for entry in reversed(entries):
        if entry.found is not None:
            names.update(dict.fromkeys(entry.found.metrics))
    return list(names)[:METRICS_SHOWN]


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else NOTHING


def verdict_page(verdicts: Sequence[tuple[ListedCheckpoint, str]]) -> Page:
    """Return what ``verify`` has found: for each checkpoint that it is good, or why not."""
    columns = (Column("NAME"), Column("VERDICT", elastic=True))
    rows = []
    for entry, problem in verdicts:
        good = "good" if entry.found is not None else "complete (its format has no checksums)"
        cell = Cell(clean(problem), _COLOURS["bad"]) if problem else Cell(good, _COLOURS["good"])
        rows.append((Cell(clean(entry.name)), cell))
    return (Table(columns, tuple(rows)),)


def show_page(entry: ListedCheckpoint, files: Sequence[Mapping[str, Any]], now: float) -> Page:
    """Return the page of one checkpoint; ``files`` as the manifests list them."""
    parts: list[Part] = [Fields(tuple((name, clean(text)) for name, text in _facts(entry, now)))]
    if files:
        columns = (
            Column("FILE"),
            Column("RANK", right=True),
            Column("SIZE", right=True),
            Column("CHECKSUM", elastic=True, spare=True),
        )
        rows = [
            tuple(Cell(clean(str(text))) for text in _file(file)) for file in files[:FILES_SHOWN]
        ]
        parts.append(Table(columns, tuple(rows)))
        if len(files) > FILES_SHOWN:
            more = len(files) - FILES_SHOWN
            parts.append(Paragraph((f"{more} more files: --json has all",)))
    return tuple(parts)


def _file(file: Mapping[str, Any]) -> tuple[object, ...]:
    return file["path"], file["rank"], memory(file["size"]), file["checksum"]


def _facts(entry: ListedCheckpoint, now: float) -> Iterator[tuple[str, str]]:
    yield "name", entry.name
    yield "state", entry.state + (f": {entry.reason}" if entry.reason else "")
    yield "format", entry.format
    if entry.step is not None:
        yield "step", str(entry.step)
    if entry.found is not None:
        yield from _committed_facts(entry.found)
    if entry.size is not None:
        yield "size", f"{memory(entry.size)} ({entry.size:,} bytes)"
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
    for name, value in found.metrics.items():
        yield f"metric {name}", _number(value)
    for name, value in found.metadata.items():
        yield f"metadata {name}", json.dumps(value, default=str)


def _seconds(value: object) -> str:
    return duration(value) if isinstance(value, int | float) else str(value)
