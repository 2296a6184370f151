"""The log pump: one thread of the agent that reads what every worker prints.

It sits in one blocking wait over the read ends of all workers' stdout and stderr, and passes each
chunk to the worker's log file (exact bytes), to the console (whole lines), to the filtered files
and to the tail that failure reports quote. `LogPlan` says which stream goes where.

Calls, all from one thread: `LogPump.start`; for each round `open_round`, then, when its workers are
gone, `finish_round`; `close`. A round's files are opened and closed by a thread of the round
(elaunch.agent.logs.streams), so that a round may begin while the files of the last are closed.
`show`, `tail` and `paths` may be called from any thread.

A traceback on stderr is kept from the console for some seconds (`LineWriter`). If the round fails
meanwhile (`withhold`) it is kept until the round's failure report has been shown, and then dropped
(`settle`): the report has the one that matters, the log files have all.

A turn costs more than the lines that it takes. So of those in one second FREE_TURNS follow each
other at once, and between the others the pump rests, for what comes meanwhile to come together.

Memory is bounded: a console that takes nothing makes the pump stop reading the streams shown on it
(the workers then wait, as they would for the console itself), while all others go on.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from elaunch.agent.logs.console import Console, open_consoles, write_directly
from elaunch.agent.logs.plan import STREAM_BITS, LogPlan
from elaunch.agent.logs.streams import LogRound, OutputStream, open_streams
from elaunch.text import ranks

__all__ = ["LogPlan", "LogPump"]

PENDING_HIGH = 1024 * 1024
PENDING_LOW = 256 * 1024
CONSOLE_PATIENCE = 30.0
OPEN_PATIENCE = 2.0
"""Seconds for a round's files to be opened; after it the workers are started without waiting."""
CLOSE_PATIENCE = 0.1
"""Seconds for a round's files to be closed before the next begins; most take microseconds."""
FREE_TURNS = 50
"""Turns in a second that follow each other at once."""
REST_MS = 20
"""Milliseconds between two turns after that, unless a stream gushes."""
_ABANDON_WAIT = 2.0

logger = logging.getLogger(__name__)


class LogPump:
    """Reads all workers' output and distributes it according to a `LogPlan`.

    Args:
        plan: where the output goes.
        console_out: descriptor of the agent's stdout.
        console_err: descriptor of the agent's stderr.
    """

    def __init__(self, plan: LogPlan, console_out: int = 1, console_err: int = 2) -> None:
        self._plan = plan
        self._console_fds = (console_out, console_err)
        self._consoles: dict[str, Console] = {}
        self._selector: selectors.BaseSelector
        self._wake = -1
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="log-pump", daemon=True)
        self._round: LogRound | None = None
        self._unclosed: list[LogRound] = []
        self._live: dict[OutputStream, LogRound] = {}
        self._withheld: dict[OutputStream, LogRound] = {}
        self._full: set[Console] = set()
        self._shown: set[str] = set()
        self._stop_at: float | None = None
        self._resting = select.poll()
        self._second = 0.0
        self._turns = 0
        self._gushes = self._hurried = False

    def start(self) -> None:
        """Open the consoles and start the thread."""
        out, err = open_consoles(*self._console_fds)
        self._consoles = {"stdout": out, "stderr": err}
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._resting.register(self._wake, select.POLLIN)
        self._thread.start()

    def open_round(
        self, round: int, ranks: Mapping[int, int], kept: Collection[int] = ()
    ) -> dict[int, tuple[int, int]]:
        """Open the streams, directories and files of a round.

        Log files that cannot be created are reported on stderr and done without. Storage that takes
        longer than OPEN_PATIENCE to open them is named, and the workers' output waits for it.

        Args:
            round: round number, from 0.
            ranks: local rank to global rank of every worker of this node.
            kept: local ranks of workers that the newest round had as well: what they write from
                now on belongs to this one.

        Returns:
            For each other local rank the descriptors of its stdout and stderr. They are
            close-on-exec; the caller passes them to the worker and closes them.

        Raises:
            OSError: there are no descriptors left; nothing stays open.
        """
        for text in self._plan.shortcomings(ranks):
            self._show_once(text, text)
        self._hurried = False
        before = {} if self._round is None else self._round.streams
        old = {key: stream for key, stream in before.items() if key[0] in kept}
        opened = LogRound(round, dict(ranks), before=old)
        write_ends = open_streams(opened, self._plan, self._consoles)
        self._round = opened
        self._unclosed = [*(each for each in self._unclosed if not each.done.is_set()), opened]
        opened.serve(self._plan, self._complain, lambda: self._post(partial(self._adopt, opened)))
        if not opened.opened.wait(OPEN_PATIENCE):
            self.show(f"elaunch: {self._plan.log_root} is slow to open the log files; going on")
        return write_ends

    def finish_round(self, timeout: float, kept: Collection[int] = ()) -> bool:
        """Wait until every stream of the newest round has ended and is on file.

        The round closes its files after that by itself; `close` waits for it. The streams of the
        local ranks ``kept`` go on, in the next round.
        When the time is over, what can be read is read, and the streams that somebody still has
        open are named on stderr and closed. What a slow console has not taken yet stays queued.

        Args:
            timeout: seconds.

        Returns:
            True when all streams had ended by themselves.
        """
        finished = self._round
        if finished is None:
            return True
        self._hurried = True
        if not finished.ended.is_set():
            finished.others_ended.clear()
        self._post(partial(self._note_kept, finished, kept))
        if not finished.others_ended.wait(timeout):
            self._post(partial(self._abandon, finished))
            finished.others_ended.wait(_ABANDON_WAIT)
        if not kept:
            finished.done.wait(CLOSE_PATIENCE)
        return finished.others_ended.is_set() and not finished.held

    def withhold(self) -> None:
        """Keep the tracebacks of the newest round from the console until `settle`."""
        if self._round is not None:
            self._post(partial(self._withhold, self._round))

    def settle(self, round: int, *, drops: bool, shown: Collection[int] = (), run: str) -> None:
        """Drop the tracebacks that were kept from the console since a round failed, or show them.

        Args:
            round: which.
            drops: drop them, and say where they are; those that no file has are shown.
            shown: ranks whose tracebacks a report has shown.
            run: run id, for the line that says where they are.
        """
        self._post(partial(self._settle, round, drops, shown, run))

    def tail(self, local_rank: int, lines: int) -> list[str]:
        """Return the last lines of a worker's stderr in the newest round, without line ends.

        Args:
            local_rank: whose; an unknown one has no lines.
            lines: how many at most; no more than 500 lines and 64 KiB are kept.
        """
        found = self._find(local_rank, "stderr")
        return [] if found is None or found.tail is None else found.tail.lines(lines)

    def paths(self, local_rank: int) -> tuple[Path | None, Path | None]:
        """Return the stdout and stderr log files of the newest round; None where there is none."""
        files = [s.file if (s := self._find(local_rank, n)) else None for n in STREAM_BITS]
        out, err = (file.path if file else None for file in files)
        return out, err

    def show(self, text: str) -> None:
        """Show a line of the agent's own on the console's stderr, never inside a worker's line.

        Does not block. Before `start` and after `close` it is written directly.

        Args:
            text: one or several lines; the last line end may be left out.
        """
        if self._thread.is_alive():
            self._post(partial(self._show, text))
        else:
            write_directly(self._console_fds[1], _line(text))

    @property
    def on_terminal(self) -> bool:
        """Whether a live line can be shown: a console is a terminal that knows how to erase."""
        known = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        return known and any(console.terminal for console in self._consoles.values())

    def show_live(self, text: str) -> None:
        """Show a line below all others on the terminal, in the place of the last; "" for none."""
        if self._thread.is_alive():
            self._post(partial(self._set_live, text))

    def close(self, timeout: float = CONSOLE_PATIENCE) -> None:
        """Stop the thread, once files are closed and the console has taken what is queued for it.

        Args:
            timeout: seconds to wait for storage that does not close a file, and for a console that
                takes nothing; after it, what is queued is dropped (it is in the files).
        """
        if not self._thread.is_alive():
            return
        self.finish_round(0.0)
        until = time.monotonic() + timeout
        for each in self._unclosed:
            if not each.done.wait(max(0.0, until - time.monotonic())):
                where = f"{self._plan.log_root}, round {each.number}"
                self.show(
                    f"elaunch: {where}: the log files are not closed yet; they may lack lines"
                )
        self._post(partial(self._stop, until))
        self._thread.join(timeout + _ABANDON_WAIT)
        if not self._thread.is_alive():
            os.close(self._wake)
            self._wake = -1

    def _find(self, local_rank: int, name: str) -> OutputStream | None:
        newest = self._round
        return None if newest is None else newest.streams.get((local_rank, name))

    def _complain(self, path: Path, exc: OSError) -> None:
        reason = exc.strerror or str(exc)
        self._show_once(reason, f"cannot write {path}: {reason}; log files are incomplete")

    def _show_once(self, subject: str, text: str) -> None:
        if subject not in self._shown:
            self._shown.add(subject)
            self.show(f"elaunch: {text}")

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # What follows is called by the thread only.

    def _run(self) -> None:
        try:
            while not self._stopped():
                self._turn()
                self._rest()
        except Exception:
            logger.exception("the log pump failed; workers' further output is lost")
        finally:
            self._shut()

    def _rest(self) -> None:
        """Wait for more to come, if output comes without a pause; whatever is posted ends it."""
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._turns = now, 0
        self._turns += 1
        if self._turns > FREE_TURNS and not (self._gushes or self._hurried):
            self._resting.poll(REST_MS)

    def _turn(self) -> None:
        events = self._selector.select(self._timeout())
        now = time.monotonic()
        self._gushes = False
        for key, _ in events:
            if isinstance(key.data, OutputStream):
                read = key.data.pump(now)
                if read == 0:
                    self._end(key.data, self._live[key.data])
                elif read is not None and read >= key.data.gush:
                    self._gushes = True
            elif key.fd == self._wake:
                os.eventfd_read(self._wake)
        while self._inbox:
            self._inbox.popleft()()
        for stream in [*self._live, *self._withheld]:
            due = _deadline(stream)
            if due is not None and due <= now and stream.writer is not None:
                stream.writer.show_held()
                self._withheld.pop(stream, None)
        self._flush_consoles()
        self._pause_and_resume(now)

    def _timeout(self) -> float | None:
        times = [
            due
            for stream in [*self._live, *self._withheld]
            if (due := _deadline(stream)) is not None
        ]
        if self._stop_at is not None:
            times.append(self._stop_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _adopt(self, opened: LogRound) -> None:
        for key, old in opened.before.items():
            stream, before = opened.streams[key], self._live.pop(old, None)
            if before is not None and not old.paused:
                self._selector.unregister(old.fd)
            stream.follow(old)
            if before is None:  # its worker has ended meanwhile
                self._end(stream, opened)
            else:
                self._end(old, before)
        for stream in opened.live:
            self._live[stream] = opened
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        opened.opened.set()

    def _end(self, stream: OutputStream, of_round: LogRound) -> None:
        if self._live.pop(stream, None) is not None and not stream.paused:
            self._selector.unregister(stream.fd)
        stream.close()
        if stream.writer is not None and stream.writer.withheld:
            self._withheld[stream] = of_round
        of_round.live.discard(stream)
        of_round.note_end()

    def _note_kept(self, ending: LogRound, kept: Collection[int]) -> None:
        ending.kept = frozenset(kept)
        ending.note_end()

    def _abandon(self, overdue: LogRound) -> None:
        now = time.monotonic()
        for stream in sorted(overdue.leaving, key=lambda stream: (stream.rank, stream.name)):
            if not stream.drain(now):
                overdue.held.append(f"rank {stream.rank} {stream.name}")
            self._end(stream, overdue)
        if overdue.held:
            held = ", ".join(overdue.held)
            self._show(f"elaunch: a process still holds open: {held}; it is no longer read")

    def _withhold(self, failing: LogRound) -> None:
        for stream in failing.streams.values():
            if stream.writer is not None:
                stream.writer.waits = True

    def _settle(self, number: int, drops: bool, shown: Collection[int], run: str) -> None:
        dropped = set()
        for stream, of_round in [*self._live.items(), *self._withheld.items()]:
            writer = stream.writer
            if of_round.number != number or writer is None or not writer.withheld:
                continue
            if drops and stream.file is not None and stream.file.is_whole:
                writer.withheld.clear()
                writer.drops = True
                dropped.add(stream.rank)
            else:
                writer.show_held()
            self._withheld.pop(stream, None)
        if others := sorted(dropped.difference(shown)):
            self._show(f"Tracebacks of {ranks(others)}: elaunch logs {run} --round {number}")

    def _flush_consoles(self) -> None:
        for console in set(self._consoles.values()):
            console.flush()
            if console.fault is not None:
                reason, console.fault = console.fault.strerror, None
                self._show_once(console.name, f"{console.name}: {reason}; output is missing there")
            if console.pending and console not in self._full:
                self._full.add(console)
                self._selector.register(console.fd, selectors.EVENT_WRITE)
            elif not console.pending and console in self._full:
                self._full.discard(console)
                self._selector.unregister(console.fd)

    def _pause_and_resume(self, now: float) -> None:
        for stream in self._live:
            if stream.writer is None:
                continue
            pending = stream.writer.console.pending
            pause = pending > (PENDING_LOW if stream.paused else PENDING_HIGH)
            if pause and not stream.paused:
                self._selector.unregister(stream.fd)
            elif stream.paused and not pause:
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
                stream.writer.wait_anew(now)
            stream.paused = pause

    def _show(self, text: str) -> None:
        self._consoles["stderr"].write(_line(text))

    def _set_live(self, text: str) -> None:
        both = (self._consoles["stderr"], self._consoles["stdout"])
        for console in [one for one in both if one.terminal][:1]:
            console.show_live(text)

    def _stop(self, deadline: float) -> None:
        for stream in self._withheld:
            if stream.writer is not None:
                stream.writer.show_held()
        self._withheld.clear()
        self._stop_at = deadline

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        waiting = any(console.pending for console in self._consoles.values())
        return not (waiting or self._inbox) or time.monotonic() >= self._stop_at

    def _shut(self) -> None:
        """Close everything; a worker that still writes gets an error instead of waiting."""
        for each in self._unclosed:
            for stream in each.live:
                each.held.append(f"rank {stream.rank} {stream.name}")
                stream.close()
            each.live.clear()
            each.note_end()
        self._live.clear()
        for console in set(self._consoles.values()):
            console.close()
        self._selector.close()


def _deadline(stream: OutputStream) -> float | None:
    """Return when a stream's unfinished line is to be shown, if it is read at present at all."""
    if stream.paused or stream.writer is None:
        return None
    return stream.writer.deadline()


def _line(text: str) -> bytes:
    line = text if text.endswith("\n") else f"{text}\n"
    return line.encode("utf-8", "backslashreplace")
