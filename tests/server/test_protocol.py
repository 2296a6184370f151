"""Messages over a real socket pair: whole, in order, each with its own files."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from elaunch.server import protocol

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return the two ends."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def pipe_with(text: bytes) -> int:
    """Return the read end of a pipe that holds ``text``."""
    read_end, write_end = os.pipe()
    os.write(write_end, text)
    os.close(write_end)
    return read_end


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    """Small ones and one of a megabyte, which no single read delivers."""
    big: protocol.Message = {"op": "big", "env": {"X": "y" * 1_000_000}}
    messages: list[protocol.Message] = [{"op": "a"}, big, {"op": "c", "n": [1]}]

    def send_all() -> None:
        for each in messages:
            protocol.send(pair[0], each)

    sender = threading.Thread(target=send_all)
    sender.start()
    receiver = protocol.Receiver(pair[1])
    assert [receiver.receive() for _ in messages] == [(each, []) for each in messages]
    sender.join()


def test_each_message_has_its_own_files(pair: Pair) -> None:
    """Also where several are on their way."""
    for number in range(20):
        files = [pipe_with(b"out %d" % number), pipe_with(b"err %d" % number)] * (number % 2)
        protocol.send(pair[0], {"op": "start", "number": number}, files)
        for fd in files:
            os.close(fd)
    receiver = protocol.Receiver(pair[1])
    for number in range(20):
        received = receiver.receive()
        assert received is not None
        message, files = received
        assert message["number"] == number
        texts = [os.read(fd, 100) for fd in files]
        assert texts == [b"out %d" % number, b"err %d" % number] * (number % 2)
        for fd in files:
            os.close(fd)


def test_a_big_message_with_files(pair: Pair) -> None:
    """The files come with the first byte, the rest of the message much later."""
    message = {"op": "start", "env": {str(number): "v" * 1000 for number in range(900)}}
    read_end = pipe_with(b"here")
    sender = threading.Thread(target=protocol.send, args=(pair[0], message, [read_end]))
    sender.start()
    received = protocol.Receiver(pair[1]).receive()
    sender.join()
    assert received is not None and received[0] == message
    (fd,) = received[1]
    assert os.read(fd, 10) == b"here"
    for end in (fd, read_end):
        os.close(end)


def test_bytes_that_are_no_text_survive(pair: Pair) -> None:
    """As paths and variables may hold them."""
    odd = os.fsdecode(b"/tmp/\xff\xfe")
    protocol.send(pair[0], {"op": "start", "args": [odd]})
    assert protocol.Receiver(pair[1]).receive() == ({"op": "start", "args": [odd]}, [])


@pytest.mark.parametrize("sent", [0, 2, 4, 7], ids=["nothing", "half", "length", "part"])
def test_the_end_is_the_end(pair: Pair, sent: int) -> None:
    """The other side is gone, between messages or in the middle of one."""
    whole = bytearray()
    ours, theirs = socket.socketpair()
    protocol.send(ours, {"op": "x"})
    whole += theirs.recv(1000)
    ours.close()
    theirs.close()
    pair[0].sendall(whole[:sent])
    pair[0].close()
    assert protocol.Receiver(pair[1]).receive() is None


def test_a_connection_that_was_reset_is_the_end(pair: Pair) -> None:
    """The other side was killed with something unread."""
    protocol.send(pair[1], {"op": "unread"})
    pair[0].close()
    assert protocol.Receiver(pair[1]).receive() is None
