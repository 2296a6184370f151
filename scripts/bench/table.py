"""The table of results: rich on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from figures import Figure, Results, Sample, Target, Unit, is_met, median, ratio, values
from launchers import ELAUNCH, TORCHRUN

COLUMNS = ("figure", TORCHRUN, ELAUNCH, "ratio", "target", "met")
VERDICTS = {True: "yes", False: "NO", None: "-"}


def show(figures: Sequence[Figure], results: Results) -> None:
    """Print the table on stdout."""
    show_rows(COLUMNS, [row(figure, results.get(figure.key, {})) for figure in figures])


def show_rows(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of cells below the names of their columns; the last one is the verdict."""
    if sys.stdout.isatty():
        _show_rich(columns, rows)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for cells in (columns, *rows):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join(padded).rstrip())


def row(figure: Figure, by_launcher: Mapping[str, Sequence[Sample]]) -> tuple[str, ...]:
    """Return the cells of one figure, in the order of ``COLUMNS``."""
    compared = ratio(by_launcher)
    return (
        figure.title,
        cell(by_launcher.get(TORCHRUN, ()), figure.unit),
        cell(by_launcher.get(ELAUNCH, ()), figure.unit),
        "-" if compared is None or figure.unit in ("trials", "steps") else f"{compared:.2g}",
        _target(figure.target, figure.unit),
        VERDICTS[is_met(figure.target, by_launcher)] if figure.target else "",
    )


def cell(samples: Sequence[Sample], unit: Unit) -> str:
    """Return ``median [min-max]`` of the samples, and how many of them failed."""
    if not samples:
        return "-"
    found = values(samples)
    failed = f" ({len(samples) - len(found)} failed)" if len(found) < len(samples) else ""
    if not found:
        return f"failed {len(samples)} times"
    if unit == "trials":
        return f"{sum(found):.0f} of {len(samples)}"
    middle = median(samples)
    if len(found) == 1 or middle is None:
        return number(found[0], unit) + failed
    ends = (number(end, unit).removesuffix(f" {unit}") for end in (min(found), max(found)))
    spread = f"[{'-'.join(ends)}]"
    return f"{number(middle, unit)} {spread}{failed}"


def number(value: float, unit: Unit) -> str:
    """Return a value with its unit and three figures or so."""
    if math.isinf(value):
        return "never"
    if unit in ("trials", "steps", "count"):
        return f"{value:,.0f}"
    digits = 1 if value >= 100 else 2 if value >= 1 else 3
    if unit == "share":
        return f"{value:.3f}"
    return f"{value:.{digits}f} {unit}"


def _target(target: Target | None, unit: Unit) -> str:
    if target is None:
        return ""
    if target.kind == "ratio":
        return f"≤ {target.limit:g} of {TORCHRUN}"
    if target.kind == "all":
        return f"{target.limit:g} of {target.limit:g}"
    sign = "≤" if target.kind == "at_most" else "≥"
    suffix = "" if unit == "share" else f" {unit}"
    return f"{sign} {target.limit:g}{suffix}"


def _show_rich(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    colours = {"yes": "green", "NO": "red"}
    for cells in rows:
        table.add_row(*cells, style=colours.get(cells[-1]))
    Console().print(table)
