"""A list of tree rows with a cursor; a row is drawn when it is seen, so thousands cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from elaunch.monitor.page import STYLES
from elaunch.top.tree import JOB, Key, TreeRow

MARKS = {2: ("✗ ", "bold red"), 1: ("! ", "yellow"), 0: ("  ", "")}
STATE_WIDTH = 11
NARROW = 46
"""Columns below which a row has its state or its note, not both."""


class RowList(ScrollView):
    """Shows rows; the chosen one stays chosen when they are sorted anew."""

    can_focus = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(0)", "First", show=False),
        Binding("end,G", "edge(-1)", "Last", show=False),
        Binding("enter", "enter", "Open", show=False),
        Binding("right", "fold(True)", "Open", show=False),
        Binding("left", "fold(False)", "Close", show=False),
    ]

    class Chosen(Message):
        """Another row is chosen."""

    class Entered(Message):
        """Enter, or a second click, on the chosen row; ``open``: it shall be open, None: either."""

        def __init__(self, row: TreeRow, is_open: bool | None = None) -> None:
            super().__init__()
            self.row = row
            self.open = is_open

    def __init__(self) -> None:
        super().__init__(id="tree")
        self._rows: Sequence[TreeRow] = ()
        self._at = 0
        self.key: Key = JOB

    def show(self, rows: Sequence[TreeRow]) -> None:
        """Replace the rows."""
        before = self._rows
        if list(before) == list(rows):
            return
        self._rows = rows
        where = {row.key: at for at, row in enumerate(rows)}
        parent = where.get(self.key[:1], 0)
        self._at = where.get(self.key, parent if len(self.key) > 1 else 0)
        self.virtual_size = Size(self.scrollable_content_region.width, len(rows))
        if rows and rows[self._at].key != self.key:
            self._choose(self._at)
        self.refresh()

    @property
    def row(self) -> TreeRow | None:
        """The chosen row."""
        return self._rows[self._at] if self._rows else None

    def render_line(self, y: int) -> Strip:
        """Draw one line of the screen."""
        # Without the scroll bar, which would hide the last digits.
        at, width = y + self.scroll_offset.y, self.scrollable_content_region.width
        base = self.rich_style
        if at >= len(self._rows):
            return Strip.blank(width, base)
        row, chosen = self._rows[at], at == self._at
        if chosen:
            base += Style(reverse=self.has_focus, bold=True, underline=not self.has_focus)
        mark, color = MARKS[row.level]
        # The chosen row has no colours of its own: on a bright ground some cannot be read.
        mark_style = Style() if chosen else Style.parse(color)
        state_style = Style() if chosen else Style.parse(STYLES.get(row.state, ""))
        fold = "" if row.open is None else "▾ " if row.open else "▸ "
        indent = "  " * max(0, len(row.key) - 1) + ("" if row.open is not None else "  ")
        left = Strip([Segment(indent + fold), Segment(mark, mark_style), Segment(row.name)])
        state = Segment(f" {row.state:<{STATE_WIDTH}}", state_style)
        note = Segment(f"{row.note:>11} ")
        both = [state, note]
        if width < NARROW:
            usual = row.note and not row.level and row.state in ("RUNNING", "")
            both = [note if usual else state]
        right = Strip(both)
        room = max(0, width - right.cell_length)
        line = Strip.join([left.adjust_cell_length(room), right]).crop(0, width)
        return line.adjust_cell_length(width).apply_style(base)

    def _choose(self, at: int) -> None:
        if not self._rows:
            return
        self._at = max(0, min(at, len(self._rows) - 1))
        self.key = self._rows[self._at].key
        self.scroll_to_region(Region(0, self._at, 1, 1), animate=False)
        self.refresh()
        self.post_message(self.Chosen())

    def action_move(self, by: int) -> None:
        """Go up or down by rows."""
        self._choose(self._at + by)

    def action_page(self, by: int) -> None:
        """Go up or down by screens."""
        self._choose(self._at + by * max(1, self.size.height - 1))

    def action_edge(self, at: int) -> None:
        """Go to the first row, or the last."""
        self._choose(at if at == 0 else len(self._rows) - 1)

    def action_enter(self) -> None:
        """Enter the chosen row."""
        if self.row is not None:
            self.post_message(self.Entered(self.row))

    def action_fold(self, is_open: bool) -> None:
        """Open or close the chosen row; of a rank, go to its node."""
        if self.row is None:
            return
        if self.row.open is not None and self.row.open != is_open:
            self.post_message(self.Entered(self.row, is_open))
        elif not is_open and self.key:
            parent = self.key[:-1]
            self._choose(next(at for at, row in enumerate(self._rows) if row.key == parent))

    def on_click(self, event: events.Click) -> None:
        """Choose a row; enter it with the second click."""
        at = event.y + self.scroll_offset.y
        if at < len(self._rows):
            again = at == self._at
            self._choose(at)
            if again:
                self.action_enter()
