"""Rows as a table: its columns, and as comma-separated values."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from elaunch.training.metrics.reading import StoredRow

LEADING: Final = ("steps_completed", "rank", "group", "round", "time")
LINES: Final = 1000


def names(rows: Iterable[StoredRow], everything: bool) -> list[str]:
    """Return the columns: what each row has, then the metrics in the order in which they came."""
    found = dict.fromkeys(LEADING)
    for row in rows:
        found.update(dict.fromkeys(row.values))
    return [*found, *(["superseded"] if everything and "superseded" not in found else [])]


def marked(rows: Iterable[StoredRow], everything: bool) -> Iterator[Mapping[str, Any]]:
    """Yield the values of each row; with ``everything`` also whether it is superseded."""
    for row in rows:
        yield {**row.values, "superseded": row.superseded} if everything else row.values


def csv_text(rows: Sequence[StoredRow], everything: bool) -> Iterator[str]:
    """Yield the table in pieces of LINES lines."""
    text = io.StringIO()
    columns = names(rows, everything)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for number, values in enumerate(marked(rows, everything)):
        writer.writerow([_csv_value(values.get(name)) for name in columns])
        if number % LINES == LINES - 1:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()


def _csv_value(value: object) -> object:
    return json.dumps(value) if isinstance(value, bool | list | dict) else value
