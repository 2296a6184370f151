"""The screen of ``elaunch top``: a tree of job, nodes and ranks, and the chosen one beside it.

A reading is made in a thread, every EVERY_S seconds, or so seldom that it takes a twentieth of a
core. The keys are those of k9s; ``?`` shows them (``help.txt``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.widgets import Input, Static

from elaunch.text import one_line
from elaunch.top import pages
from elaunch.top.pages import TopReader, TopReading
from elaunch.top.tree import JOB, Key, rows
from elaunch.top.widgets import SHARE, LiveScreen, Pager, Read, RowList, fixed, in_thread

EVERY_S: Final = 2.0
"""Seconds from reading to reading: to draw the screen takes 20 to 40 ms of the processor."""
TEXT_WIDTH: Final = 66
"""Columns of a metric's line without its curve."""
FEW_RANKS: Final = 64
"""Ranks of a job, or of this node, that are shown from the beginning; more are counted."""


class JobScreen(LiveScreen):
    """The tree, and the chosen thing on the right; ``reading`` is the newest one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "back", "Back", show=False)]

    def __init__(self, reader: TopReader) -> None:
        self.row_list = RowList()
        self._chosen = Static(id="chosen", markup=False)
        self._detail = VerticalScroll(self._chosen, id="detail")
        super().__init__("elaunch top", self.row_list, "rank 3, FAILED, a host")
        self._reader = reader
        self.reading: TopReading | None = None
        self._opened: set[Key] = {JOB}
        self._seen: set[Key] = set()
        self._full_at = 0.0

    def body(self) -> ComposeResult:
        """Make what is below the header."""
        with Horizontal():
            yield self.row_list
            yield self._detail

    async def step(self) -> float:
        """Read all, or, of what was chosen meanwhile, the newest lines; return when all is due."""
        began, key, known = time.process_time(), self.row_list.key, self.reading
        if known is not None and time.monotonic() < self._full_at:
            recent = await in_thread(partial(self._reader.recent, key, known.job))
            self.reading = replace(known, recent=recent)
            self._show_chosen()
            return self._full_at
        read = partial(self._reader.read, key, frozenset(self._opened))
        self.reading = known = await in_thread(read)
        unread = self._open_first(known)
        self.show()
        spent = time.process_time() - began
        self._full_at = time.monotonic() + (0.0 if unread else max(EVERY_S, SHARE * spent))
        return self._full_at

    def _open_first(self, reading: TopReading) -> bool:
        """Open nodes that have not been seen: of a job with few ranks, this one, and bad ones.

        Return whether there are others than this one among them: their ranks are not read yet.
        """
        few = sum(len(node.ranks) for node in reading.nodes) <= FEW_RANKS
        unread = False
        for node in reading.nodes:
            key = (node.seen.number,)
            if key not in self._seen:
                self._seen.add(key)
                here = node.seen.here and len(node.ranks) <= FEW_RANKS
                if few or here or node.level == 2:
                    self._opened.add(key)
                    unread |= not node.seen.here
        return unread

    def show(self) -> None:
        """Draw the newest reading."""
        if self.reading is not None:
            self.header.update(pages.header(self.reading))
            self.row_list.show(
                rows(self.reading.job, self.reading.nodes, self._opened, self.needle)
            )
            self._show_chosen()

    def _show_chosen(self) -> None:
        if self.reading is not None:
            width = max(20, self._detail.scrollable_content_region.width)
            self._chosen.update(pages.detail(self.reading, self.row_list.key, width))

    def on_resize(self, _: Resize) -> None:
        """Draw for the new width."""
        self.call_after_refresh(self._show_chosen)

    def on_row_list_chosen(self, _: RowList.Chosen) -> None:
        """Show another row on the right, and read its lines."""
        self._show_chosen()
        self.due.set()

    async def on_row_list_entered(self, event: RowList.Entered) -> None:
        """Open or close a row; of a rank, show its log."""
        row = event.row
        if row.open is None:
            await self.app.run_action("log")
            return
        wanted = not row.open if event.open is None else event.open
        (self._opened.add if wanted else self._opened.discard)(row.key)
        self.show()
        if wanted:
            self.action_again()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self.needle = event.value
        self.show()

    def find(self, needle: str) -> None:
        """Keep the filter, and go to the rows."""
        self.field.display = bool(needle)

    def action_back(self) -> None:
        """End the filter."""
        self.end_filter()
        self.show()

    def action_again(self) -> None:
        """Read again now."""
        self._full_at = 0.0
        self.due.set()


class TopApp(App[None]):
    """One run on the screen; ``reader`` reads it."""

    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log", "Log"),
        Binding("s", "stacks", "Stacks"),
        Binding("w", "why", "Why"),
        Binding("m", "metrics", "Metrics"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, reader: TopReader) -> None:
        super().__init__()
        self._reader = reader
        self._job = JobScreen(reader)

    def get_default_screen(self) -> JobScreen:
        """Return the first screen."""
        return self._job

    def on_load(self) -> None:
        """Have signals that end the command give the terminal back first."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            asyncio.get_running_loop().add_signal_handler(number, self._leave, 128 + number)

    def _leave(self, code: int) -> None:
        if not os.isatty(sys.stdin.fileno()):
            os._exit(code)  # the terminal is gone, and the driver would wait for it
        self.exit(return_code=code)

    def _page(self, title: str, read: Read, once: bool) -> None:
        if len(self.screen_stack) > 1:
            self.pop_screen()
        self.push_screen(Pager(one_line(title), read, once))

    def _read_once(self, title: str, lines: Callable[[], list[Text]]) -> None:
        self._page(title, fixed(lines), once=True)

    def action_log(self) -> None:
        """Show the log of what is chosen."""
        row, reading = self._job.row_list.row, self._job.reading
        if row is not None and reading is not None:
            name = row.name if row.key else f"{row.name}, node {pages.own_node(reading.job)}"
            self._page(f"log of {name}", self._reader.log(row.key, reading.job).read, once=False)

    def action_stacks(self) -> None:
        """Show where all ranks are."""
        self._read_once(f"stacks of {self._reader.name}", self._reader.stacks)

    def action_why(self) -> None:
        """Show why a round has failed."""
        self._read_once(f"why {self._reader.name}", self._reader.why)

    def action_metrics(self) -> None:
        """Show what the script has reported."""
        key = self._job.row_list.key
        rank = key[1] if len(key) == 2 else None
        of = "all ranks" if rank is None else f"rank {rank}"
        read = partial(self._reader.metrics, rank, self.size.width - TEXT_WIDTH)
        self._read_once(f"metrics of {self._reader.name}, {of}", read)

    def action_help(self) -> None:
        """Show the keys."""
        self._read_once("help", pages.help_lines)
