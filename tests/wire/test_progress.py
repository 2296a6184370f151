"""The progress page: what a worker writes is what others read, whatever the worker does."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator

import pytest

from elaunch.wire.progress import PageReader, ProgressPage, Reading
from tests.launching import wait_until

NAMES = [chr(ord("a") + index) * 60 for index in range(16)]


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    """A page, closed at the end."""
    opened = ProgressPage()
    yield opened
    opened.close()


@pytest.fixture
def reader(page: ProgressPage) -> Iterator[PageReader]:
    """The agent's end of ``page``."""
    opened = PageReader(os.dup(page.fd))
    yield opened
    opened.close()


def test_a_new_page_says_nothing_but_that_it_is_alive(reader: PageReader) -> None:
    """No step, no progress, no section: None, and not a number that could be taken for one."""
    reading = reader.read()
    assert (reading.step, reading.progress, reading.section_until) == (None, None, None)
    assert (reading.section, reading.doing, reading.status) == ("", "", "")
    assert 0 <= time.monotonic() - reading.beat_at < 60


def test_what_is_written_is_read(page: ProgressPage, reader: PageReader) -> None:
    """Every field."""
    page.step(120)
    page.progress(0.25)
    page.status("epoch 3")
    page.note("allgather #3")
    page.enter("eval", 900.0)
    reading = reader.read()
    assert (reading.step, reading.progress, reading.status) == (120, 0.25, "epoch 3")
    assert (reading.doing, reading.section) == ("allgather #3", "eval")
    assert reading.section_until is not None
    assert 800 < reading.section_until - time.monotonic() <= 900


@pytest.mark.parametrize(
    "call",
    [
        lambda page: page.beat(),
        lambda page: page.note("barrier #1"),
        lambda page: page.step(1),
        lambda page: page.progress(0.5),
        lambda page: page.status("fine"),
        lambda page: page.enter("eval", None),
    ],
    ids=["beat", "note", "step", "progress", "status", "enter"],
)
def test_every_call_is_a_heartbeat(call, page: ProgressPage, reader: PageReader) -> None:
    """It moves both the count and the time."""
    before = reader.read()
    call(page)
    after = reader.read()
    assert after.beats > before.beats
    assert after.beat_at > before.beat_at


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("é" * 300, "é" * 256),
        ("x" + "é" * 300, "x" + "é" * 255),
        ("a\0b", "a"),
        ("\ud800", "?"),
        ("", ""),
    ],
    ids=["too long", "cut within a character", "with NUL", "no UTF-8", "empty"],
)
def test_any_text_can_be_a_status(
    text: str, read: str, page: ProgressPage, reader: PageReader
) -> None:
    """It is cut at a character's border; nothing is raised."""
    page.status(text)
    assert reader.read().status == read


@pytest.mark.parametrize(
    ("step", "read"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**80, 2**63 - 1), (-5, None)]
)
def test_any_step_can_be_written(
    step: int, read: int | None, page: ProgressPage, reader: PageReader
) -> None:
    """What the field cannot hold is bounded."""
    page.step(step)
    assert reader.read().step == read


def test_sections_nest(page: ProgressPage, reader: PageReader) -> None:
    """The newest is shown, with the nearest of all deadlines; leaving shows the outer one again."""
    outer = page.enter("epoch", 100.0)
    inner = page.enter("eval", 5000.0)
    reading = reader.read()
    assert reading.section == "eval"
    assert reading.section_until == outer.until
    page.leave(inner)
    assert reader.read().section == "epoch"
    page.leave(outer)
    assert (reader.read().section, reader.read().section_until) == ("", None)


def test_an_inner_section_may_have_the_nearer_deadline(
    page: ProgressPage, reader: PageReader
) -> None:
    """And then the outer one's is back."""
    outer = page.enter("epoch", None)
    inner = page.enter("eval", 7.0)
    assert reader.read().section_until == inner.until
    page.leave(inner)
    assert reader.read().section_until is None
    page.leave(outer)


def test_sections_of_two_threads_end_in_any_order(page: ProgressPage, reader: PageReader) -> None:
    """Leaving the outer one first does not bring it back when the other is left."""
    one = page.enter("saving", 50.0)
    other = page.enter("eval", 60.0)
    page.leave(one)
    assert reader.read().section == "eval"
    page.leave(other)
    assert reader.read().section == ""


WRITE_FOREVER = """
import socket, sys
from elaunch.wire.progress import ProgressPage
page = ProgressPage()
agent = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(agent, [b"x"], [page.fd])
while True:
    for index in range(16):
        name = chr(ord("a") + index) * 60
        page.note(name)
        page.leave(page.enter(name, 10_000.0 * (index + 1)))
"""


@pytest.fixture
def worker() -> Iterator[tuple[subprocess.Popen[bytes], PageReader]]:
    """A process that writes sections and texts as fast as it can, and its page."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOREVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        try:
            ours.settimeout(60)
            _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
            reader = PageReader(fd)
            # A first reading may be torn, on a machine that stops the worker meanwhile.
            wait_until(lambda: reader.read().doing != "" and reader._last is not None, 60)
            yield process, reader
            reader.close()
        finally:
            process.kill()
            process.wait(60)


def whole(reading: Reading, now: float) -> bool:
    """Return whether the texts are the worker's, and the deadline is that of the section."""
    if reading.section_until is None:
        return reading.section == "" and reading.doing in NAMES
    index = round((reading.section_until - now) / 10_000) - 1
    return reading.section == NAMES[index] and reading.doing in NAMES


def test_a_copy_that_is_held_up_before_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline was copied, the worker opens a section, then the rest is copied."""
    page, pread = ProgressPage(), os.pread
    reader = PageReader(os.dup(page.fd))

    def held_up(fd: int, size: int, offset: int) -> bytes:
        if size <= 48 or not page.last().startswith("none"):
            return pread(fd, size, offset)
        early = pread(fd, 48, offset)
        page.note("evaluate")
        page.enter("eval", 60.0)
        return early + pread(fd, size - 48, offset + 48)

    monkeypatch.setattr(os, "pread", held_up)
    reading = reader.read()
    assert reading.section == "eval"
    assert reading.section_until == pytest.approx(time.monotonic() + 60.0, abs=30.0)
    reader.close()
    page.close()


@pytest.mark.slow
def test_a_section_is_never_read_with_anothers_deadline(
    worker: tuple[subprocess.Popen[bytes], PageReader],
) -> None:
    """Each reading is of one moment, while the worker writes on another core."""
    _, reader = worker
    seen = [(reader.read(), time.monotonic()) for _ in range(50_000)]
    assert len({reading.section for reading, _ in seen}) > 2
    assert [pair for pair in seen if not whole(*pair)] == []


def test_a_reading_is_whole_when_the_worker_is_stopped_or_killed_anywhere(
    worker: tuple[subprocess.Popen[bytes], PageReader],
) -> None:
    """Also in the middle of writing: the texts of the reading before are the answer then."""
    process, reader = worker
    for _ in range(300):
        process.send_signal(signal.SIGSTOP)
        assert whole(reader.read(), time.monotonic())
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(60)
    assert whole(reader.read(), time.monotonic())


def test_a_closed_page_takes_calls_and_keeps_what_it_said(
    page: ProgressPage, reader: PageReader
) -> None:
    """Closing twice is fine, and so is a thread that still beats."""
    page.note("barrier #9")
    page.close()
    page.close()
    before = reader.read()
    page.beat()
    page.note("after")
    page.leave(page.enter("eval", 1.0))
    assert reader.read() == before
    assert before.doing == "barrier #9"


def test_a_fork_does_not_write_on_its_parents_page(page: ProgressPage, reader: PageReader) -> None:
    """A DataLoader's process that reads ahead is no progress of the rank."""
    page.note("barrier #1")
    before = reader.read()
    pid = os.fork()
    if pid == 0:
        page.note("from the fork")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert reader.read() == before
    page.note("barrier #2")
    assert reader.read().doing == "barrier #2"


def test_last_tells_what_was_asked_for_and_when(page: ProgressPage) -> None:
    """For the errors of others; heartbeats are told of when they came after it."""
    assert re.fullmatch(r"none \(last heartbeat \d+\.\d s ago\)", page.last())
    page.note("allgather #3")
    assert re.match(r"allgather #3, \d+\.\d s ago", page.last())
    time.sleep(0.1)
    page.beat()
    assert re.fullmatch(
        r"allgather #3, \d+\.\d s ago \(last heartbeat \d+\.\d s ago\)", page.last()
    )
    page.close()
    assert page.last().startswith("allgather #3, ")


@pytest.mark.parametrize("kind", ["file", "pipe", "short"])
def test_a_descriptor_that_is_no_page_is_refused(kind: str, tmp_path) -> None:
    """With a reason, and without closing it."""
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        path = tmp_path / "file"
        path.write_bytes(b"x" * (4096 if kind == "file" else 3))
        fd = os.open(path, os.O_RDONLY)
    with pytest.raises(ValueError, match="no progress page"):
        PageReader(fd)
    os.close(fd)


def test_a_page_that_was_cut_short_ends_no_reader(page: ProgressPage, reader: PageReader) -> None:
    """A map of it would: SIGBUS."""
    page.note("barrier #1")
    os.ftruncate(page.fd, 0)
    assert reader.read().doing == ""
    os.ftruncate(page.fd, 4096)


def test_a_heartbeat_costs_next_to_nothing(page: ProgressPage) -> None:
    """0.15 µs when this was written, by this thread's own clock, and a note 0.9 µs."""
    beats = timeit.repeat(page.beat, timer=time.thread_time, number=20_000, repeat=20)
    notes = timeit.repeat(
        lambda: page.note("allgather #3"), timer=time.thread_time, number=5_000, repeat=20
    )
    assert min(beats) / 20_000 < 1.5e-6
    assert min(notes) / 5_000 < 10e-6
