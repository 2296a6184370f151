"""The screen of ``elaunch top``: a tree of job, nodes and ranks, and the chosen one beside it.

A log, stacks, why, metrics and the help take the place of both. A reading is made in a thread,
every EVERY_S seconds, or infrequently enough to use a twentieth of a core. The keys are those of
k9s; ``?`` shows them (``help.txt``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Input, Static

from elaunch.text import one_line
from elaunch.top import pages
from elaunch.top.pages import JOB, Key, Lines, TopReader, TopReading, TreeRow
from elaunch.top.widgets import SHARE, Pager, RowList, in_thread, repeat

EVERY_S: Final = 2.0
"""Seconds from reading to reading: to draw the screen takes 20 to 40 ms of the processor."""
TEXT_WIDTH: Final = 66
"""Columns of a metric's line without its curve."""
FEW_RANKS: Final = 64
"""Ranks of a job, or of this node, that are shown from the beginning; more are counted."""


class TopApp(App[None]):
    """One run on the screen; ``reader`` reads it.

    Attributes:
        reading: the newest.
        pager: what is shown in the place of the tree, if anything is.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log", "Log"),
        Binding("s", "stacks", "Stacks"),
        Binding("w", "why", "Why"),
        Binding("m", "metrics", "Metrics"),
        Binding("slash", "find", "Filter"),
        Binding("escape", "close", "Back", priority=True),
        Binding("r", "again", show=False),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, reader: TopReader) -> None:
        super().__init__()
        self.row_list = RowList(self._on_chosen, self._on_entered)
        self.reading: TopReading | None = None
        self.pager: Pager | None = None
        self._reader = reader
        self._header = Static(id="header", markup=False)
        self._chosen = Static(id="chosen", markup=False)
        self._detail = VerticalScroll(self._chosen, id="detail")
        self._job = Horizontal(self.row_list, self._detail)
        self._field = Input(id="filter")
        self._needle = ""
        self._opened: set[Key] = {JOB}
        self._seen: set[Key] = set()
        self._full_at = 0.0
        self._due = asyncio.Event()

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield from (self._header, self._job, self._field, Footer(show_command_palette=False))

    def on_load(self) -> None:
        """Have signals that end the command give the terminal back first."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            asyncio.get_running_loop().add_signal_handler(number, self._leave, 128 + number)

    def _leave(self, code: int) -> None:
        if not os.isatty(sys.stdin.fileno()):
            os._exit(code)  # the terminal is gone, and the driver would wait for it
        self.exit(return_code=code)

    def on_mount(self) -> None:
        """Begin to read."""
        self._field.display = False
        self.row_list.focus()
        self._say("elaunch top", "reading …")
        self.run_worker(repeat(self._read, self._due))

    def _say(self, heading: str, text: str) -> None:
        head = Text(no_wrap=True, overflow="ellipsis").append(f"{heading}  ", "bold")
        self._header.update(head.append(one_line(text)))

    async def _read(self) -> float:
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
        if (reading := self.reading) is not None:
            if self.pager is None:
                self._header.update(pages.header(reading))
            self.row_list.show(pages.rows(reading.job, reading.nodes, self._opened, self._needle))
            self._show_chosen()

    def _show_chosen(self) -> None:
        if self.reading is not None:
            width = max(20, self._detail.scrollable_content_region.width)
            self._chosen.update(pages.detail(self.reading, self.row_list.key, width))

    def on_resize(self, _: Resize) -> None:
        """Draw for the new width."""
        self.call_after_refresh(self._show_chosen)

    def _on_chosen(self) -> None:
        """Show another row on the right, and read its lines."""
        self._show_chosen()
        self._due.set()

    def _on_entered(self, row: TreeRow, wanted: bool | None) -> None:
        """Open or close a row; of a rank, show its log."""
        if row.open is None:
            self.action_log()
            return
        wanted = not row.open if wanted is None else wanted
        (self._opened.add if wanted else self._opened.discard)(row.key)
        self.show()
        if wanted:
            self.action_again()

    # ── what is looked for ───────────────────────────────────────────────────────────────────────

    def action_find(self) -> None:
        """Ask for what is looked for."""
        rows = self.pager is None
        self._field.placeholder = "rank 3, FAILED, a host" if rows else "only lines with this"
        self._field.display = True
        self._field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter the tree while it is typed."""
        if self.pager is None:
            self._needle = event.value
            self.show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show only rows, or lines, with it; above the tree it stays."""
        if self.pager is None:
            self._field.display = bool(event.value)
            self.row_list.focus()
        else:
            self._field.display = False
            self.pager.find(event.value)

    def action_close(self) -> None:
        """End the filter; without one, go back to the tree."""
        pager = self.pager
        if pager is not None and (self._field.display or pager.needle):
            self._field.display = False
            pager.find("")
        elif pager is not None:
            self.pager = None
            pager.remove()
            self._job.display = True
            self._field.value, self._field.display = self._needle, bool(self._needle)
            self.row_list.focus()
        else:
            self._field.value, self._needle, self._field.display = "", "", False
            self.row_list.focus()
        self.show()

    def action_again(self) -> None:
        """Read again now."""
        self._full_at = 0.0
        (self._due if self.pager is None else self.pager.due).set()

    # ── pages ────────────────────────────────────────────────────────────────────────────────────

    def _page(self, title: str, lines: Lines, once: bool = True) -> None:
        if self.pager is not None:
            self.pager.remove()
        self._job.display = self._field.display = False
        self.pager = Pager(lines, once, partial(self._say, one_line(title)))
        self._field.value = ""
        self.mount(self.pager, after=self._job)

    def action_log(self) -> None:
        """Show the log of what is chosen."""
        row, reading = self.row_list.row, self.reading
        if row is not None and reading is not None:
            name = row.name if row.key else f"{row.name}, node {pages.own_node(reading.job)}"
            self._page(f"log of {name}", self._reader.log(row.key, reading.job), once=False)

    def action_stacks(self) -> None:
        """Show where all ranks are."""
        self._page(f"stacks of {self._reader.name}", pages.fixed(self._reader.stacks))

    def action_why(self) -> None:
        """Show why a round has failed."""
        self._page(f"why {self._reader.name}", pages.fixed(self._reader.why))

    def action_metrics(self) -> None:
        """Show what the script has reported."""
        rank = next(iter(self.row_list.key[1:]), None)
        of = "all ranks" if rank is None else f"rank {rank}"
        read = partial(self._reader.metrics, rank, self.size.width - TEXT_WIDTH)
        self._page(f"metrics of {self._reader.name}, {of}", pages.fixed(read))

    def action_help(self) -> None:
        """Show the keys."""
        self._page("help", pages.fixed(pages.help_lines))
