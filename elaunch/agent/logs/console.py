"""The consoles: what people see of the workers, whole lines only.

A `Console` is the agent's own stdout or stderr (one object when both are the same terminal, pipe or
file). A `LineWriter` is one worker's stream as one console shows it. Both keep these rules:

* Only whole lines are shown; ``\n``, ``\r\n`` and ``\r`` (progress bars) end one. Bytes without
  an end are held, and shown after all when the worker has been silent: `PARTIAL_AGE` seconds for a
  prompt or dots, `BULK_SILENCE` for what is long enough to be a line of megabytes, at once from a
  writer that has the console to itself (*eager*).
* From the first byte of a line to its ``\n`` the console belongs to that writer. Another writer
  meanwhile begins with a ``\n`` of its own, so no line ever mixes two workers. On a terminal
  two progress bars take turns on one line, as they would without a launcher.
* Nothing here blocks. What the console does not take now is queued; `Console.pending` shows the
  pump when to stop reading the streams that are shown there, so nothing is lost either.
* A live line (`Console.show_live`) stands below the last whole line, while that is the last thing
  there: it goes before anything is written, and a line that is not whole yet has its place. It is
  drawn only while this process is in the foreground: the shell's prompt is left alone.
* A console that is gone (``| head``, a closed terminal) swallows what is written to it.
* From a traceback on, a writer that *withholds* keeps its worker's lines: they may be its last
  words, and a failure report shows those of one rank only. They are shown after all if the worker
  goes on writing (`GOES_ON`), or has not ended after `WITHHELD_AGE` seconds (see the pump).

The agent's own log lines are printed between the workers' lines, one line each (`logging_to`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import select
import stat
import struct
import termios
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from elaunch.text import one_line

PARTIAL_AGE = 0.2
BULK_SILENCE = 2.0
BULK = 64 * 1024
HELD_LIMIT = 16 * 1024 * 1024
WITHHELD_AGE = 5.0
GOES_ON = 1.0
"""Seconds after its traceback in which a worker that ends has written the rest of it."""

_SEGMENT = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_LAST_WORDS = re.compile(
    rb"^(?:\[rank\d+\]: ?)?(?:(?:  \+ Exception Group )?Traceback \(most recent call last\):"
    rb"|Fatal Python error: |terminate called )",
    re.MULTILINE,
)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BUFFERS_PER_WRITE = 64
_ERASE = b"\r\x1b[K"


class Console:
    """One terminal, pipe or file that the agent writes to without ever blocking on it.

    Args:
        name: ``stdout`` or ``stderr``, for messages.
        fd: a descriptor that this object closes; -1 when there is no console.
        terminal: whether it is a terminal.
        polled: True when `fd` blocks on write and has to be asked first.

    Attributes:
        pending: bytes queued.
        gone: True when nothing can be shown here any more.
        fault: why queued bytes were dropped (no room), until the pump has shown and cleared it.
    """

    def __init__(self, name: str, fd: int, *, terminal: bool, polled: bool) -> None:
        self.name = name
        self.fd = fd
        self.terminal = terminal
        self.pending = 0
        self.fault: OSError | None = None
        self.gone = fd < 0
        self._polled = polled
        self._queue: deque[memoryview] = deque()
        self._owner: LineWriter | None = None
        self._last = b"\n"
        self._live = b""
        self._drawn = False

    def write(self, data: bytes, writer: LineWriter | None = None, *, bar: bool = False) -> None:
        """Queue `data` so that no line mixes two writers.

        Args:
            data: whole lines, or a part of one that `writer` goes on with.
            writer: whose it is; None for the agent.
            bar: True when all of `data` is states of a progress bar.
        """
        if self.gone or not data:
            return
        self._erase()
        before = self._separator(writer, bar)
        if before:
            self._push(before)
        self._push(data)
        self._last = data[-1:]
        self._owner = None if self._last == b"\n" else writer

    def show_live(self, text: str) -> None:
        """Have ``text`` below what is written from now on, or nothing; `flush` draws it."""
        self._live = text.encode("ascii", "backslashreplace")
        # A console that takes nothing has the line of before in its queue: one is enough.
        if not self._queue or not text:
            self._erase()

    def flush(self) -> None:
        """Write as much of the queue as the console takes now."""
        self._draw()
        while self._queue:
            try:
                written = self._write_some()
            except BlockingIOError:
                return
            except OSError as exc:
                self._fail(exc)
                return
            self._advance(written)

    def close(self) -> None:
        """Close the descriptor; what is still queued is dropped."""
        self._drop()
        self.gone = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _erase(self) -> None:
        if self._drawn and self._in_front():
            self._push(_ERASE)
        self._drawn = False

    def _draw(self) -> None:
        whole = self._last == b"\n"
        if self._live and not (self._drawn or self.gone) and whole and self._in_front():
            self._push(self._live[: self._columns() - 1])
            self._drawn = True

    def _columns(self) -> int:
        """Return the terminal's width: a line that fills it would be two after a resize."""
        with suppress(OSError):
            size = fcntl.ioctl(self.fd, termios.TIOCGWINSZ, bytes(8))
            return int(struct.unpack("HHHH", size)[1]) or 80
        return 80

    def _in_front(self) -> bool:
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return True  # a terminal without job control

    def _separator(self, writer: LineWriter | None, bar: bool) -> bytes:
        owner = self._owner
        if self._last == b"\n" or (owner is not None and owner is writer):
            return b""
        if owner is None:
            return b"\n"
        # A worker that clears its bar on stderr and then prints on stdout goes on in column 0.
        if writer is not None and writer.worker == owner.worker and self._last == b"\r":
            return b""
        owner.cut = True
        return b"\r" if self.terminal and bar and owner.bar else b"\n"

    def _push(self, data: bytes) -> None:
        self._queue.append(memoryview(data))
        self.pending += len(data)

    def _write_some(self) -> int:
        if not self._polled:
            count = min(len(self._queue), _BUFFERS_PER_WRITE)
            return os.writev(self.fd, [self._queue[i] for i in range(count)])
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError(errno.EAGAIN, "the console is full")
        return os.write(self.fd, self._queue[0][: select.PIPE_BUF])

    def _advance(self, written: int) -> None:
        self.pending -= written
        while self._queue and written >= len(self._queue[0]):
            written -= len(self._queue.popleft())
        if written:
            self._queue[0] = self._queue[0][written:]

    def _fail(self, exc: OSError) -> None:
        self._drop()
        if exc.errno in _NO_ROOM:
            self.fault = exc
        else:
            self.gone = True

    def _drop(self) -> None:
        self._queue.clear()
        self.pending = 0


class LineWriter:
    """One worker's stream as one console shows it.

    Args:
        console: where it is shown.
        worker: local rank.
        prefix: put at the start of every line shown.
        eager: show partial lines at once; for the only worker of a console.
        withholds: keep a traceback, and what follows it.

    Attributes:
        withheld: the traceback and what followed it.
        waits: the worker's round has failed: what is withheld has no deadline.
        drops: what was withheld is dropped, and so is what follows it.
    """

    def __init__(
        self,
        console: Console,
        worker: int,
        *,
        prefix: bytes = b"",
        eager: bool = False,
        withholds: bool = False,
    ) -> None:
        self.console = console
        self.worker = worker
        self.withheld = bytearray()
        self.waits = False
        self.drops = False
        self.bar = False
        self.cut = False
        self._prefix = prefix
        self._eager = eager
        self._withholds = withholds
        self._held = bytearray()
        self._held_since = 0.0
        self._fed_at = 0.0
        self._fresh = True
        self._last = b"\n"

    def feed(self, data: bytes, now: float) -> None:
        """Receive what the worker wrote; show the whole lines, hold the rest.

        Args:
            data: bytes as read.
            now: monotonic clock, seconds.
        """
        if self.console.gone or self.drops:
            self._held.clear()
            self.withheld.clear()
            return
        if self._withholds and self._withhold(data, now):
            return
        end = len(data) if self._eager else _end_of_lines(data)
        if end:
            self._release(data[:end])
        elif self._held.endswith(b"\r"):
            self._release()
        if end < len(data):
            if not self._held:
                self._held_since = now
            self._held += data[end:]
        self._fed_at = now
        if len(self._held) > HELD_LIMIT:
            self._release()

    def deadline(self) -> float | None:
        """Return the monotonic time at which the held bytes are to be shown, if there are any."""
        if self.withheld:
            return None if self.waits else self._held_since + WITHHELD_AGE
        if not self._held:
            return None
        if len(self._held) < BULK:
            return self._held_since + PARTIAL_AGE
        return self._fed_at + BULK_SILENCE

    def wait_anew(self, now: float) -> None:
        """Count the age of what is held from `now`: the stream was not read for a while."""
        self._held_since = self._fed_at = now

    def show_held(self) -> None:
        """Show what is held or withheld as it is: its deadline passed, or the stream ended."""
        if self._held or self.withheld:
            data = bytes(self.withheld)
            self.withheld.clear()
            self._release(data)

    def _withhold(self, data: bytes, now: float) -> bool:
        """Keep what may be the worker's last words; return whether all of ``data`` is kept."""
        if not self.withheld:
            found = _LAST_WORDS.search(data)
            if found is None:
                return False
            if self._held or found.start():
                self._release(data[: found.start()])
            data, self._held_since = data[found.start() :], now
        self.withheld += data
        late = now - self._held_since > GOES_ON and not self.waits
        if late or len(self.withheld) > BULK:
            self.show_held()
        return True

    def _release(self, data: bytes = b"") -> None:
        text = bytes(self._held) + data
        self._held.clear()
        if self.cut:
            self.cut = self.bar = False
            self._fresh = True
            text = _without_first_end(text)
        text, last = self._prefixed(text), text[-1:]
        newline = text.rfind(b"\n")
        self.bar = b"\r" in text[newline + 1 :] or (self.bar and newline < 0)
        self.console.write(text, self, bar=self.bar and newline < 0)
        self._last = last or self._last

    def _prefixed(self, text: bytes) -> bytes:
        if not self._prefix:
            return text
        shown: list[bytes] = []
        for segment in _SEGMENT.findall(text):
            # The "\n" of a "\r\n" that was cut in two begins no line, nor does the "\r" that a
            # progress bar starts with.
            late_newline = not shown and self._last == b"\r" and segment == b"\n"
            if self._fresh and segment != b"\r" and not late_newline:
                shown.append(self._prefix)
            shown.append(segment)
            self._fresh = segment[-1] in b"\r\n"
        return b"".join(shown)


def open_consoles(out: int, err: int) -> tuple[Console, Console]:
    """Open the agent's stdout and stderr for writing without blocking.

    Args:
        out: descriptor of stdout; left as it is.
        err: descriptor of stderr; left as it is.

    Returns:
        The two consoles, the same object twice when both lead to the same place.
    """
    stdout = _open_console("stdout", out)
    try:
        same = not stdout.gone and os.path.sameopenfile(out, err)
    except OSError:
        same = False
    return stdout, stdout if same else _open_console("stderr", err)


def write_directly(fd: int, data: bytes) -> None:
    """Write to a descriptor, waiting for it; for an agent that has no pump running."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    try:
        while data:
            poll.poll()  # somebody may have set it to non-blocking
            data = data[os.write(fd, data) :]
    except OSError:
        return  # it is closed, or nobody reads it any more


def _open_console(name: str, fd: int) -> Console:
    try:
        mode = os.fstat(fd).st_mode
        own, polled = _own(fd, mode)
    except OSError:
        return Console(name, -1, terminal=False, polled=False)
    return Console(name, own, terminal=os.isatty(own), polled=polled)


def _own(fd: int, mode: int) -> tuple[int, bool]:
    """Return a descriptor of our own for `fd`, and whether it has to be polled before a write.

    O_NONBLOCK belongs to the open file description, which the shell and everybody else who has
    this terminal share, so it is never set on the inherited one: the file is opened anew. That is
    not done to a regular file, whose offset is shared too, and it fails on a socket.
    """
    if stat.S_ISREG(mode):
        return os.dup(fd), False
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{fd}", flags), False
        except OSError:
            return os.dup(fd), True
    return os.dup(fd), True


def _end_of_lines(data: bytes) -> int:
    """Return where the last whole line of `data` ends; a final ``\\r`` may be half an end."""
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1


def _without_first_end(text: bytes) -> bytes:
    """Drop the line end that a ``\\n`` put before another's line has already stood for."""
    for end in (b"\r\n", b"\n"):
        if text.startswith(end):
            return text[len(end) :]
    return text


log = logging.getLogger("elaunch")


class OneLine(logging.Formatter):
    """Formats a log line, in which what others wrote is printed as elaunch.text says."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the traceback of an error of elaunch's own."""
        plain = logging.makeLogRecord(vars(record))
        plain.msg, plain.args = one_line(record.getMessage()), None
        return super().format(plain)


class PumpHandler(logging.Handler):
    """Prints the agent's log lines through the log pump, so that they cut no worker's line."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show
        self.setFormatter(OneLine("elaunch %(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        self._show(self.format(record))


@contextlib.contextmanager
def logging_to(show: Callable[[str], None], level: str) -> Iterator[None]:
    """Have the agent's log lines printed by ``show`` in the block."""
    handler = PumpHandler(show)
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
