"""elaunch.training.channel.frames and handshake: bytes on a connection."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.training.channel.frames import (
    BadFrame,
    Call,
    Contribution,
    Frame,
    Parser,
    encode,
    encode_entries,
)
from elaunch.wire.handshake import (
    HELLO,
    LINK,
    Answering,
    Caller,
    Unauthenticated,
    call_up,
    session_key,
)

CALL = Call("all", 3, "allgather")


@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.just(70_000)), max_size=5),
    cuts=st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
def test_frames_come_out_whole_however_the_bytes_are_cut(sizes: list[int], cuts: list[int]) -> None:
    """Several frames, one after the other."""
    data = [bytes([number]) * size for number, size in enumerate(sizes)]
    frames = [
        encode_entries(
            "up", CALL, [Contribution(n, "inline", len(d), d) for n, d in enumerate(data)]
        ),
        encode("bye", {}),
        encode_entries("down", CALL, [Contribution(9, "inline", 3, b"abc")]),
    ]
    stream = b"".join(part for frame in frames for part in frame.parts)
    found: list[Frame] = []
    parser = Parser(found.append)
    at = 0
    for cut in cuts * (len(stream) // sum(cuts) + 1):
        parser.feed(stream[at : at + cut])
        at += cut
    assert [frame.kind for frame in found] == ["up", "bye", "down"]
    assert [bytes(entry.data) for entry in found[0].entries()] == data
    assert [(e.rank, bytes(e.data)) for e in found[2].entries()] == [(9, b"abc")]
    assert found[0].call == CALL


def test_a_frame_waits_for_its_descriptors() -> None:
    """They are counted in its head."""
    entries = [
        Contribution(0, "blob", 7, fd=40),
        Contribution(1, "inline", 1, b"x"),
        Contribution(2, "blob", 8, fd=41, offset=4096),
    ]
    frame = encode_entries("up", CALL, [*entries, Contribution(3, "blob", 9, fd=40)], with_fds=True)
    assert frame.fds == (40, 41)
    found: list[Frame] = []
    parser = Parser(found.append)
    parser.fds = [50]
    parser.feed(b"".join(frame.parts))
    assert not found
    parser.fds.append(51)
    parser.feed(b"")
    rows = [(e.rank, e.form, e.size, e.fd, e.offset) for e in found[0].entries()]
    assert rows == [
        (0, "blob", 7, 50, 0),
        (1, "inline", 1, -1, 0),
        (2, "blob", 8, 51, 4096),
        (3, "blob", 9, 50, 0),
    ]


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n", bytes(64), b"eln1\xff" + bytes(30)]
)
def test_garbage_is_no_frame(garbage: bytes) -> None:
    """It is said at the head already."""
    with pytest.raises(BadFrame):
        Parser(lambda _: None).feed(garbage)


def shake(listening: Answering, key: bytes, rank: int) -> None:
    """Do a handshake over a pair of sockets: raises what either side raises."""
    ours, theirs = socket.socketpair()
    problems: list[BaseException] = []

    def answer() -> None:
        with theirs:
            try:
                while listening.caller is None:
                    data = theirs.recv(listening.wanted)
                    if not data:
                        return
                    if reply := listening.feed(data):
                        theirs.sendall(reply)
            except Unauthenticated as error:
                problems.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with ours:
            call_up(ours, key, rank, Caller(LINK, 5), time.monotonic() + 30)
    finally:
        thread.join(30)
    if problems:
        raise problems[0]


def test_two_that_know_the_key_learn_who_the_other_is() -> None:
    """And what it wants."""
    listening = Answering(b"key", 2)
    shake(listening, b"key", 2)
    assert listening.caller == (LINK, 5)


@pytest.mark.parametrize(("key", "rank"), [(b"other", 2), (b"key", 3)])
def test_who_calls_notices_another_job_or_another_rank(key: bytes, rank: int) -> None:
    """Before it has proved anything itself."""
    listening = Answering(key, rank)
    with pytest.raises(Unauthenticated):
        shake(listening, b"key", 2)
    assert listening.caller is None


def test_who_listens_believes_no_proof_that_is_not_one() -> None:
    """An echo of its own words, or another's, is none."""
    for closing in (os.urandom(40), b"\0" * 40):
        listening = Answering(b"key", 2)
        reply = listening.feed(HELLO + bytes(32))
        assert len(reply) == listening.wanted + 24 == 64
        with pytest.raises(Unauthenticated):
            listening.feed(closing)
        assert listening.caller is None
    with pytest.raises(Unauthenticated):
        Answering(b"key", 2).feed(b"\x80\x05cos\nsystem\n")


def test_contexts_have_keys_of_their_own() -> None:
    """A process of the round before cannot get in."""
    assert session_key(b"secret", "elaunch/job/0/0/") != session_key(b"secret", "elaunch/job/1/0/")
