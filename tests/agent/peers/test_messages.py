"""Bytes between agents: what comes out is what went in, or an error; memory stays bounded."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elaunch.agent.peers.messages import CHUNK, PeerConnection, Undelivered


@contextmanager
def lines(patience: float = 20.0) -> Iterator[tuple[PeerConnection, PeerConnection, socket.socket]]:
    """Yield both ends of a line, and the socket of the first."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        here = socket.create_connection(door.getsockname())
        there, _ = door.accept()
    with (
        PeerConnection(here, "here", patience) as one,
        PeerConnection(there, "there", patience) as other,
    ):
        yield one, other, here


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_bytes_come_as_they_were(size: int) -> None:
    """Whatever the size, in pieces of any size; lines before and after them stay lines."""
    data = os.urandom(size)
    pieces = [data[: size // 3], b"", memoryview(data)[size // 3 :]]
    with lines() as (here, there, _):

        def send() -> None:
            here.send({"ok": 1})
            here.send_bytes(pieces)
            here.send({"ok": 2})

        thread = threading.Thread(target=send)
        thread.start()
        taken = memoryview(bytearray(size))
        assert there.receive() == {"ok": 1}
        there.receive_into(taken, lambda _: None)
        assert there.receive() == {"ok": 2}
        thread.join(20)
        assert bytes(taken) == data


def test_what_was_changed_on_the_way_is_refused() -> None:
    """One bit."""
    with lines() as (_, there, sock):
        body = bytearray(os.urandom(100))
        with lines() as (honest, reader, _):
            honest.send_bytes([bytes(body)])
            honest.close()
            sent = bytearray(reader._reader.read())
        sent[50] ^= 4
        sock.sendall(sent)
        with pytest.raises(Undelivered, match="changed on the way"):
            there.receive_into(memoryview(bytearray(100)), lambda _: None)


@pytest.mark.parametrize(("sent", "room", "says"), [(9, 10, "9 of 10"), (11, 10, "more than")])
def test_a_size_that_does_not_fit_is_refused(sent: int, room: int, says: str) -> None:
    """Nothing is written beyond the room."""
    with lines() as (here, there, _):
        here.send_bytes([b"x" * sent])
        with pytest.raises(Undelivered, match=says):
            there.receive_into(memoryview(bytearray(room)), lambda _: None)
        with lines() as (again, other, _):
            again.send_bytes([b"x" * sent])
            with pytest.raises(Undelivered, match=says):
                other.receive_to(io.BytesIO().write, room, lambda _: None)


def test_a_sender_that_cannot_read_says_why_and_goes_on() -> None:
    """The line lives on: the next file may be whole."""

    def pieces() -> Iterator[bytes]:
        yield b"begun"
        raise OSError(5, "Input/output error")

    with lines() as (here, there, _):
        with pytest.raises(OSError, match="Input/output error"):
            here.send_bytes(pieces())
        here.send({"ok": True})
        with pytest.raises(Undelivered, match="there: Input/output error") as caught:
            there.receive_into(memoryview(bytearray(100)), lambda _: None)
        assert not caught.value.gone
        assert there.receive() == {"ok": True}


@pytest.mark.parametrize("sent", [b"\xff" * 3, b"[1]\n", b'{"a":\n', b"no end"])
def test_what_is_no_line_ends_the_connection(sent: bytes) -> None:
    """Its other end is no agent, or was cut off."""
    with lines() as (here, there, sock):
        sock.sendall(sent)
        here.close()
        with pytest.raises(Undelivered, match="broke off") as caught:
            there.receive()
        assert caught.value.gone


def test_silence_is_not_waited_for_for_ever() -> None:
    """It is slow, not gone."""
    with lines(patience=0.2) as (_, there, __):
        with pytest.raises(Undelivered, match=r"does not answer for 0\.2 s") as caught:
            there.receive()
        assert not caught.value.gone


def test_less_patience_counts_from_then_on() -> None:
    """For what is sent, too: a side that has stopped takes nothing after its buffers are full."""
    with lines(patience=600.0) as (one, other, _):
        one.patience = other.patience = 0.2
        begun = time.monotonic()
        with pytest.raises(Undelivered, match=r"does not answer for 0\.2 s"):
            one.receive()
        with pytest.raises(Undelivered, match=r"does not answer for 0\.2 s"):
            other.send_bytes(iter([bytes(1 << 26)]))
        assert time.monotonic() - begun < 300.0


def test_a_large_file_needs_little_memory() -> None:
    """Some frames, whatever the size."""
    size = 24 * CHUNK
    piece = memoryview(bytes(CHUNK))
    with lines() as (here, there, _), open(os.devnull, "wb") as sink:
        tracemalloc.start()
        try:
            pieces = (piece for _ in range(size // CHUNK))
            thread = threading.Thread(target=here.send_bytes, args=(pieces,))
            thread.start()
            there.receive_to(sink.write, size, lambda _: None)
            thread.join(20)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 3 * CHUNK


def test_busy_lines_are_few() -> None:
    """A call for each piece of a file is one line per second, and counts up."""
    with lines() as (here, there, _):
        for _ in range(1000):
            here.busy(5)
        here.send({"ok": True})
        said = []
        while (line := there.receive()) != {"ok": True}:
            said.append(json.dumps(line))
        assert 1 <= len(said) < 20
