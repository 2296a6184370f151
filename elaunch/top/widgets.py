"""The widgets of ``elaunch top``: the tree's rows with a cursor, and lines that are read anew.

A row is drawn when it is seen, so thousands cost nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Final, TypeVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import RichLog

from elaunch import atonce
from elaunch.errors import ElaunchError
from elaunch.text import moment, one_line
from elaunch.top.pages import JOB, Key, Lines, TreeRow
from elaunch.views.layout import STYLES

MARKS = {2: ("✗ ", "bold red"), 1: ("! ", "yellow"), 0: ("  ", "")}
STATE_WIDTH = 11
NARROW = 46
"""Columns below which a row has its state or its note, not both."""


class RowList(ScrollView):
    """Shows rows; the chosen one stays chosen when they are sorted anew.

    ``chosen`` is called when another row is, ``entered`` with the chosen one that is to be entered:
    to be open, closed, or, with None, either.
    """

    can_focus = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move(-1, True)", show=False),
        Binding("pagedown", "move(1, True)", show=False),
        Binding("home,g", "move(-1_000_000_000)", show=False),
        Binding("end,G", "move(1_000_000_000)", show=False),
        Binding("enter", "enter", show=False),
        Binding("right", "fold(True)", show=False),
        Binding("left", "fold(False)", show=False),
    ]

    def __init__(
        self, chosen: Callable[[], None], entered: Callable[[TreeRow, bool | None], None]
    ) -> None:
        super().__init__(id="tree")
        self._chosen, self._entered = chosen, entered
        self._rows: Sequence[TreeRow] = ()
        self._at = 0
        self.key: Key = JOB

    def show(self, rows: Sequence[TreeRow]) -> None:
        """Replace the rows."""
        if self._rows == rows:
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
        row, (mark, color) = self._rows[at], MARKS[self._rows[at].level]
        fold = "" if row.open is None else "▾ " if row.open else "▸ "
        indent = "  " * max(0, len(row.key) - 1) + "  " * (row.open is None)
        left = Text(indent + fold).append(mark, color).append(row.name)
        state = Text(f" {row.state:<{STATE_WIDTH}}", STYLES.get(row.state, ""))
        note = Text(f"{row.note:>11} ")
        right = state + note
        if width < NARROW:
            usual = row.note and not row.level and row.state in ("RUNNING", "")
            right = note if usual else state
        left.truncate(max(0, width - right.cell_len), pad=True)
        line = left + right
        if at == self._at:
            base += Style(reverse=self.has_focus, bold=True, underline=not self.has_focus)
            # It has no colours of its own: on a bright ground some cannot be read.
            line = Text(line.plain)
        shown = Strip(line.render(self.app.console)).crop(0, width)
        return shown.adjust_cell_length(width).apply_style(base)

    def _choose(self, at: int) -> None:
        if self._rows:
            self._at = max(0, min(at, len(self._rows) - 1))
            self.key = self._rows[self._at].key
            self.scroll_to_region(Region(0, self._at, 1, 1), animate=False)
            self.refresh()
            self._chosen()

    def action_move(self, by: int, screens: bool = False) -> None:
        """Go up or down by rows, or by screens."""
        self._choose(self._at + by * (max(1, self.size.height - 1) if screens else 1))

    def action_enter(self) -> None:
        """Enter the chosen row."""
        if self.row is not None:
            self._entered(self.row, None)

    def action_fold(self, is_open: bool) -> None:
        """Open or close the chosen row; of a rank, go to its node."""
        if self.row is None:
            return
        if self.row.open is not None and self.row.open != is_open:
            self._entered(self.row, is_open)
        elif not is_open and self.key:
            parent = self.key[:-1]
            self._choose(next(at for at, row in enumerate(self._rows) if row.key == parent))

    def on_click(self, event: events.Click) -> None:
        """Choose a row; enter it with the second click."""
        at, before = event.y + self.scroll_offset.y, self._at
        if at < len(self._rows):
            self._choose(at)
            if at == before:
                self.action_enter()


T = TypeVar("T")
KEPT_LINES: Final = 5000
LEAST_S: Final = 1.0
SHARE: Final = 20
"""The seconds between two readings are at least so many times its seconds of the processor."""


async def in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` returns in a thread that holds up no end of the program."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()
    atonce.start("top read", _run, work, done)
    return await asyncio.wrap_future(done)


def _run(work: Callable[[], T], done: concurrent.futures.Future[T]) -> None:
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)


async def repeat(step: Callable[[], Awaitable[float | None]], due: asyncio.Event) -> None:
    """Call ``step`` at the time that it has returned, or, with None, when ``due`` is set."""
    while True:
        due.clear()
        at = await step()
        with contextlib.suppress(asyncio.TimeoutError):
            pause = None if at is None else max(0.0, at - time.monotonic())
            await asyncio.wait_for(due.wait(), pause)


class Pager(RichLog):
    """Shows lines with the ``needle``, and says when they were read.

    ``once``: they are not read again by themselves. ``due``: set where that shall not wait.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "scroll_home", "First", show=False),
        Binding("G", "scroll_end", "Last", show=False),
    ]

    def __init__(self, lines: Lines, once: bool, say: Callable[[str], None]) -> None:
        super().__init__(max_lines=KEPT_LINES, auto_scroll=not once, min_width=1, wrap=True)
        self.needle = ""
        self.due = asyncio.Event()
        self._read, self._once, self._say = lines, once, say

    def on_mount(self) -> None:
        """Begin to read."""
        self.focus()
        self._say("reading …")
        self.run_worker(repeat(self._step, self.due))

    def on_resize(self, _: events.Resize) -> None:
        """Read now that there is a width to wrap lines at."""
        if not self.lines:
            self.due.set()

    def find(self, needle: str) -> None:
        """Show only lines with it."""
        self.needle = needle
        self.focus()
        self.due.set()

    async def _step(self) -> float | None:
        # Lines that are written before would be wrapped at no column: nothing of them is seen.
        if not self.size.width:
            return None
        began = time.process_time()
        try:
            replaced, lines = await in_thread(lambda: self._read(self.needle))
        except (ElaunchError, OSError, LookupError) as error:
            replaced, lines = True, [Text(one_line(str(error)), style="red")]
        at = self.scroll_offset
        if replaced:
            self.clear()
        # Without a width it wraps at 80 columns, whatever the terminal has.
        width = self.scrollable_content_region.width
        for line in lines:
            at_end = self.auto_scroll and self.is_vertical_scroll_end
            self.write(line, width=width, scroll_end=None if at_end else False)
        if replaced and not self.auto_scroll:
            self.scroll_to(at.x, at.y, animate=False)
        kept = f", lines with {self.needle!r}" if self.needle else ""
        self._say(f"read at {moment(now := time.time(), now)}{kept}")
        pause = max(LEAST_S, SHARE * (time.process_time() - began))
        return None if self._once else time.monotonic() + pause
