"""Messages over a real socket pair: whole, in order, each with its own descriptors, or none."""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elaunch.wire.local import BadMessage, LocalChannel, Message, close_files, connect, listen
from tests.launching import wait_until

LONG = 60.0
Pair = tuple[LocalChannel, LocalChannel]


def descriptors() -> set[str]:
    """Return the descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", autouse=True)
def uncollected() -> Iterator[None]:
    """Have what earlier tests left closed before descriptors are counted, and not meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return the two ends; they keep no descriptor beyond their own."""
    before = len(descriptors())
    one, other = socket.socketpair()
    ends = LocalChannel(one, most_files=2), LocalChannel(other, most_files=2)
    yield ends
    for end in ends:
        end.close()
    assert len(descriptors()) == before


@pytest.fixture
def stranger() -> Iterator[tuple[socket.socket, LocalChannel]]:
    """Return a socket on which anything can be sent, and the channel that gets it."""
    one, other = socket.socketpair()
    one.settimeout(LONG)
    channel = LocalChannel(other, longest=1000, most_files=2)
    yield one, channel
    one.close()
    channel.close()


def pipe_with(text: bytes) -> int:
    """Return the read end of a pipe that holds ``text``."""
    read_end, write_end = os.pipe()
    os.write(write_end, text)
    os.close(write_end)
    return read_end


def send_with(sock: socket.socket, data: bytes, files: list[int]) -> None:
    """Send bytes with descriptors beside them."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    assert sock.sendmsg([data], rights) == len(data)


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    """Small ones and one of a megabyte, which no single read delivers."""
    big: Message = {"op": "big", "env": {"X": "y" * 1_000_000}}
    messages: list[Message] = [{"op": "a"}, big, {"op": "c", "n": [1]}]

    def send_all() -> None:
        for each in messages:
            pair[0].send(each)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [pair[1].receive() for _ in messages] == [(each, []) for each in messages]
    sender.join()


def test_each_message_has_its_own_files(pair: Pair) -> None:
    """Also where several are on their way, with and without, and read in one go."""
    for number in range(20):
        kinds = (b"out", b"err") if number % 2 else ()
        files = [pipe_with(b"%s %d" % (kind, number)) for kind in kinds]
        pair[0].send({"op": "start", "number": number}, files)
        close_files(files)
    for number in range(20):
        received = pair[1].receive()
        assert received is not None
        message, files = received
        assert message == {"op": "start", "number": number}
        texts = [os.read(fd, 100) for fd in files]
        assert texts == [b"out %d" % number, b"err %d" % number] * (number % 2)
        close_files(files)


def test_descriptors_are_inherited_by_nobody(pair: Pair) -> None:
    """A process that another thread starts just then does not get them."""
    read_end = pipe_with(b"x")
    os.set_inheritable(read_end, True)
    pair[0].send({"op": "start"}, [read_end])
    received = pair[1].receive()
    assert received is not None
    assert [os.get_inheritable(fd) for fd in received[1]] == [False]
    close_files([read_end, *received[1]])


def test_a_big_message_with_files(pair: Pair) -> None:
    """The files come with the first byte, the rest of the message much later."""
    message = {"op": "start", "env": {str(number): "v" * 1000 for number in range(900)}}
    read_end = pipe_with(b"here")
    sender = threading.Thread(target=pair[0].send, args=(message, [read_end]))
    sender.start()
    received = pair[1].receive()
    sender.join()
    assert received is not None and received[0] == message
    (fd,) = received[1]
    assert os.read(fd, 10) == b"here"
    close_files([fd, read_end])


def test_bytes_that_are_no_text_survive(pair: Pair) -> None:
    """As paths and variables may hold them."""
    odd = os.fsdecode(b"/tmp/\xff\xfe\n")
    pair[0].send({"op": "start", "args": [odd]})
    assert pair[1].receive() == ({"op": "start", "args": [odd]}, [])


def test_many_threads_send(pair: Pair) -> None:
    """No message gets into another."""

    def send(number: int) -> None:
        for _ in range(50):
            pair[0].send({"number": number, "text": "x" * 10_000})

    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for sender in senders:
        sender.start()
    numbers = []
    for _ in range(200):
        received = pair[1].receive(time.monotonic() + LONG)
        assert received is not None
        numbers.append(received[0]["number"])
    assert sorted(numbers) == sorted([0, 1, 2, 3] * 50)
    for sender in senders:
        sender.join(LONG)


@pytest.mark.parametrize("sent", [0, 2, 9], ids=["nothing", "a part", "all but the newline"])
def test_the_end_is_the_end(stranger: tuple[socket.socket, LocalChannel], sent: int) -> None:
    """The other side is gone, between messages or in the middle of one."""
    stranger[0].sendall(b'{"op":"x"}'[:sent])
    stranger[0].close()
    assert stranger[1].receive() is None
    with pytest.raises(EOFError):
        list(stranger[1].drain())


def test_a_connection_that_was_reset_is_the_end(pair: Pair) -> None:
    """The other side was killed with something unread."""
    pair[1].send({"op": "unread"})
    pair[0].close()
    assert pair[1].receive() is None


def test_what_came_before_the_end_is_read(pair: Pair) -> None:
    """All of it, by ``drain``, which does not wait."""
    assert list(pair[1].drain()) == []
    for number in range(3):
        pair[0].send({"number": number})
    pair[0].close()
    messages, ended = [], False
    while not ended:
        try:
            for message, _ in pair[1].drain():
                messages.append(message["number"])
        except EOFError:
            ended = True
    assert messages == [0, 1, 2]


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[1]", b'"status"', b"\xff\xfe{", b"[" * 900, b'{"fds": 1}', b'{"fds":[]}']
)
def test_what_is_no_message(stranger: tuple[socket.socket, LocalChannel], line: bytes) -> None:
    """Nothing that follows it is taken for one."""
    stranger[0].sendall(line + b"\n")
    with pytest.raises(BadMessage):
        stranger[1].receive(time.monotonic() + LONG)


def test_a_message_that_is_too_long(stranger: tuple[socket.socket, LocalChannel]) -> None:
    """It is refused before it is whole."""
    stranger[0].sendall(b"x" * 1500)
    with pytest.raises(BadMessage, match="longer than 1000 bytes"):
        stranger[1].receive(time.monotonic() + LONG)


@pytest.mark.parametrize(("line", "count"), [(b'{"fds": 1}\n', 2), (b"{}\n", 1), (b"{}\n", 100)])
def test_descriptors_that_no_message_names(
    stranger: tuple[socket.socket, LocalChannel], line: bytes, count: int
) -> None:
    """They are closed."""
    before = len(descriptors())
    files = [os.dup(0) for _ in range(count)]
    send_with(stranger[0], line, files)
    close_files(files)
    with pytest.raises(BadMessage):
        stranger[1].receive(time.monotonic() + LONG)
    stranger[1].close()
    assert len(descriptors()) == before - 1  # the channel's own


def test_descriptors_without_end(stranger: tuple[socket.socket, LocalChannel]) -> None:
    """One for each byte of a message that never is whole: they do not pile up."""
    before = len(descriptors())
    file = os.dup(0)
    with pytest.raises(BadMessage, match="more than 2 descriptors"):
        for _ in range(10):
            send_with(stranger[0], b" ", [file])
            with pytest.raises(TimeoutError):
                stranger[1].receive(time.monotonic())
    os.close(file)
    assert len(descriptors()) <= before + 3
    stranger[1].close()
    assert len(descriptors()) == before - 1


def test_a_deadline_to_receive(stranger: tuple[socket.socket, LocalChannel]) -> None:
    """Half a message is none; what comes later is its rest."""
    stranger[0].sendall(b'{"op":')
    with pytest.raises(TimeoutError):
        stranger[1].receive(time.monotonic() + 0.05)
    stranger[0].sendall(b'"x"}\n')
    assert stranger[1].receive(time.monotonic() + LONG) == ({"op": "x"}, [])


def test_a_message_that_trickles_without_a_pause(
    stranger: tuple[socket.socket, LocalChannel],
) -> None:
    """There is always something to read, and the deadline counts all the same."""
    ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not ended.is_set():
                stranger[0].send(b" ")

    stranger[1].longest = 1 << 30
    sender = threading.Thread(target=trickle)
    sender.start()
    with pytest.raises(TimeoutError):
        stranger[1].receive(time.monotonic() + 0.1)
    ended.set()
    stranger[1].close()
    sender.join(LONG)


def test_an_interrupt_in_a_message_ends_the_stream(pair: Pair) -> None:
    """A script may catch it and go on; the agent must not read what follows as the rest."""
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    sender = threading.get_ident()

    def interrupt() -> None:
        select.select([pair[1]], [], [], LONG)  # some of it is there; for the rest there is no room
        signal.pthread_kill(sender, signal.SIGALRM)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pair[0].send({"text": "x" * (4 << 20)})
    finally:
        interrupting.join()
        signal.signal(signal.SIGALRM, handler)
    with pytest.raises(BrokenPipeError):
        pair[0].send({"op": "later"}, seconds=LONG)
    assert pair[1].receive() is None


class Interrupted(socket.socket):
    """A socket on which Ctrl-C comes as soon as the kernel has taken a part of a message."""

    def sendmsg(self, *args: Any) -> int:
        """Send, and never return."""
        assert super().sendmsg(*args) > 0
        raise KeyboardInterrupt


def test_an_interrupt_behind_the_system_call_ends_the_stream() -> None:
    """How much of the message is on its way is not known then."""
    one, other = socket.socketpair()
    with other, Interrupted(fileno=one.detach()) as interrupted:
        channel = LocalChannel(interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.send({"text": "x" * (4 << 20)})
        with pytest.raises(BrokenPipeError):
            channel.send({"op": "later"}, seconds=LONG)
        channel.close()


def test_a_message_sent_in_part_ends_the_stream(pair: Pair) -> None:
    """No later message is read as its rest, and what came can still be read."""
    pair[1].send({"op": "came"})
    with pytest.raises(TimeoutError):
        pair[0].send({"text": "x" * (4 << 20)}, seconds=0.05)
    with pytest.raises(BrokenPipeError):
        pair[0].send({"op": "later"})
    assert pair[1].receive() is None
    assert pair[0].receive() == ({"op": "came"}, [])


def test_closing_wakes_those_who_wait(pair: Pair) -> None:
    """One that sends, and one that reads."""
    ended: list[object] = []

    def send() -> None:
        with pytest.raises(OSError):
            pair[0].send({"text": "x" * (4 << 20)})
        ended.append("sender")

    def receive() -> None:
        try:
            ended.append(pair[0].receive())
        except OSError:
            ended.append(None)

    waiting = [threading.Thread(target=send), threading.Thread(target=receive)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: pair[0]._sending.locked())
    pair[0].close()
    for thread in waiting:
        thread.join(LONG)
    assert sorted(map(str, ended)) == ["None", "sender"]


def test_a_fork_closes_its_own_end_alone(pair: Pair) -> None:
    """The stream goes on in the process that it was forked from."""
    pid = os.fork()
    if pid == 0:
        pair[0].close_here()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    pair[0].send({"op": "x"})
    assert pair[1].receive() == ({"op": "x"}, [])


def test_a_program_of_another_version_can_read_it(pair: Pair) -> None:
    """One line for each message."""
    pair[0].send({"error": "größer"})
    raw = pair[1]._sock
    assert json.loads(raw.recv(100).split(b"\n")[0]) == {"error": "größer"}


def test_a_path_longer_than_an_address(tmp_path: Path) -> None:
    """Both ends find it, and keep no descriptor of its directory."""
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    before = len(descriptors())
    with listen(directory / "x.sock", 1) as listener, connect(directory / "x.sock", LONG) as client:
        server, _ = listener.accept()
        server.close()
        assert client.recv(1) == b""
    assert len(descriptors()) == before
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "none", LONG)
