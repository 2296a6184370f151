"""The progress page: one page of memory in which a worker reports how far it is.

The worker makes it (an anonymous memory file) and sends its descriptor to its agent
(elaunch.wire.worker); from then on a heartbeat is one store into memory: no system call, no thread,
and what was written last can be read also when the worker hangs in C with Python's lock held.

======  ======  =====================================================================
offset  format  field
======  ======  =====================================================================
0       8s      b"elaunchP"
8       Q       beats: heartbeats so far
16      d       beat_at: when the last one was, on this machine's monotonic clock, seconds
24      q       step: the newest steps_completed, -1 before the first
32      d       progress: 0..1, or nan
40      d       section_until: deadline of the section on the monotonic clock; inf: none given
48      Q       version of the texts: odd while one is being written
64      64s     section: its name; empty outside of one
128     256s    doing: the last call of the script API, as in "allgather #3"
384     512s    status: set_status's text
896     d       opened: when the page was made, on the monotonic clock
904     Q       kind: on which of SPENT the time goes now
912     d       since: when that began, on the monotonic clock
920     7d      seconds that went on each of SPENT until then
976     q       first: the steps_completed that were reported first, -1 before
984     Q       how many of the beats calls of ctx.checkpoint have made
======  ======  =====================================================================

Texts are UTF-8, filled up with NUL. One process writes; any process may read. A reader copies the
page and looks at the version before and after; it does not map it, because a worker that cuts its
file short would end an agent that has it mapped.

From the moment that the page is made each second goes on one of SPENT: ``init`` until
elaunch.init() returns, ``first_step`` until the first step is reported, ``train`` after that, but
for what the page's thread spends in checkpoint calls (``load``, ``save``), in other calls of all
ranks (``wait``) and in sections of the script's own (``section``).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from elaunch.wire import forks

SIZE: Final = 4096
MAGIC: Final = b"elaunchP"
LARGEST_STEP: Final = 2**63 - 1
_BEAT: Final = struct.Struct("<Qd")
_STEP: Final = struct.Struct("<q")
_NUMBER: Final = struct.Struct("<d")
_VERSION: Final = struct.Struct("<Q")
_STEP_AT: Final = 24
_PROGRESS_AT: Final = 32
_UNTIL_AT: Final = 40
_VERSION_AT: Final = 48
_SECTION: Final = (64, 64)
_DOING: Final = (128, 256)
_STATUS: Final = (384, 512)
_KIND_AT: Final = 904
_FIRST_AT: Final = 976
_CHECKPOINT_BEATS: Final = struct.Struct("<Q")
_CHECKPOINT_BEATS_AT: Final = 984
_SPENT: Final = struct.Struct("<Qd7d")
_OPENED: Final = struct.Struct("<d")
_WHOLE: Final = struct.Struct("<8sQdqddQ8x64s256s512sdQd7dqQ")
Spent = Literal["init", "first_step", "train", "load", "save", "wait", "section"]
SPENT: Final[tuple[Spent, ...]] = (
    "init",
    "first_step",
    "train",
    "load",
    "save",
    "wait",
    "section",
)
_FROM: Final[frozenset[Spent]] = frozenset({"first_step", "train", "section"})
"""Classes that a call interrupts, which gets the time then. Others go on, whatever they call."""
_TRIES: Final = 20
_SAME_TIME_S: Final = 0.05


class Reading(NamedTuple):
    """One reading of a page; times on this machine's monotonic clock, in seconds.

    ``own_beats`` are those that no call of ctx.checkpoint has made.
    """

    beats: int
    beat_at: float
    step: int | None
    progress: float | None
    section: str
    section_until: float | None
    doing: str
    status: str
    opened: float = 0.0
    kind: Spent = "train"
    since: float = 0.0
    spent: tuple[float, ...] = ()
    first: int | None = None
    own_beats: int = 0


@dataclass(frozen=True, eq=False)
class Section:
    """A section that is open; ``until`` on the monotonic clock, inf without a timeout.

    ``outer`` is what :meth:`ProgressPage.spent_on` takes; ``own``: the script has opened it, and no
    call of ctx.checkpoint.
    """

    name: str
    until: float
    outer: Spent | None = None
    own: bool = True


class ProgressPage:
    """The worker's end of a page; one process writes, its threads may all call.

    Everything that is written is a heartbeat too. After :meth:`close`, and in a process that was
    forked from this one (a DataLoader's, whose reading ahead is no progress), calls go nowhere.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("elaunch-progress", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SIZE)
        self._memory: mmap.mmap | bytearray = mmap.mmap(self.fd, SIZE)
        self._lock = threading.RLock()  # a signal's handler may write while its thread does
        self._beats = self._checkpoint_beats = 0
        self._texts = 0
        self._sections: tuple[Section, ...] = ()
        self._doing = ""
        self._doing_since = 0.0
        self._memory[0:8] = MAGIC
        _STEP.pack_into(self._memory, _STEP_AT, -1)
        _NUMBER.pack_into(self._memory, _PROGRESS_AT, math.nan)
        _NUMBER.pack_into(self._memory, _UNTIL_AT, math.inf)
        _STEP.pack_into(self._memory, _FIRST_AT, -1)
        self._owner = threading.get_ident()
        self._base: Spent = "init"
        self._kind: Spent = "init"
        self._first: int | None = None
        self._spent = dict.fromkeys(SPENT, 0.0)
        self._since = time.monotonic()
        _OPENED.pack_into(self._memory, _KIND_AT - _OPENED.size, self._since)
        self._go_on("init")
        self.beat()
        forks.leave_behind(self)

    def beat(self) -> None:
        """Report that this worker makes progress; half a microsecond, no system call."""
        self._beats += 1
        _BEAT.pack_into(self._memory, 8, self._beats, time.monotonic())
        if self._sections and not self._sections[-1].own:
            self._checkpoint_beats += 1
            _CHECKPOINT_BEATS.pack_into(self._memory, _CHECKPOINT_BEATS_AT, self._checkpoint_beats)

    def note(self, doing: str) -> None:
        """Report what the script asks for now, as in "allgather #3"."""
        self._doing, self._doing_since = doing, time.monotonic()
        self._write(_DOING, doing)
        self.beat()

    def step(self, steps_completed: int) -> None:
        """Report how many steps are completed."""
        bounded = max(-1, min(steps_completed, LARGEST_STEP))
        _STEP.pack_into(self._memory, _STEP_AT, bounded)
        if self._first is None:
            self._first = bounded
            _STEP.pack_into(self._memory, _FIRST_AT, bounded)
            self._change_base("train")
        self.beat()

    def ready(self) -> None:
        """Report that elaunch.init() is done: what comes now leads to the first step."""
        if self._base == "init":
            self._change_base("first_step")

    def spend(self, kind: Spent) -> Spent | None:
        """Have the time go on ``kind`` from now on; return what :meth:`spent_on` takes.

        Nothing changes for a call inside of another one, and in other threads than the page's.
        """
        before = self._kind
        if before not in _FROM or threading.get_ident() != self._owner:
            return None
        self._go_on(kind)
        return before

    def spent_on(self, before: Spent | None) -> None:
        """Have the time go on what it went on before :meth:`spend`."""
        if before is not None:
            self._go_on(before if before == "section" else self._base)

    def progress(self, fraction: float) -> None:
        """Report how much of all is done, 0 to 1."""
        _NUMBER.pack_into(self._memory, _PROGRESS_AT, fraction)
        self.beat()

    def status(self, text: str) -> None:
        """Report in words how it goes; the first 512 bytes are kept."""
        self._write(_STATUS, text)
        self.beat()

    def enter(self, name: str, timeout: float | None, kind: Spent = "section") -> Section:
        """Open a section in which no progress need be seen; return what :meth:`leave` takes.

        Sections nest. An outer one's deadline holds inside of the inner ones too: what a library
        allows itself cannot lengthen what its caller allowed.

        Args:
            name: what is done, as in "eval".
            timeout: seconds that it may take; None if that is unknown.
            kind: what its time goes on.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        section = Section(name, until, self.spend(kind), own=kind == "section")
        with self._lock:
            self._sections = (*self._sections, section)
            self._show_section()
        self.beat()
        return section

    def leave(self, section: Section) -> None:
        """Close a section; those that other threads opened meanwhile stay open."""
        self.beat()
        with self._lock:
            self._sections = tuple(s for s in self._sections if s is not section)
            self._show_section()
        self.spent_on(section.outer)

    def last(self) -> str:
        """Return what the script asked for last and when, for people."""
        now = time.monotonic()
        _, beat_at = _BEAT.unpack_from(self._memory, 8)
        said = f"{self._doing}, {now - self._doing_since:.1f} s ago" if self._doing else "none"
        if self._doing and beat_at - self._doing_since < _SAME_TIME_S:
            return said
        return f"{said} (last heartbeat {now - beat_at:.1f} s ago)"

    def close(self) -> None:
        """Let go of the page; a reader with the descriptor still sees what was last written."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        # Not unmapped by hand: another thread may be about to write. It goes with its last user.
        self._memory = bytearray(self._memory)
        os.close(fd)

    def _change_base(self, kind: Spent) -> None:
        before, self._base = self._base, kind
        if self._kind == before:
            self._go_on(kind)

    def _go_on(self, kind: Spent) -> None:
        """Add up what the time went on so far, and have it go on ``kind``."""
        now = time.monotonic()
        self._spent[self._kind] += now - self._since
        self._kind, self._since = kind, now
        with self._lock:
            self._texts += 2
            _VERSION.pack_into(self._memory, _VERSION_AT, self._texts - 1)
            values = self._spent.values()
            _SPENT.pack_into(self._memory, _KIND_AT, SPENT.index(kind), now, *values)
            _VERSION.pack_into(self._memory, _VERSION_AT, self._texts)

    def _show_section(self) -> None:
        until = min((section.until for section in self._sections), default=math.inf)
        self._write(_SECTION, self._sections[-1].name if self._sections else "", until)

    def _write(self, field: tuple[int, int], text: str, until: float | None = None) -> None:
        start, size = field
        data = _cut(text, size).ljust(size, b"\0")
        with self._lock:
            self._texts += 2
            version = self._texts
            memory = self._memory
            _VERSION.pack_into(memory, _VERSION_AT, version - 1)
            if until is not None:
                _NUMBER.pack_into(memory, _UNTIL_AT, until)
            memory[start : start + size] = data
            _VERSION.pack_into(memory, _VERSION_AT, version)

    def forked(self) -> None:
        """Write to a page of this process's own from now on, which nobody reads."""
        self._memory = bytearray(SIZE)
        self._lock = threading.RLock()  # a thread that is not here may have held it
        forks.leave_behind(self)


class PageReader:
    """The agent's end of a page; owns the descriptor it is given.

    Raises ValueError if the descriptor is no progress page; it is the caller's again then.
    """

    def __init__(self, fd: int) -> None:
        try:
            magic = os.pread(fd, len(MAGIC), 0)
        except OSError as error:
            raise ValueError(f"the descriptor is no progress page: {error}") from error
        if magic != MAGIC:
            raise ValueError(f"the descriptor is no progress page: it begins with {magic!r}")
        self._fd = fd
        self._last: Reading | None = None

    def read(self) -> Reading:
        """Return what the page holds now; a few microseconds, whatever the worker does.

        The texts and the section's deadline are of one moment. If a worker is stopped while it
        writes one, they are those of the reading before.
        """
        for _ in range(_TRIES):
            # The version comes first: the deadline lies before it on the page, and a copy that is
            # held up between the two would have an old deadline and a new version.
            version = os.pread(self._fd, 8, _VERSION_AT)
            copy = os.pread(self._fd, _WHOLE.size, 0).ljust(_WHOLE.size, b"\0")
            after = os.pread(self._fd, 8, _VERSION_AT)
            if version == after and len(version) == 8 and not version[0] & 1:
                self._last = _decode(copy)
                return self._last
        return self._numbers_of(_decode(copy))

    def close(self) -> None:
        """Free the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _numbers_of(self, torn: Reading) -> Reading:
        if self._last is None:
            return torn
        numbers = {key: getattr(torn, key) for key in ("beats", "beat_at", "step", "progress")}
        return self._last._replace(**numbers)


def _cut(text: str, size: int) -> bytes:
    data = text.encode("utf-8", "replace")
    if len(data) <= size:
        return data
    return data[:size].decode("utf-8", "ignore").encode()


def _decode(copy: bytes) -> Reading:
    _, beats, beat_at, step, progress, until, _, *rest = _WHOLE.unpack(copy)
    section, doing, status, opened, kind, since, *spent, first, checkpoint_beats = rest
    return Reading(
        beats=beats,
        beat_at=beat_at,
        step=None if step < 0 else step,
        progress=None if math.isnan(progress) else progress,
        section=_text(section),
        section_until=None if math.isinf(until) else until,
        doing=_text(doing),
        status=_text(status),
        opened=opened,
        kind=SPENT[kind] if kind < len(SPENT) else "train",
        since=since,
        spent=tuple(spent),
        first=None if first < 0 else first,
        own_beats=beats - checkpoint_beats,
    )


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")
