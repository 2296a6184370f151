"""A screen of lines that is read again and again: a log, stacks, why, metrics, help."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Final, TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Input, RichLog, Static

from elaunch.errors import ElaunchError
from elaunch.text import moment, one_line

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


class Pager(Screen[None]):
    """Shows the lines that ``read`` returns; ``once``: they are not read again by themselves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("slash", "find", "Filter"),
        Binding("r", "again", "Read again", show=False),
        Binding("g", "edge(False)", "First", show=False),
        Binding("G", "edge(True)", "Last", show=False),
    ]

    def __init__(self, title: str, read: Read, once: bool) -> None:
        super().__init__()
        self._title = title
        self._read = read
        self._once = once
        self._needle = ""
        self._due = asyncio.Event()
        self._laid_out = asyncio.Event()
        # Not looked up: a reading may come when the screen is closed and has nothing left in it.
        self._header = Static(id="header", markup=False)
        self._lines = RichLog(max_lines=KEPT_LINES, auto_scroll=not once, min_width=1, wrap=True)
        self._field = Input(placeholder="only lines with this", id="filter")

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield self._header
        yield self._lines
        yield self._field
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self._field.display = False
        self._lines.focus()
        self._say("reading …")
        self.screen_layout_refresh_signal.subscribe(self, self._measured, immediate=True)
        self.run_worker(self._follow())

    def _measured(self, _: Screen[None]) -> None:
        if self._lines.size.width:
            self._laid_out.set()

    async def _follow(self) -> None:
        # Lines that are written before would be wrapped at no column: nothing of them is seen.
        await self._laid_out.wait()
        while True:
            self._due.clear()
            began = time.process_time()
            try:
                replaced, lines = await in_thread(lambda: self._read(self._needle))
            except (ElaunchError, OSError, LookupError) as error:
                replaced, lines = True, [Text(one_line(str(error)), style="red")]
            self._show(replaced, lines)
            spent = time.process_time() - began
            pause = None if self._once else max(LEAST_S, SHARE * spent)
            try:
                await asyncio.wait_for(self._due.wait(), pause)
            except asyncio.TimeoutError:
                continue

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
        kept = f", lines with {self._needle!r}" if self._needle else ""
        self._say(f"read at {moment(now, now)}{kept}")

    def _say(self, text: str) -> None:
        head = Text(no_wrap=True, overflow="ellipsis").append(f"{self._title}  ", "bold")
        self._header.update(head.append(one_line(text)))

    def action_find(self) -> None:
        """Ask for what lines shall have."""
        self._field.display = True
        self._field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show only lines with it."""
        self._needle = event.value
        self._hide()

    def _hide(self) -> None:
        self._field.display = False
        self._lines.focus()
        self._due.set()

    def action_again(self) -> None:
        """Read again now."""
        self._due.set()

    def action_edge(self, last: bool) -> None:
        """Go to the first line, or the last."""
        move = self._lines.scroll_end if last else self._lines.scroll_home
        move(animate=False)

    def action_back(self) -> None:
        """End the filter, or the screen."""
        if self._field.display or self._needle:
            self._field.value = self._needle = ""
            self._hide()
        else:
            self.app.pop_screen()


def fixed(lines: Callable[[], list[Text]]) -> Read:
    """Return what reads lines of which there are few: all of them, each time."""

    def read(needle: str) -> tuple[bool, list[Text]]:
        wanted = needle.lower()
        return True, [line for line in lines() if wanted in line.plain.lower()]

    return read
