"""``elaunch metrics``: what the script of a run has reported (docs/metrics.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import click

from elaunch.config.values import did_you_mean
from elaunch.errors import UsageError
from elaunch.views.layout import on_terminal, show

if TYPE_CHECKING:
    from elaunch.training.metrics.reading import MetricRows, StoredRow
    from elaunch.views.layout import Page

TERMINAL_ROWS: Final = 100


@click.command(
    "metrics", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")}
)
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--group", metavar="NAME", help="Only this group: training, validation, …")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Only what this rank reported."
)
@click.option(
    "--all", "everything", is_flag=True, help="Show superseded rows, too, marked as such."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
def metrics(
    run: str | None,
    group: str | None,
    rank: int | None,
    everything: bool,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show the metrics of RUN by step and rank.

    A run that was started several times under one id is shown as one: rows that a later start or
    round did again are left out. RUN is a run id of this machine, the beginning of one, or a run
    directory; without it, the newest run.
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv are two formats: leave one of them out")
    from elaunch.runs.directory import run_id_of
    from elaunch.training.metrics.reading import csv_text, directories, read

    runs = directories(run, os.environ)
    reading = read(runs)
    name = run_id_of(runs[0]) if run is None else run
    rows = _chosen(name, reading, group, rank, everything)
    if as_json:
        _print_lines(rows, everything)
    elif as_csv:
        for text in csv_text(rows, everything):
            click.echo(text, nl=False)
    else:
        show(_page(rows, everything))
    if reading.torn:
        lines = "1 line is" if reading.torn == 1 else f"{reading.torn} lines are"
        click.echo(f"elaunch: {lines} no row and left out", err=True)


def _chosen(
    run: str, reading: MetricRows, group: str | None, rank: int | None, everything: bool
) -> list[StoredRow]:
    """Return the rows that are asked for; UsageError names what there is if none fits."""
    rows = [row for row in reading.rows if everything or not row.superseded]
    if not rows:
        where = ", ".join(str(path) for path in reading.directories)
        hint = "; a script reports by ctx.train.report_metrics (docs/metrics.md)"
        hint = "; --all shows superseded ones" if reading.rows else hint
        raise UsageError(f"nothing was reported in the run {run!r} ({where}){hint}")
    groups = sorted({row.place.group for row in rows})
    if group is not None and group not in groups:
        hint = did_you_mean(group, groups)
        raise UsageError(f"no group {group!r} in {run!r}{hint}; there is {', '.join(groups)}")
    rows = [row for row in rows if group is None or row.place.group == group]
    ranks = sorted({row.place.rank for row in rows})
    if rank is not None and rank not in ranks:
        of = "" if group is None else f" of group {group!r}"
        raise UsageError(f"rank {rank} has no rows{of} in {run!r}; those that have: {_few(ranks)}")
    return [row for row in rows if rank is None or row.place.rank == rank]


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} … {ranks[-1]}"


def _print_lines(rows: Iterable[StoredRow], everything: bool) -> None:
    for row in rows:
        line = row.line.decode()
        if everything or "NaN" in line or "Infinity" in line:  # JSON has no word for those
            values = json.loads(line, parse_constant=lambda _: None)
            if everything:
                values["superseded"] = row.superseded
            line = json.dumps(values) + "\n"
        click.echo(line, nl=False)


def _page(rows: Sequence[StoredRow], everything: bool) -> Page:
    from elaunch.text import one_line
    from elaunch.training.metrics.reading import marked, names
    from elaunch.views.layout import Cell, Column, Paragraph, Table

    shown = rows[-TERMINAL_ROWS:] if on_terminal() else rows
    columns_shown = names(shown, everything)
    cells = [
        [_text(name, values.get(name)) for name in columns_shown]
        for values in marked(shown, everything)
    ]
    numbers = {name for name in columns_shown if name not in ("group", "time", "superseded")}
    columns = tuple(
        Column(one_line(name), right=name in numbers, spare=name in ("time", "round"))
        for name in columns_shown
    )
    table = Table(columns, tuple(tuple(Cell(one_line(text)) for text in row) for row in cells))
    left_out = len(rows) - len(shown)
    if not left_out:
        return (table,)
    return (table, Paragraph((f"{left_out} rows before these: --csv, --json or a pipe has all",)))


def _text(name: str, value: object) -> str:
    from elaunch.text import date

    if value is None:
        return "-"
    if name == "time" and isinstance(value, int | float):
        return date(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool | list | dict):
        return json.dumps(value)
    return str(value)
