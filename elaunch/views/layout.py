"""Pages: parts in the order in which they are read, as plain data, and how they are printed.

A page is printed coloured and folded on a terminal, plain in files and pipes. Plain text is never
wrapped or cut, whatever its width, so that ``grep`` and ``awk`` find whole lines. A terminal gets
colours for states, and what is too long for it is folded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from elaunch.text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")
NOTHING: Final = "-"
"""A cell without a value."""
INDENT: Final = "  "
NARROW: Final = 100
FOLDED: Final = 9
"""Characters that are left in a line of a column that is folded."""
# A terminal draws some hundred rows at once; nobody reads more there.
MANY_ROWS: Final = 200
FEW_ROWS: Final = 20

STYLES: Final = {
    "RUNNING": "green",
    "STARTING": "yellow",
    "RESTARTING": "yellow",
    "STOPPING": "yellow",
    "STOPPED": "yellow",
    "PREEMPTED": "yellow",
    "KILLED": "yellow",
    "COMPLETED": "cyan",
    "SUCCEEDED": "cyan",
    "FAILED": "bold red",
    "LOST": "bold red",
    "GONE": "red",
    "UNREADABLE": "red",
    "FORMING": "yellow",
    "ENDING": "yellow",
    "alive": "green",
    "finished": "cyan",
    "failed": "bold red",
    "gone": "bold red",
    "refused": "red",
    "ended": "yellow",
    "leaving": "yellow",
    "joining": "yellow",
}


@dataclass(frozen=True)
class Cell:
    """A piece of text on one line; ``state`` is the state that gives it its colour."""

    text: str
    state: str = ""


@dataclass(frozen=True)
class Title:
    """The first line: what it is about, its state, a note."""

    name: str
    state: Cell
    note: str


@dataclass(frozen=True)
class Paragraph:
    """Lines below the title."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Fields:
    """Names with their values."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """A column of a table: on a narrow terminal ``spare`` ones go, ``elastic`` ones are folded."""

    name: str
    right: bool = False
    elastic: bool = False
    spare: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below their columns; of very many, a terminal leaves out those in state ``usual``."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    usual: str = ""

    def trimmed(self, least: int = 0) -> Table:
        """Return it without columns that have no value in any row, but for the ``least`` first."""
        kept = [
            i
            for i in range(len(self.columns))
            if i < least or any(row[i].text != NOTHING for row in self.rows)
        ]
        columns = tuple(self.columns[i] for i in kept)
        return replace(
            self, columns=columns, rows=tuple(tuple(row[i] for i in kept) for row in self.rows)
        )


Part = Title | Paragraph | Fields | Table
Page = tuple[Part, ...]
_MARKS: Final = {">": "right", "~": "elastic", "?": "spare"}


def fields(facts: Iterable[tuple[str, str]]) -> Fields:
    """Return names with their values, each on one line."""
    return Fields(tuple((name, one_line(value)) for name, value in facts))


def table(
    columns: str, rows: Iterable[Iterable[object]], usual: str = "", more: Sequence[Column] = ()
) -> Table:
    """Return a table; a value is a :class:`Cell`, text, a number, or None or "" for NOTHING.

    ``columns`` are names with commas between. Behind a name, ``>`` writes its values at the right,
    ``~`` folds them on a narrow terminal, and ``?`` leaves the column out there.
    """
    named = [_column(name.strip()) for name in columns.split(",")]
    return Table((*named, *more), tuple(tuple(map(_cell, row)) for row in rows), usual)


def _column(text: str) -> Column:
    name = text.rstrip("".join(_MARKS))
    return Column(name, **{_MARKS[mark]: True for mark in text[len(name) :]})


def _cell(value: object) -> Cell:
    return value if isinstance(value, Cell) else Cell(one_line(str(given(value, str))) or NOTHING)


def given(value: T | None, write: Callable[[T], str]) -> str:
    """Return a value as it is written; "" for None."""
    return "" if value is None else write(value)


def on_terminal() -> bool:
    """Return whether stdout is a terminal on which rich can draw."""
    encoding = (sys.stdout.encoding or "").lower()
    return (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        and encoding.startswith("utf")
    )


def show(page: Page) -> None:
    """Print a page once."""
    if not on_terminal():
        echo_plain(page)
        return
    from rich.console import Console

    console = Console()
    console.print(styled(page, console.width))


def echo_plain(page: Page) -> None:
    """Print a page as plain text; what stdout's encoding has no character for is written out."""
    encoding = sys.stdout.encoding or "utf-8"
    text = plain(page).encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(text)
    sys.stdout.flush()


def plain(page: Page) -> str:
    """Return the page as text without any escape sequence, ending with a newline."""
    blocks: list[str] = []
    for part in page:
        text = "\n".join(line.rstrip() for line in _plain_lines(part))
        # The cause belongs to the title; all other parts stand apart.
        if isinstance(part, Paragraph) and blocks:
            blocks[-1] += "\n" + text
        else:
            blocks.append(text)
    return "\n\n".join(blocks) + "\n"


def styled(page: Page, width: int) -> RenderableType:
    """Return the page for a rich console of ``width`` columns."""
    from rich.console import Group

    parts: list[RenderableType] = []
    for part in page:
        if parts and not isinstance(part, Paragraph):
            parts.append("")
        parts.append(_styled_part(part, width))
    return Group(*parts)


def _plain_lines(part: Part) -> Iterator[str]:
    if isinstance(part, Title):
        yield INDENT.join(filter(None, [part.name, part.state.text, part.note]))
    elif isinstance(part, Paragraph):
        yield from (INDENT + line for line in part.lines)
    elif isinstance(part, Fields):
        width = max(len(name) for name, _ in part.pairs)
        yield from (f"{INDENT}{name:<{width}}{INDENT}{value}" for name, value in part.pairs)
    else:
        yield from _plain_table(part)


def _plain_table(table: Table) -> Iterator[str]:
    rows = [tuple(column.name for column in table.columns)]
    rows += [tuple(cell.text for cell in row) for row in table.rows]
    widths = _widths(table)
    for row in rows:
        yield INDENT.join(
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(row, widths, table.columns, strict=True)
        )


def _widths(table: Table) -> list[int]:
    return [
        max(len(column.name), *(len(row[i].text) for row in table.rows))
        for i, column in enumerate(table.columns)
    ]


def _styled_part(part: Part, width: int) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    if isinstance(part, Title):
        line = Text(part.name, style="bold")
        line.append(f"{INDENT}{part.state.text}", style=STYLES.get(part.state.state, ""))
        line.append(f"{INDENT}{part.note}", style="not bold")
        return line
    if isinstance(part, Paragraph):
        return Padding(Text("\n".join(part.lines)), (0, 0, 0, len(INDENT)))
    if isinstance(part, Fields):
        return _styled_facts(part)
    rows = _worth_showing(part)
    table = _styled_table(replace(part, rows=rows), width)
    if left_out := len(part.rows) - len(rows):
        return Group(table, Text(f"{INDENT}and {left_out} more, all of them in output to a pipe"))
    return table


def _worth_showing(table: Table) -> tuple[tuple[Cell, ...], ...]:
    """Return all rows, or of very many those in an unusual state, and the first ones."""
    if len(table.rows) <= MANY_ROWS:
        return table.rows
    unusual = [any(cell.state not in ("", table.usual) for cell in row) for row in table.rows]
    shown = [row for i, row in enumerate(table.rows) if i < FEW_ROWS or unusual[i]]
    return tuple(shown[:MANY_ROWS])


def _styled_facts(facts: Fields) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts.pairs:
        grid.add_row(name, Text(value))
    return Padding(grid, (0, 0, 0, len(INDENT)))


def _styled_table(table: Table, width: int) -> RenderableType:
    from rich.table import Table as Grid
    from rich.text import Text

    gap = 1 if width < NARROW else 2
    grid = Grid(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    shown = _columns_shown(table, gap, width)
    for column in (table.columns[i] for i in shown):
        grid.add_column(Text(column.name), **_column_options(column))
    for row in table.rows:
        cells = (row[i] for i in shown)
        grid.add_row(*(Text(cell.text, style=STYLES.get(cell.state, "")) for cell in cells))
    return grid


def _columns_shown(table: Table, gap: int, width: int) -> list[int]:
    """Return the columns that a terminal has room for: a number that is cut would be another one.

    Without the spare ones, if all do not fit; then without those at the right that are not folded.
    """
    widths, columns = _widths(table), table.columns
    shown = list(range(len(columns)))
    if sum(widths) + gap * (len(shown) - 1) > width:
        shown = [i for i in shown if not columns[i].spare]
    least = [min(wide, FOLDED) if columns[i].elastic else wide for i, wide in enumerate(widths)]
    while sum(least[i] + gap for i in shown) - gap > width:
        fixed = [i for i in shown[1:] if not columns[i].elastic]
        if not fixed:
            break
        shown.remove(fixed[-1])
    return shown


def _column_options(column: Column) -> dict[str, Any]:
    return {
        "justify": "right" if column.right else "left",
        "no_wrap": not column.elastic,
        "overflow": "fold",
    }
