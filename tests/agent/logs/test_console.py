"""Whole lines on a console: what is shown when, who owns a line, and every kind of descriptor."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.agent.logs import console as console_module
from elaunch.agent.logs.console import (
    BULK,
    BULK_SILENCE,
    PARTIAL_AGE,
    Console,
    LineWriter,
    open_consoles,
    write_directly,
)
from tests.agent.logrig import eventually


class Screen:
    """A console that is a file, and what is on it."""

    def __init__(self, path: Path, *, terminal: bool = False) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.console = Console("stdout", os.dup(self.fd), terminal=terminal, polled=False)

    def shown(self) -> bytes:
        """Return everything shown so far."""
        self.console.flush()
        return os.pread(self.fd, 1 << 26, 0)

    def close(self) -> None:
        """Close both descriptors."""
        self.console.close()
        os.close(self.fd)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    """Give a console that is a file."""
    made = Screen(tmp_path / "screen")
    yield made
    made.close()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Screen]:
    """Give a console that behaves as on a terminal."""
    made = Screen(tmp_path / "screen", terminal=True)
    yield made
    made.close()


def test_a_partial_line_is_held_until_its_deadline(screen: Screen) -> None:
    """Its age counts from its first byte; a long one's from its last."""
    writer = LineWriter(screen.console, 0)
    writer.feed(b"whole\npart", 10.0)
    writer.feed(b"ial", 10.1)
    assert screen.shown() == b"whole\n"
    assert writer.deadline() == 10.0 + PARTIAL_AGE
    writer.feed(b"x" * BULK, 10.15)
    assert writer.deadline() == 10.15 + BULK_SILENCE
    writer.show_held()
    assert writer.deadline() is None
    assert screen.shown() == b"whole\npartial" + b"x" * BULK


def test_a_stream_that_was_not_read_for_a_while_gets_its_time_anew(screen: Screen) -> None:
    """It had no chance to end its line."""
    writer = LineWriter(screen.console, 0)
    writer.feed(b"part", 10.0)
    writer.wait_anew(20.0)
    assert writer.deadline() == 20.0 + PARTIAL_AGE


def test_a_line_longer_than_the_limit_is_shown_in_pieces(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And still nobody writes into it."""
    monkeypatch.setattr(console_module, "HELD_LIMIT", 100)
    first, second = LineWriter(screen.console, 0), LineWriter(screen.console, 1)
    first.feed(b"a" * 101, 0.0)
    second.feed(b"b\n", 0.0)
    first.feed(b"a\n", 0.0)
    assert screen.shown() == b"a" * 101 + b"\nb\na\n"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\r", b"\nb"], b"a\r\n"),
        ([b"1%\r", b"2%\r", b"3%\r"], b"1%\r2%\r"),
        ([b"\r1%", b"\r2%", b"\n"], b"\r1%\r2%\n"),
        ([b"\r", b"\r", b"x"], b"\r\r"),
        ([b"\n\n"], b"\n\n"),
    ],
)
def test_what_ends_a_line(screen: Screen, pieces: list[bytes], expected: bytes) -> None:
    r"""A ``\r`` at the very end may be the first half of ``\r\n``."""
    writer = LineWriter(screen.console, 0)
    for piece in pieces:
        writer.feed(piece, 0.0)
    assert screen.shown() == expected


def test_an_interrupted_line_ends_once(screen: Screen) -> None:
    """The newline that was put in its middle stands for its own."""
    first, second = (LineWriter(screen.console, rank, prefix=b"%d:" % rank) for rank in (0, 1))
    first.feed(b"a", 0.0)
    first.show_held()
    second.feed(b"b\n", 0.0)
    first.feed(b"\n", 0.0)
    first.feed(b"c", 0.0)
    first.show_held()
    second.feed(b"d\n", 0.0)
    first.feed(b"ontinued\n", 0.0)
    assert screen.shown() == b"0:a\n1:b\n0:c\n1:d\n0:ontinued\n"


def test_bars_take_turns_on_a_terminal(terminal: Screen) -> None:
    """They overwrite one another there, as without a launcher; a prompt is not overwritten."""
    first, second = (LineWriter(terminal.console, rank, eager=True) for rank in (0, 1))
    first.feed(b"\ra 1%", 0.0)
    second.feed(b"\rb 1%", 0.0)
    first.feed(b"\ra 2%", 0.0)
    second.feed(b"line\n", 0.0)
    first.feed(b"sure? ", 0.0)
    second.feed(b"\rb 2%", 0.0)
    assert terminal.shown() == b"\ra 1%\r\rb 1%\r\ra 2%\nline\nsure? \n\rb 2%"


def test_a_worker_that_cleared_its_bar_prints_in_its_place(screen: Screen) -> None:
    """As tqdm.write does: clear on stderr, then a line on stdout."""
    out, err = (LineWriter(screen.console, 0, eager=True) for _ in (1, 2))
    err.feed(b"\r50%", 0.0)
    err.feed(b"\r   \r", 0.0)
    out.feed(b"note\n", 0.0)
    err.feed(b"\r51%", 0.0)
    out.feed(b"over it\n", 0.0)
    assert screen.shown() == b"\r50%\r   \rnote\n\r51%\nover it\n"


PIECES = st.lists(
    st.tuples(st.integers(0, 2), st.text("x\r\n", max_size=6), st.booleans()), max_size=60
)


@pytest.mark.slow
@given(pieces=PIECES, eager=st.booleans(), is_terminal=st.booleans(), prefix=st.booleans())
def test_no_line_mixes_two_workers_and_nothing_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[int, str, bool]],
    eager: bool,
    is_terminal: bool,
    prefix: bool,
) -> None:
    r"""Whatever the pieces; on a terminal a line ends at ``\r`` too."""
    made = Screen(tmp_path_factory.mktemp("random") / "screen", terminal=is_terminal)
    names = (b"abc", b"ABC")
    speakers = [
        LineWriter(made.console, rank, eager=eager, prefix=names[1][rank : rank + 1] * prefix)
        for rank in range(3)
    ]
    try:
        for rank, text, show in pieces:
            data = text.encode().replace(b"x", names[0][rank : rank + 1])
            if data:
                speakers[rank].feed(data, 0.0)
            if show:
                speakers[rank].show_held()
        for writer in speakers:
            writer.show_held()
        shown = made.shown()
    finally:
        made.close()
    lines = (shown.replace(b"\r", b"\n") if is_terminal else shown).split(b"\n")
    for line in lines:
        assert len(set(line.strip(b"\r").lower())) - (b"\r" in line.strip(b"\r")) <= 1
        assert not prefix or line.strip(b"\r")[:1] in b"ABC"
    for rank in range(3):
        written = sum(text.count("x") for who, text, _ in pieces if who == rank)
        assert shown.count(names[0][rank : rank + 1]) == written


def test_consoles_that_are_the_same_are_one(tmp_path: Path) -> None:
    """Two descriptors of one file, and two files."""
    first, second = (os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in "ab")
    out, err = open_consoles(first, os.dup(first))
    assert out is err
    out.close()
    out, err = open_consoles(first, second)
    assert out is not err
    assert (out.name, err.name) == ("stdout", "stderr")
    out.close()
    err.close()


def test_the_inherited_descriptor_is_left_as_it_is() -> None:
    """Others share its flags; a full pipe still does not block."""
    read_end, write_end = os.pipe()
    out, err = open_consoles(write_end, write_end)
    assert os.get_blocking(write_end)
    out.write(b"x" * 1_000_000)
    out.flush()
    assert 0 < out.pending < 1_000_000
    assert err is out
    out.close()
    os.close(read_end)
    os.close(write_end)


@pytest.mark.slow
def test_a_socket_that_blocks() -> None:
    """It cannot be opened anew, so it is asked before each write."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        out, _ = open_consoles(ours.fileno(), ours.fileno())
        out.write(b"x" * 3_000_000)
        out.flush()
        assert 0 < out.pending < 3_000_000
        received = 0

        def drained() -> bool:
            nonlocal received
            try:
                received += len(theirs.recv(1 << 20))
            except BlockingIOError:
                out.flush()
            return received == 3_000_000

        eventually(drained)
        assert out.pending == 0
        out.close()


def test_a_regular_file_keeps_its_shared_offset(tmp_path: Path) -> None:
    """As in ``(elaunch run …; echo done) > file``."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    out, _ = open_consoles(fd, fd)
    out.write(b"first\n")
    out.flush()
    out.close()
    write_directly(fd, b"second\n")
    assert os.pread(fd, 100, 0) == b"first\nsecond\n"
    os.close(fd)


def test_a_full_disk_under_the_console() -> None:
    """What does not fit is dropped and the reason kept; the next bytes are tried again."""
    fd = os.open("/dev/full", os.O_WRONLY)
    out, _ = open_consoles(fd, fd)
    out.write(b"lost\n")
    out.flush()
    assert out.fault is not None
    assert out.fault.strerror == "No space left on device"
    assert not out.gone
    assert out.pending == 0
    out.close()
    os.close(fd)


def test_a_reader_that_goes_away() -> None:
    """The console swallows everything from then on."""
    read_end, write_end = os.pipe()
    out, _ = open_consoles(write_end, write_end)
    os.close(read_end)
    out.write(b"lost\n")
    out.flush()
    assert out.gone
    out.write(b"lost\n")
    assert out.pending == 0
    writer = LineWriter(out, 0)
    writer.feed(b"held?", 0.0)
    assert writer.deadline() is None
    out.close()
    write_directly(write_end, b"lost\n")
    os.close(write_end)
