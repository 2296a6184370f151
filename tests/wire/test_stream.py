"""elaunch.wire.stream: two processes prove to each other that they belong to one job."""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from elaunch.wire.stream import (
    HELLO,
    MOST_UNPROVED,
    PEER,
    Answering,
    Caller,
    Endpoint,
    StreamListener,
    Unauthenticated,
    Unreached,
    call_up,
    dial,
    session_key,
)
from tests.launching import wait_until

PATIENCE = 100.0


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
            call_up(ours, key, rank, Caller(PEER, 5), time.monotonic() + 30)
    finally:
        thread.join(30)
    if problems:
        raise problems[0]


def test_two_that_know_the_key_learn_who_the_other_is() -> None:
    """And what it wants."""
    listening = Answering(b"key", 2)
    shake(listening, b"key", 2)
    assert listening.caller == (PEER, 5)


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


@pytest.mark.slow
def test_an_answer_is_not_forgotten_when_time_runs_out() -> None:
    """One of another job that then falls silent: the error says both."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1])

        def answer_once() -> None:
            sock, _ = listening.accept()
            answering = Answering(b"other", 2)
            with sock:
                sock.sendall(answering.feed(sock.recv(answering.wanted, socket.MSG_WAITALL)))

        thread = threading.Thread(target=answer_once)
        thread.start()
        until = time.monotonic() + 1.0
        with pytest.raises(Unreached, match=r"not of this job.*; then no answer") as caught:
            dial(endpoint, lambda: b"key", 2, Caller(PEER, 5), until, key_may_change=True)
        thread.join()
    assert caught.value.how == "busy"


class Listening:
    """A listener of number 1, and the connections that it has let in."""

    def __init__(self, patience: float = 10.0) -> None:
        self.let_in: list[tuple[socket.socket, Caller]] = []
        self.stream = StreamListener("listens", self._admit, patience=patience)
        self.stream.key = b"the job's key"
        bound = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = bound.getsockname()[1]
        self.stream.start([bound], 1)

    def _admit(self, sock: socket.socket, caller: Caller) -> None:
        self.let_in.append((sock, caller))

    def dial(self, key: bytes = b"the job's key") -> socket.socket:
        """Connect as number 2."""
        until = time.monotonic() + PATIENCE
        return dial(Endpoint("127.0.0.1", self.port), lambda: key, 1, Caller(PEER, 2), until)


@contextmanager
def listening(patience: float = 10.0) -> Iterator[Listening]:
    """Listen, and free everything."""
    made = Listening(patience)
    try:
        yield made
    finally:
        made.stream.close()
        for sock, _ in made.let_in:
            sock.close()


def test_who_knows_the_key_is_let_in() -> None:
    """And can be spoken to from the first byte on; who knows another learns that at once."""
    with listening() as made:
        with pytest.raises(Unreached, match="not of this job"):
            made.dial(b"another job's key")
        with made.dial() as ours:
            ours.sendall(b"first word")
            wait_until(lambda: made.let_in, PATIENCE)
            ((theirs, caller),) = made.let_in
            theirs.settimeout(PATIENCE)
            assert (theirs.recv(100), caller) == (b"first word", (PEER, 2))


class Bomb:
    """What a stranger would like to have unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def answer_to(port: int, data: bytes) -> bytes:
    """Send ``data``, and return what comes before the listener hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        found = b""
        with suppress(OSError):  # hung up on already
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(4096):
                found += chunk
        return found


def test_strangers_get_nothing_and_disturb_nobody() -> None:
    """Neither a pickle, nor a browser, nor noise, nor a process that knows no key."""
    chance = random.Random(4)
    words = [
        pickle.dumps(Bomb()),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HELLO[:4],
        *(chance.randbytes(n) for n in (1, 40, 104, 100_000)),
    ]
    with listening() as made:
        for word in words:
            assert answer_to(made.port, word) == b""
        for word in (pickle.dumps(Bomb()), chance.randbytes(40), chance.randbytes(1000)):
            assert len(answer_to(made.port, HELLO + chance.randbytes(32) + word)) in (0, 64)
        assert not made.let_in
        made.dial().close()


def test_a_flood_of_half_open_connections_keeps_nobody_out() -> None:
    """And does not eat the process's descriptors."""
    with listening() as made:
        before = len(os.listdir("/proc/self/fd"))
        flood = [
            socket.create_connection(("127.0.0.1", made.port), timeout=PATIENCE)
            for _ in range(3 * MOST_UNPROVED)
        ]
        wait_until(lambda: len(made.stream._pending) == MOST_UNPROVED, PATIENCE)
        made.dial().close()
        assert len(os.listdir("/proc/self/fd")) - before - len(flood) <= MOST_UNPROVED + 5
        for sock in flood:
            sock.close()


def test_who_says_nothing_is_hung_up_on() -> None:
    """After a deadline."""
    with (
        listening(0.1) as made,
        socket.create_connection(("127.0.0.1", made.port), timeout=PATIENCE) as sock,
    ):
        sock.sendall(HELLO)
        assert sock.recv(1) == b""


def test_closing_ends_the_thread_and_frees_everything() -> None:
    """Twice does no harm."""
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    made = Listening()
    with socket.create_connection(("127.0.0.1", made.port)):
        made.stream.close()
        made.stream.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
