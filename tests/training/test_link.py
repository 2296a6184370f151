"""elaunch.training.channel.link: frames on a connection, and the two ends of one."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.training.channel import link
from elaunch.training.channel.link import (
    PIECE,
    BadFrame,
    Call,
    Contribution,
    Encoded,
    Frame,
    Link,
    Parser,
    encode,
)
from elaunch.training.channel.meeting import RankRecord

CALL = Call("all", 3, "allgather")


def gives(rank: int, data: bytes) -> Contribution:
    """Return what a rank gives to a call, in two parts."""
    return Contribution(rank, "object", len(data), (data[:7], data[7:]))


def entries_frame(*data: bytes) -> Encoded:
    """Return a frame with an entry for each."""
    return encode("up", {"call": CALL}, [gives(rank, each) for rank, each in enumerate(data)])


def joined(*frames: Encoded) -> bytes:
    """Return frames as the bytes that are sent."""
    return b"".join(part for frame in frames for block in frame for part in block)


def contents(frame: Frame) -> list[tuple[int, bytes]]:
    """Return the entries of a frame."""
    return [(entry.rank, bytes(entry.parts[0])) for entry in frame.entries]


@pytest.mark.slow
@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.just(70_000)), max_size=5),
    cuts=st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
def test_frames_come_out_whole_however_the_bytes_are_cut(sizes: list[int], cuts: list[int]) -> None:
    """Several frames, one after the other."""
    data = [bytes([number]) * size for number, size in enumerate(sizes)]
    sent = joined(entries_frame(*data), encode("bye", {}), entries_frame(b"abc"))
    found: list[Frame] = []
    parser = Parser()
    at = 0
    for cut in islice(cycle(cuts), 1000):
        found += parser.feed(sent[at : at + cut])
        at += cut
    found += parser.feed(sent[at:])
    assert [frame.kind for frame in found] == ["up", "bye", "up"]
    assert [contents(found[0]), contents(found[2])] == [list(enumerate(data)), [(0, b"abc")]]
    assert found[0].call == CALL


def test_what_comes_is_writable_and_ones_own() -> None:
    """Arrays lie in it."""
    (frame,) = Parser().feed(joined(entries_frame(b"a" * 100, b"b" * 200_000)))
    first, second = (entry.parts[0] for entry in frame.entries)
    assert isinstance(first, memoryview) and isinstance(second, memoryview)
    first[0], second[0] = 1, 2
    assert first.obj is not second.obj


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        bytes(64),
        b"eln2\xff" + bytes(30),
        link.HEAD.pack(b"eln2", 0, 2) + b"[]",
        link.HEAD.pack(b"eln2", 0, 2) + b"{x",
        link.HEAD.pack(b"eln2", 0, 1 << 30),
        link.HEAD.pack(b"eln2", 2, 100),
        joined(encode("up", {"entries": 5})),
        joined(encode("up", {"entries": [[0, "object", -1]]})),
        joined(encode("up", {"entries": [[0, "object", 1 << 40]]})),
    ],
)
def test_garbage_is_no_frame(garbage: bytes) -> None:
    """It is refused at the head or the text already."""
    with pytest.raises(BadFrame):
        Parser().feed(garbage)


def test_what_is_announced_costs_no_memory_before_it_comes() -> None:
    """A process that is not of the job may announce anything."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    parser, before = Parser(), resident()
    assert parser.feed(joined(encode("up", {"entries": [[0, "object", 1_000_000_000]]}))) == []
    assert resident() - before < 100_000_000


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """The two ends of a connection."""
    both = [
        Link(sock, RankRecord(rank, 0, rank, 2, "h", 7, "m", "", "", False, 0))
        for rank, sock in enumerate(socket.socketpair())
    ]
    yield both[1], both[0]
    for end in both:
        end.close()


def test_a_large_object_goes_through(ends: tuple[Link, Link]) -> None:
    """In pieces that neither end waits for."""
    ours, theirs = ends
    data = [bytes([n]) * size for n, size in enumerate((3 * PIECE + 5, 10, PIECE, 70_000))]
    ours.send(entries_frame(*data))
    while not theirs.inbox:
        ours.ready(ours.mask())
        theirs.ready(theirs.mask())
    assert contents(theirs.inbox[0]) == list(enumerate(data))
    assert not ours.sending


def test_an_abort_does_not_wait_for_the_end_of_a_large_object(ends: tuple[Link, Link]) -> None:
    """It comes after the piece that is under way."""
    ours, theirs = ends
    ours.send(entries_frame(bytes(100 * PIECE)))
    ours.send_last(encode("abort", {"call": CALL, "error": "other", "text": "why", "missing": [4]}))
    polls = 0
    while theirs.end is None:
        ours.ready(ours.mask() & select.POLLOUT)
        theirs.ready(theirs.mask())
        polls += 1
    assert (theirs.end.how, theirs.end.text, theirs.end.missing) == ("abort", "why", (4,))
    assert polls < 100 and not theirs.inbox and not ours.sending


def test_nothing_is_left_to_send_to_a_neighbour_that_has_left(ends: tuple[Link, Link]) -> None:
    """It may be there, and read no more: a rank that fails does not wait for it."""
    ours, theirs = ends
    ours.send(entries_frame(bytes(100 * PIECE)))
    theirs.send_last(encode("bye", {}))
    theirs.hang_up()
    ours.ready(select.POLLIN)
    assert ours.sending and ours.end is not None and ours.end.how == "bye"
    ours.send_last(encode("abort", {"call": CALL, "error": "other", "text": "", "missing": []}))
    assert not ours.sending
