"""The output streams of one round's workers, from the descriptors they write to the places they go.

A worker gets a pipe, or a pseudo-terminal where it would have the terminal itself without a
launcher, so that ``isatty()`` gives scripts the same answer. The pseudo-terminal passes bytes
through unchanged (raw), has the size of the real one, and is nobody's controlling terminal.

A round owns its files: a thread of its own opens them, waits for the end of its streams and closes
them. Storage that takes long for either holds up neither the agent's loop nor the next round.
"""

from __future__ import annotations

import errno
import fcntl
import os
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from elaunch.agent.logs.console import Console, LineWriter
from elaunch.agent.logs.files import (
    ArrivalNotes,
    Complaint,
    LineFilter,
    LogFile,
    Tail,
    make_directories,
    round_directory,
)
from elaunch.agent.logs.plan import STREAM_BITS, LogPlan
from elaunch.runs.logtree import ARRIVALS

READ_SIZE = 64 * 1024
TERMINAL_GUSH = 1024  # a pseudo-terminal holds 4 KiB
_PIPE_SIZE = 1024 * 1024
_DRAIN_LIMIT = 4 * 1024 * 1024
_NO_SIZE = bytes(8)


class OutputStream:
    """The reading end of one worker's stdout or stderr.

    Args:
        fd: read end, non-blocking; closed by `close`. -1: that of a stream that it is to `follow`.
        local_rank: whose.
        rank: its global rank, for messages.
        name: ``stdout`` or ``stderr``.
        terminal: the console whose size a pseudo-terminal follows; None for a pipe.

    Attributes:
        gush: bytes in one read from which on its writer may have to wait for the next.
    """

    def __init__(
        self, fd: int, local_rank: int, rank: int, name: str, terminal: Console | None = None
    ) -> None:
        self.fd = fd
        self.local_rank = local_rank
        self.rank = rank
        self.name = name
        self.paused = False
        self.file: LogFile | None = None
        self.arrivals: ArrivalNotes | None = None
        self.writer: LineWriter | None = None
        self.line_filter: LineFilter | None = None
        self.tail = Tail() if name == "stderr" else None  # reports quote nothing else
        self.listener: Callable[[bytes], None] | None = None
        self.gush = TERMINAL_GUSH if terminal else READ_SIZE // 2
        self._terminal = terminal
        self._size = _NO_SIZE

    def pump(self, now: float) -> int | None:
        """Read once and pass the bytes on.

        Args:
            now: monotonic clock, seconds.

        Returns:
            How many bytes; 0 at the end of the stream, None when there is nothing at present.
        """
        if self.fd < 0:
            return 0
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError as exc:
            if exc.errno != errno.EIO:  # EIO: nobody has the pseudo-terminal open any more
                raise
            return 0
        if not data:
            return 0
        if self.tail is not None:
            self.tail.feed(data)
        if self.arrivals is not None:
            self.arrivals.note(now)
        if self.file is not None:
            self.file.write(data)
        if self.line_filter is not None:
            self.line_filter.feed(data)
        if self.listener is not None:
            self.listener(data)
        if self.writer is not None:
            self.writer.feed(data, now)
        self.follow_size()
        return len(data)

    def drain(self, now: float) -> bool:
        """Read what is there at present, within a limit; return whether the stream has ended."""
        total = 0
        while total < _DRAIN_LIMIT:
            got = self.pump(now)
            if not got:
                return got == 0
            total += got
        return False

    def follow_size(self) -> None:
        """Give the pseudo-terminal the size of the real one, if it has changed."""
        if self._terminal is None or self._terminal.gone:
            return
        try:
            size = fcntl.ioctl(self._terminal.fd, termios.TIOCGWINSZ, _NO_SIZE)
            if size != self._size:
                fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)
        except OSError:
            return  # the terminal has just gone away
        self._size = size

    def again(self, rank: int) -> OutputStream:
        """Return a stream that reads on where this one is ended, for the round that follows."""
        return OutputStream(-1, self.local_rank, rank, self.name, self._terminal)

    def follow(self, old: OutputStream) -> None:
        """Read on in place of the stream of this worker in the round before, as far as it is."""
        self.fd, old.fd = old.fd, -1
        self.tail, self.listener, self.writer = old.tail, old.listener, old.writer
        old.writer = None
        if self.writer is not None:
            self.writer.waits = self.writer.drops = False

    def close(self) -> None:
        """Show and copy the unfinished last line, then close the read end; the file stays open.

        What is withheld is shown later, or never.
        """
        if self.writer is not None and not self.writer.withheld:
            self.writer.show_held()
        if self.line_filter is not None:
            self.line_filter.end()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_channel(console: Console | None) -> tuple[int, int, bool]:
    """Open what a worker writes to.

    Args:
        console: the terminal the worker would have without a launcher; None for a plain pipe.

    Returns:
        Read end (non-blocking), write end, whether they are a pseudo-terminal. Both are
        close-on-exec.

    Raises:
        OSError: no descriptors left.
    """
    if console is not None and console.terminal and not console.gone:
        try:
            master, slave = os.openpty()
        except OSError:
            pass  # no /dev/pts here, or all are taken: a pipe will do
        else:
            tty.setraw(slave, termios.TCSANOW)
            os.set_blocking(master, False)
            return master, slave, True
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    try:
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    except OSError:
        return read_end, write_end, False  # the user's pipe quota is spent; 64 KiB will do
    return read_end, write_end, False


@dataclass
class LogRound:
    """The streams and files of one round.

    Args:
        number: round number.
        ranks: local rank to global rank.
        before: streams of workers that the round before had as well; they end when this one's are
            read in their place.

    Attributes:
        streams: by local rank and name (``stdout``, ``stderr``); kept for their tails.
        live: the streams that have not ended.
        filtered: the filtered files, by name of the stream.
        arrivals: when their bytes came, if that can be noted.
        held: what somebody still had open when the round was given up, in words.
        opened: set when workers may start: the directories are there, as far as they can be, and
            what is written from now on belongs to this round.
        kept: the local ranks of the workers that go on in the next round.
        others_ended: set when the streams of all others have ended, and what was read is on file.
        ended: set when all streams have ended.
        done: set when all files are closed.
    """

    number: int
    ranks: Mapping[int, int]
    before: Mapping[tuple[int, str], OutputStream] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    streams: dict[tuple[int, str], OutputStream] = field(default_factory=dict)
    live: set[OutputStream] = field(default_factory=set)
    filtered: dict[str, LogFile] = field(default_factory=dict)
    arrivals: LogFile | None = None
    held: list[str] = field(default_factory=list)
    opened: threading.Event = field(default_factory=threading.Event)
    others_ended: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def leaving(self) -> list[OutputStream]:
        """The streams that are to end with the round, and have not."""
        return [stream for stream in self.live if stream.local_rank not in self.kept]

    def note_end(self) -> None:
        """Note what has ended."""
        if not self.leaving:
            self.others_ended.set()
        if not self.live:
            self.ended.set()

    def serve(self, plan: LogPlan, complain: Complaint, read: Callable[[], object]) -> None:
        """Open the files, in a thread of their own, and close them when the streams have ended.

        Args:
            plan: where the files are.
            complain: called for each failure.
            read: has the streams read from now on.
        """
        run = partial(self._run, plan, complain, read)
        try:
            threading.Thread(target=run, name=f"log files {self.number}", daemon=True).start()
        except RuntimeError as error:
            if plan.log_root is not None:
                complain(plan.log_root, OSError(str(error)))
            self.done.set()
            read()

    def _run(self, plan: LogPlan, complain: Complaint, read: Callable[[], object]) -> None:
        try:
            open_files(self, plan, complain)
        finally:
            read()
        self.ended.wait()
        files = (stream.file for stream in self.streams.values())
        for file in (*files, *self.filtered.values(), self.arrivals):
            if file is not None:
                file.close()
        self.done.set()


def open_streams(
    opened: LogRound, plan: LogPlan, consoles: Mapping[str, Console]
) -> dict[int, tuple[int, int]]:
    """Open every stream of a round.

    Args:
        opened: the round; its `streams` and `live` are filled.
        plan: what is shown, and how.
        consoles: by name of the stream.

    Returns:
        For each local rank that the round before had not the write ends of stdout and stderr.

    Raises:
        OSError: no descriptors left; nothing stays open.
    """
    shown = [rank for rank in opened.ranks if any(plan.shows(rank, n) for n in STREAM_BITS)]
    ends: dict[tuple[int, str], int] = {}
    try:
        for local_rank, name in product(opened.ranks, STREAM_BITS):
            console = consoles[name] if plan.shows(local_rank, name) else None
            tees = plan.tees(local_rank, name)
            old = opened.before.get((local_rank, name))
            if old is not None:
                opened.streams[local_rank, name] = old.again(opened.ranks[local_rank])
                continue
            read_end, write_end, is_pty = open_channel(None if tees else console)
            terminal = console if is_pty else None
            stream = OutputStream(read_end, local_rank, opened.ranks[local_rank], name, terminal)
            opened.streams[local_rank, name] = stream
            if plan.listener is not None:
                stream.listener = plan.listener(local_rank)
            ends[local_rank, name] = write_end
            stream.follow_size()
            if console is not None:
                prefix = plan.prefix(local_rank, stream.rank) if tees else b""
                alone = plan.at_once and len(shown) == 1
                stream.writer = LineWriter(
                    console,
                    local_rank,
                    prefix=prefix,
                    eager=alone,
                    withholds=plan.withholds and name == "stderr" and not tees,
                )
    except OSError:
        for fd in ends.values():
            os.close(fd)
        for stream in opened.streams.values():
            stream.close()
        raise
    opened.live.update(opened.streams.values())
    started = (rank for rank in opened.ranks if (rank, "stdout") in ends)
    return {rank: (ends[rank, "stdout"], ends[rank, "stderr"]) for rank in started}


def open_files(opened: LogRound, plan: LogPlan, complain: Complaint) -> None:
    """Create the directories and files of a round; what cannot be created is done without.

    Args:
        opened: the round, with its streams.
        plan: where the files are; none are made when it has no `log_root`.
        complain: called for each failure.
    """
    if plan.log_root is None:
        return
    try:
        make_directories(plan.log_root, opened.number, sorted(opened.ranks))
    except OSError as exc:
        complain(plan.log_root, exc)
        return
    if not opened.before:
        opened.opened.set()  # each file is 0.3 ms that the workers' forks need not wait for
    base = round_directory(plan.log_root, opened.number)
    for name in STREAM_BITS:
        file = LogFile(base / f"filtered_{name}.log", complain)
        if plan.filters(name) and file.open():
            opened.filtered[name] = file
    arrivals = LogFile(base / ARRIVALS, complain)
    opened.arrivals = arrivals if arrivals.open() else None
    for (local_rank, name), stream in opened.streams.items():
        file = LogFile(base / str(local_rank) / f"{name}.log", complain)
        stream.file = file if file.open() else None
        if stream.file is not None and opened.arrivals is not None:
            stream.arrivals = ArrivalNotes(
                opened.arrivals, file, rank=stream.rank, local_rank=local_rank, stream=name
            )
        any_tee = any(plan.tees(other, name) for other in opened.ranks)
        if name in opened.filtered and (plan.tees(local_rank, name) or not any_tee):
            prefix = plan.prefix(local_rank, stream.rank)
            stream.line_filter = LineFilter(opened.filtered[name], plan.filters(name), prefix)
