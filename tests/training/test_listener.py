"""elaunch.training.channel.listener: who is let in, and what strangers can do."""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from elaunch.training.channel.listener import Listener
from elaunch.training.channel.meeting import RankRecord
from elaunch.training.channel.mesh import Dialer, ask
from elaunch.wire.stream import HELLO, LINK, MOST_UNPROVED, Unreached
from tests.launching import wait_until
from tests.training.channelrig import PATIENCE

KEY = b"the job's key"


def member(rank: int, listener: Listener | None = None, machine: str = "here") -> RankRecord:
    """Return the record of a rank."""
    return RankRecord(
        rank=rank,
        node=rank,
        local=0,
        local_size=1,
        host="h",
        pid=7,
        machine=machine,
        unix=listener.unix if listener else "",
        addr="127.0.0.1",
        addr_given=True,
        port=listener.port if listener else 0,
    )


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Rank 1 of 4; it listens on both kinds of socket."""
    made = Listener(1, 4)
    made.bind("127.0.0.1")
    made.start(KEY, lambda: {"calls": {"all": 3}, "text": ": computes"})
    yield made
    made.close()


def dial(listener: Listener, machine: str, key: bytes = KEY) -> socket.socket:
    """Connect as rank 2; another ``machine`` goes by TCP."""
    dialer = Dialer(member(2), key)
    return dialer.dial(member(1, listener, machine), LINK, time.monotonic() + PATIENCE)


WAYS = pytest.mark.parametrize("machine", ["here", "elsewhere"], ids=["unix", "tcp"])


@WAYS
def test_a_neighbour_is_handed_over_with_its_rank(listener: Listener, machine: str) -> None:
    """And can be spoken to from the first byte on."""
    with dial(listener, machine) as ours:
        ours.sendall(b"first word")
        wait_until(lambda: listener._accepted, PATIENCE)
        assert listener.take(3) is None
        theirs = listener.take(2)
        assert theirs is not None
        with theirs:
            theirs.settimeout(PATIENCE)
            assert theirs.recv(100) == b"first word"


@WAYS
def test_another_jobs_process_is_not_let_in(listener: Listener, machine: str) -> None:
    """It learns that at once, and is told apart from a rank that is there."""
    with pytest.raises(Unreached, match="not of this job"):
        dial(listener, machine, b"another job's key")
    assert not listener._accepted


@WAYS
def test_it_answers_what_this_rank_does(listener: Listener, machine: str) -> None:
    """Where it is gone, that is known at once."""
    asked = member(1, listener, machine)
    dialer = Dialer(member(2), KEY)
    (answer,) = ask(dialer, [asked], time.monotonic() + PATIENCE)
    assert (str(answer), answer.there, answer.calls) == (
        "rank 1 (host h, pid 7): computes",
        True,
        {"all": 3},
    )
    listener.close()
    (answer,) = ask(dialer, [asked], time.monotonic() + PATIENCE)
    assert answer.gone and str(answer).endswith(" has ended, or has closed its context")


class Bomb:
    """What a stranger would like to have unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def stranger(port: int, data: bytes) -> bytes:
    """Send ``data``, and return what comes before the listener hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        said = b""
        with suppress(OSError):  # hung up on already
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(4096):
                said += chunk
        return said


def test_strangers_get_nothing_and_disturb_nobody(listener: Listener) -> None:
    """Neither a pickle, nor a browser, nor noise, nor a rank that knows no key."""
    chance = random.Random(4)
    words = [
        pickle.dumps(Bomb()),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HELLO[:4],
        *(chance.randbytes(n) for n in (1, 40, 104, 100_000)),
    ]
    for word in words:
        assert stranger(listener.port, word) == b""
    for word in (pickle.dumps(Bomb()), chance.randbytes(40), chance.randbytes(1000)):
        assert len(stranger(listener.port, HELLO + chance.randbytes(32) + word)) in (0, 64)
    assert not listener._accepted
    dial(listener, "elsewhere").close()


def test_a_flood_of_half_open_connections_keeps_nobody_out(listener: Listener) -> None:
    """And does not eat the process's descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    flood = [
        socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE)
        for _ in range(3 * MOST_UNPROVED)
    ]
    wait_until(lambda: len(listener._stream._pending) == MOST_UNPROVED, PATIENCE)
    dial(listener, "elsewhere").close()
    ours = len(flood)
    held = len(os.listdir("/proc/self/fd")) - before - ours
    assert held <= MOST_UNPROVED + 5
    for sock in flood:
        sock.close()


def test_a_stranger_that_says_nothing_is_hung_up_on() -> None:
    """After a deadline."""
    made = Listener(1, 4, patience=0.1)
    made.bind("127.0.0.1")
    made.start(KEY, dict)
    with socket.create_connection(("127.0.0.1", made.port), timeout=PATIENCE) as sock:
        sock.sendall(HELLO)
        assert sock.recv(1) == b""
    made.close()


def test_closing_ends_the_thread_and_frees_everything() -> None:
    """Twice does no harm; before it has listened neither."""
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    made = Listener(0, 2)
    made.close()
    made.bind("127.0.0.1")
    made.start(KEY, dict)
    with socket.create_connection(("127.0.0.1", made.port)):
        made.close()
        made.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_an_address_that_this_machine_does_not_have_is_listened_for_everywhere() -> None:
    """Others reach it by a translation of addresses."""
    made = Listener(0, 2)
    made.bind("192.0.2.7")
    assert made.port
    made.close()
