"""The files that workers' output is kept in, and the last lines that are kept in memory.

::

    <log root>/attempt_<round>/<local rank>/stdout.log    exactly the bytes the worker wrote
                                           /stderr.log
                                           /error.json    written by the worker, never here
              /attempt_<round>/arrivals                     when which bytes came (runs.logtree)
              /attempt_<round>/filtered_stdout.log        lines that match a duplicate filter,
                              /filtered_stderr.log        prefixed, of all ranks or the tee'd ones

Directories have mode 0700. A file that exists is appended to, never truncated. A file that cannot
be written (full disk, quota) is reported through a callback and tried again with the next bytes; a
line in the file then says how many are missing.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from elaunch.agent.logs.plan import encode
from elaunch.config import Settings
from elaunch.config.checks import NO_FILES
from elaunch.errors import UsageError
from elaunch.runs import statedir
from elaunch.runs.logtree import RESOLUTION_S, Arrival

KEPT_BYTES = 64 * 1024
KEPT_LINES = 500
KEPT_LINE = 8 * 1024
LINE_LIMIT = 16 * 1024 * 1024

Complaint = Callable[[Path, OSError], None]


def own_log_directory(settings: Settings) -> Path | None:
    """Make this run's directory under --log-dir; None without the flag, or for no files at all."""
    if settings.log_dir in (None, NO_FILES):
        return None
    prefix = statedir.file_name(settings.run_id) + "_"
    try:
        os.makedirs(str(settings.log_dir), exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=settings.log_dir)).absolute()
    except OSError as error:
        raise UsageError(
            f"--log-dir {settings.log_dir}: cannot create a directory there: {error.strerror}",
            code="E-LOG-DIR",
        ) from error


def round_directory(log_root: Path, round: int) -> Path:
    """Return the directory of a round's log files."""
    return log_root / f"attempt_{round}"


def make_directories(log_root: Path, round: int, local_ranks: list[int]) -> None:
    """Create a round's directories, mode 0700.

    Raises:
        OSError: one of them cannot be created.
    """
    log_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = round_directory(log_root, round)
    base.mkdir(mode=0o700, exist_ok=True)
    for local_rank in local_ranks:
        (base / str(local_rank)).mkdir(mode=0o700, exist_ok=True)


class LogFile:
    """A file that bytes are appended to, come what may.

    Args:
        path: the file; its directory exists.
        complain: called for a failure to write, at most once until writing works again.
    """

    def __init__(self, path: Path, complain: Complaint) -> None:
        self.path = path
        self._complain = complain
        self.is_whole = True
        self._fd = -1
        self._lost = 0
        self._reason = ""

    def open(self) -> bool:
        """Open the file for appending; a failure is complained of and gives False."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o666)
        except OSError as exc:
            self._complain(self.path, exc)
        return self._fd >= 0

    def write(self, data: bytes) -> None:
        """Append `data`; what cannot be written is counted and complained of."""
        if self._fd < 0:
            return
        if self._lost and not self._resume():
            self._lost += len(data)
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as exc:
            self.is_whole = False
            self._lost, self._reason = len(rest), exc.strerror or str(exc)
            self._complain(self.path, exc)

    def size(self) -> int:
        """Return how long the file is; 0 where it is not open."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def close(self) -> None:
        """Close the file; a gap at its end is marked if there is room again."""
        if self._fd < 0:
            return
        if self._lost:
            self._resume()
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as exc:  # network file systems report a full disk only here
            self._complain(self.path, exc)

    def _resume(self) -> bool:
        mark = f"\n[elaunch: {self._lost} bytes are missing here: {self._reason}]\n".encode()
        try:
            size = os.fstat(self._fd).st_size
            if os.write(self._fd, mark) < len(mark):
                os.ftruncate(self._fd, size)  # only whole marks are ever in a file
                return False
        except OSError:
            return False  # still no room
        self._lost = 0
        return True


class ArrivalNotes:
    """Notes in a file of the round when bytes for the log file of one stream came.

    Args:
        file: shared by the streams of a round.
        of: the log file.
        rank: whose.
        local_rank: of the same.
        stream: ``stdout`` or ``stderr``.
    """

    def __init__(
        self, file: LogFile, of: LogFile, *, rank: int, local_rank: int, stream: str
    ) -> None:
        self._file = file
        self._of = of
        self._whose = (rank, local_rank, stream)
        self._next = 0.0

    def note(self, now: float) -> None:
        """Note that bytes come at ``now`` (monotonic), if the last note is RESOLUTION_S ago."""
        if now >= self._next:
            self._next = now + RESOLUTION_S
            self._file.write(Arrival(time.time(), *self._whose, self._of.size()).line())


class LineFilter:
    """Copies the lines of one stream that contain any of some strings to a file.

    Args:
        file: shared by the streams of a round.
        needles: what to look for; any of them is enough.
        prefix: put before each line copied.
    """

    def __init__(self, file: LogFile, needles: tuple[str, ...], prefix: bytes) -> None:
        self._file = file
        self._needles = tuple(encode(needle) for needle in needles)
        self._prefix = prefix
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Copy the matching lines that are whole by now."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            self._copy(bytes(self._held) + data[:end])
            self._held.clear()
        self._held += data[end:]
        if len(self._held) > LINE_LIMIT:
            self.end()

    def end(self) -> None:
        """Treat what is held as the last line."""
        if self._held:
            self._copy(bytes(self._held))
            self._held.clear()

    def _copy(self, text: bytes) -> None:
        lines = text.replace(b"\r", b"\n").split(b"\n")
        found = [line for line in lines if line and any(n in line for n in self._needles)]
        if found:
            self._file.write(b"".join(self._prefix + line + b"\n" for line in found))


class Tail:
    """The last lines of a stream, bounded in lines and bytes; of a long line only its beginning.

    So the line that names an exception stays where its message is longer than all that is kept.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Keep the end of what was written so far."""
        self._bytes += data
        if len(self._bytes) > 2 * KEPT_BYTES:
            self._bytes = bytearray(_last_lines(bytes(self._bytes)))

    def lines(self, count: int) -> list[str]:
        """Return the last `count` lines (at most `KEPT_LINES`); a progress bar is one line."""
        lines = [_last_state(line) for line in _last_lines(bytes(self._bytes)).split(b"\n")]
        if lines and not lines[-1]:
            lines.pop()
        last = lines[-min(count, KEPT_LINES) :] if count > 0 else []
        return [line.decode(errors="replace") for line in last]


def _last_lines(text: bytes) -> bytes:
    """Return the last whole lines that have KEPT_BYTES together, each shortened to KEPT_LINE."""
    if _has_long_line(text):
        text = b"\n".join(map(_shortened, text.split(b"\n")))
    start = len(text) - KEPT_BYTES
    return text if start <= 0 else text[text.index(b"\n", start - 1) + 1 :]


def _has_long_line(text: bytes) -> bool:
    start = 0
    while len(text) - start > KEPT_LINE:
        end = text.rfind(b"\n", start, start + KEPT_LINE + 1)
        if end < 0:
            return True
        start = end + 1
    return False


def _shortened(line: bytes) -> bytes:
    if len(line) <= KEPT_LINE:
        return line
    drawn_over = b"\r" * line.endswith(b"\r")
    return _last_state(line)[:KEPT_LINE] + drawn_over


def _last_state(line: bytes) -> bytes:
    states = [state for state in line.split(b"\r") if state]
    return states[-1] if states else b""
