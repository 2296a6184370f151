"""elaunch.wire.stream: two processes prove to each other that they belong to one job."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from elaunch.wire.stream import (
    HELLO,
    LINK,
    Answering,
    Caller,
    Endpoint,
    Unauthenticated,
    Unreached,
    call_up,
    dial,
    session_key,
)


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
            dial(endpoint, lambda: b"key", 2, Caller(LINK, 5), until, key_may_change=True)
        thread.join()
    assert caught.value.how == "busy"
