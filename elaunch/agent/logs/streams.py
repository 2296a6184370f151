"""One output stream of one worker, from the descriptor the worker writes to the places it goes.

The worker gets a pipe, or a pseudo-terminal where it would have the terminal itself without a
launcher, so that ``isatty()`` gives scripts the same answer. The pseudo-terminal passes bytes
through unchanged (raw), has the size of the real one, and is nobody's controlling terminal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import termios
import tty
from collections.abc import Callable

from elaunch.agent.logs.console import Console, Speaker
from elaunch.agent.logs.files import LineFilter, LogFile, Tail

READ_SIZE = 64 * 1024
_PIPE_SIZE = 1024 * 1024
_DRAIN_LIMIT = 4 * 1024 * 1024
_NO_SIZE = bytes(8)


class OutputStream:
    """The reading end of one worker's stdout or stderr.

    Args:
        fd: read end, non-blocking; closed by `close`.
        local_rank: whose.
        rank: its global rank, for messages.
        name: ``stdout`` or ``stderr``.
        terminal: the console whose size a pseudo-terminal follows; None for a pipe.
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
        self.speaker: Speaker | None = None
        self.line_filter: LineFilter | None = None
        self.tail = Tail()
        self.listener: Callable[[bytes], None] | None = None
        self._terminal = terminal
        self._size = _NO_SIZE

    def pump(self, now: float) -> int | None:
        """Read once and pass the bytes on.

        Args:
            now: monotonic clock, seconds.

        Returns:
            How many bytes; 0 at the end of the stream, None when there is nothing at present.
        """
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
        self.tail.feed(data)
        if self.file is not None:
            self.file.write(data)
        if self.line_filter is not None:
            self.line_filter.feed(data)
        if self.listener is not None:
            self.listener(data)
        if self.speaker is not None:
            self.speaker.hear(data, now)
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

    def close(self) -> None:
        """Show and copy the unfinished last line, then close the read end; the file stays open."""
        if self.speaker is not None:
            self.speaker.show_held()
        if self.line_filter is not None:
            self.line_filter.end()
        os.close(self.fd)


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
