"""The widgets of ``elaunch top``: tree rows with a cursor, and screens that are read anew.

A row is drawn when it is seen, so thousands cost nothing. The lines are read again and again: a
log, stacks, why, metrics, help.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Footer, Input, RichLog, Static

from elaunch.errors import ElaunchError
from elaunch.text import moment, one_line
from elaunch.top.tree import JOB, Key, TreeRow
from elaunch.views.layout import STYLES

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
        Binding("pageup", "move(-1, True)", "Page up", show=False),
        Binding("pagedown", "move(1, True)", "Page down", show=False),
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

    def action_move(self, by: int, screens: bool = False) -> None:
        """Go up or down by rows, or by screens."""
        self._choose(self._at + by * (max(1, self.size.height - 1) if screens else 1))

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


T = TypeVar("T")
KEPT_LINES: Final = 5000
LEAST_S: Final = 1.0
SHARE: Final = 20
"""The seconds between two readings are at least so many times its seconds of the processor."""

Read = Callable[[str], tuple[bool, list[Text]]]
"""Takes a needle; returns whether the lines replace those before, and the lines."""


async def in_thread(work: Callable[[], T]) -> T:
    """Return what ``work`` returns in a thread that holds up no end of the program."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    threading.Thread(target=_run, args=(work, done), name="top read", daemon=True).start()
    return await asyncio.wrap_future(done)


def _run(work: Callable[[], T], done: concurrent.futures.Future[T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)


class LiveScreen(Screen[None]):
    """A header, a body that is read again and again, and a field for what is looked for.

    Attributes:
        header, field: not looked up: a reading may come when the screen is closed and has nothing
            left in it.
        needle: what is looked for.
        due: set where a reading shall not wait for its time.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "Filter"),
        Binding("r", "again", "Read again", show=False),
    ]

    def __init__(self, title: str, first: Widget, hint: str) -> None:
        super().__init__()
        self._heading, self._first = title, first
        self.header = Static(id="header", markup=False)
        self.field = Input(placeholder=hint, id="filter")
        self.needle = ""
        self.due = asyncio.Event()

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield self.header
        yield from self.body()
        yield self.field
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self.field.display = False
        self._first.focus()
        self.say("reading …")
        self.run_worker(self._follow())

    def body(self) -> ComposeResult:
        """Make what is below the header."""
        yield self._first

    async def step(self) -> float | None:
        """Read and show; return when the next time is, None: when it is asked for."""
        raise NotImplementedError

    async def _follow(self) -> None:
        while True:
            self.due.clear()
            at = await self.step()
            with contextlib.suppress(asyncio.TimeoutError):
                pause = None if at is None else max(0.0, at - time.monotonic())
                await asyncio.wait_for(self.due.wait(), pause)

    def say(self, text: str) -> None:
        """Show a remark in the header."""
        head = Text(no_wrap=True, overflow="ellipsis").append(f"{self._heading}  ", "bold")
        self.header.update(head.append(one_line(text)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Look for it."""
        self.find(event.value)
        self._first.focus()

    def find(self, needle: str) -> None:
        """Show only what has it."""
        raise NotImplementedError

    def end_filter(self) -> None:
        """Show everything again."""
        self.field.value = self.needle = ""
        self.field.display = False
        self._first.focus()

    def action_find(self) -> None:
        """Ask for what is looked for."""
        self.field.display = True
        self.field.focus()

    def action_again(self) -> None:
        """Read again now."""
        self.due.set()


class Pager(LiveScreen):
    """Shows the lines that ``read`` returns; ``once``: they are not read again by themselves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("g", "edge(False)", "First", show=False),
        Binding("G", "edge(True)", "Last", show=False),
    ]

    def __init__(self, title: str, read: Read, once: bool) -> None:
        self._lines = RichLog(max_lines=KEPT_LINES, auto_scroll=not once, min_width=1, wrap=True)
        super().__init__(title, self._lines, "only lines with this")
        self._read, self._once = read, once
        self._laid_out = asyncio.Event()

    def on_mount(self) -> None:
        """Learn when there is a width to wrap lines at; the base begins to read."""
        self.screen_layout_refresh_signal.subscribe(self, self._measured, immediate=True)

    def _measured(self, _: Screen[None]) -> None:
        if self._lines.size.width:
            self._laid_out.set()

    async def step(self) -> float | None:
        """Read lines and show them."""
        # Lines that are written before would be wrapped at no column: nothing of them is seen.
        await self._laid_out.wait()
        began = time.process_time()
        try:
            replaced, lines = await in_thread(lambda: self._read(self.needle))
        except (ElaunchError, OSError, LookupError) as error:
            replaced, lines = True, [Text(one_line(str(error)), style="red")]
        self._show(replaced, lines)
        pause = max(LEAST_S, SHARE * (time.process_time() - began))
        return None if self._once else time.monotonic() + pause

    def _show(self, replaced: bool, lines: list[Text]) -> None:
        log = self._lines
        if replaced:
            at = log.scroll_offset
            log.clear()
        # Without a width it wraps at 80 columns, whatever the terminal has.
        width = log.scrollable_content_region.width
        for line in lines:
            at_end = log.auto_scroll and log.is_vertical_scroll_end
            log.write(line, width=width, scroll_end=None if at_end else False)
        if replaced and not log.auto_scroll:
            log.scroll_to(at.x, at.y, animate=False)
        now = time.time()
        kept = f", lines with {self.needle!r}" if self.needle else ""
        self.say(f"read at {moment(now, now)}{kept}")

    def find(self, needle: str) -> None:
        """Show only lines with it."""
        self.needle, self.field.display = needle, False
        self.due.set()

    def action_edge(self, last: bool) -> None:
        """Go to the first line, or the last."""
        move = self._lines.scroll_end if last else self._lines.scroll_home
        move(animate=False)

    def action_back(self) -> None:
        """End the filter, or the screen."""
        if self.field.display or self.needle:
            self.end_filter()
            self.due.set()
        else:
            self.app.pop_screen()


def fixed(lines: Callable[[], list[Text]]) -> Read:
    """Return what reads lines of which there are few: all of them, each time."""

    def read(needle: str) -> tuple[bool, list[Text]]:
        wanted = needle.lower()
        return True, [line for line in lines() if wanted in line.plain.lower()]

    return read
