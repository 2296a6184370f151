"""What is measured of several nodes: columns, figures with a limit for each, cases, the table.

Samples and their medians are those of elaunch on one node (figures.py). A figure's limit is the
most that elaunch's median may be, for each of its two backends; torchrun's columns have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import table
from figures import Results, Sample, Unit, median, values

TORCHRUN = "torchrun"
TORCHRUN_FRESH = "torchrun, fresh store"
C10D = "elaunch c10d"
ETCD = "elaunch etcd"
COLUMNS = (TORCHRUN, TORCHRUN_FRESH, C10D, ETCD)
OURS = (C10D, ETCD)


@dataclass(frozen=True)
class Figure:
    """One line of the table; ``limits``: column → the most its median may be."""

    key: str
    title: str
    unit: Unit
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """How much to measure; seconds where not said otherwise.

    ``never``: given up as "never". ``sizes``: agents that form a round → samples of each column.
    """

    repeats: int = 5
    slow_repeats: int = 2
    never_recovers: float = 30.0
    never_joins: float = 60.0
    never_survives: float = 90.0
    sizes: Mapping[int, int] = field(default_factory=lambda: {32: 5, 256: 5, 1024: 3, 4096: 1})
    traffic_agents: int = 1024
    traffic_window: float = 10.0
    paper_agents: int = 4096


@dataclass(frozen=True)
class Trial:
    """What a case needs to take one sample; ``results`` has all that were taken before."""

    column: str
    number: int
    options: Options
    root: Path
    results: Results


@dataclass(frozen=True)
class Case:
    """One thing to do and how often in each column; ``measure`` returns key → sample."""

    family: str
    title: str
    figures: tuple[Figure, ...]
    measure: Callable[[Trial], Mapping[str, Sample]]
    repeats: Mapping[str, int]


def is_met(figure: Figure, column: str, samples: Sequence[Sample]) -> bool | None:
    """Return whether a column is within its limit; None: it has none, or nothing was measured."""
    if column not in figure.limits or not samples:
        return None
    middle = median(samples)
    complete = len(values(samples)) == len(samples)
    return middle is not None and complete and middle <= figure.limits[column]


def show(figures: Sequence[Figure], results: Results, columns: Sequence[str]) -> None:
    """Print the table on stdout; ``met`` has one word for each backend of elaunch."""
    rows = [_row(figure, results.get(figure.key, {}), columns) for figure in figures]
    table.show_rows(("figure", *columns, "to reach", "met"), rows)


def _row(
    figure: Figure, by_column: Mapping[str, Sequence[Sample]], columns: Sequence[str]
) -> tuple[str, ...]:
    cells = [table.cell(by_column.get(column, ()), figure.unit) for column in columns]
    judged = [is_met(figure, column, by_column.get(column, ())) for column in columns]
    words = [table.VERDICTS[one] for one in judged if one is not None]
    met = words[0] if len(set(words)) == 1 else " / ".join(words)
    return (figure.title, *cells, _to_reach(figure), met)


def _to_reach(figure: Figure) -> str:
    limits = [f"{figure.limits[column]:g}" for column in OURS if column in figure.limits]
    if not limits:
        return ""
    shown = limits[0] if len(set(limits)) == 1 else " / ".join(limits)
    return f"≤ {shown}" if figure.unit in ("steps", "count") else f"≤ {shown} {figure.unit}"
