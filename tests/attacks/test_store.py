"""Nonsense in the store of a job's agents, and at its port.

torchrun's agents unpickle what stands in their store, so a stranger there needs no nonsense; what
it writes otherwise ends them in a traceback.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from elaunch.errors import StoreUnreachable
from elaunch.rendezvous.coordinatorstate import CoordinatorState
from elaunch.rendezvous.decide.view import Rules
from elaunch.rendezvous.plan import NodeStatus
from elaunch.rendezvous.records import RecordError, decode_agent
from elaunch.store.protocol import Change, Store
from elaunch.store.tcp import client, connection, host
from elaunch.store.tcp import store as tcpstore
from elaunch.store.tcp.host import hang_up_on_silent
from elaunch.text import duration
from tests.attacks.stranger import Stranger, stranger
from tests.attacks.test_plans import job
from tests.launching import Launcher, wait_until

NONSENSE = [
    "NaN", "Infinity", "-Infinity", "-1", "1e999", "1" + 400 * "0", "true", '"5"', "null", "[]",
    "{}", '"\\ud800"',
]  # fmt: skip


@pytest.fixture
def hosted(port: int) -> Iterator[tuple[Store, Stranger]]:
    """Return a store that is hosted here, and a stranger's connection to it."""
    listening = socket.create_server(("127.0.0.1", port))
    with (
        closing(client.host(listening, "job", timeout=20.0)) as store,
        stranger(port, "job") as other,
    ):
        yield store, other


@pytest.mark.parametrize("age", NONSENSE)
def test_ages_that_are_none(age: str) -> None:
    """An entry with such an age is passed over, the others are read."""
    raw = f'{{"aaaaaa": 1.5, "bbbbbb": {age}, "\\ud800": 2, "a b": 1}}'.encode()
    assert tcpstore._ages(raw) == {"aaaaaa": 1.5}


@pytest.mark.parametrize("raw", [*NONSENSE, "{", "[" * 100_000])
def test_ages_that_are_no_object(raw: str) -> None:
    """Nobody is there."""
    assert tcpstore._ages(raw.encode()) == {}


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_length_of_time_that_is_none(seconds: float) -> None:
    """It is printed as not known."""
    assert duration(seconds) == "?"


@pytest.mark.parametrize("store", [5, "h:1", ["h"], ["h", "1"], ["h", 0], ["", 1], ["h", 10**400]])
def test_a_store_that_says_nonsense_of_itself(store: object) -> None:
    """It counts as no store of elaunch, for agents of the static backend and for status."""
    said = {"elaunch": 1, "run_id": "job", "boot": "", "store": store}
    assert connection._read_identity(json.dumps(said).encode()) is None
    assert connection._read_identity(json.dumps(said | {"store": ["h", 1]}).encode()) is not None


@pytest.mark.parametrize("run_id", ["\\ud800", "a\\nb", "\\u001b[2J", "x" * 2000])
def test_a_run_id_that_is_none(run_id: str) -> None:
    """It is not printed, nor compared."""
    said = f'{{"elaunch": 1, "run_id": "{run_id}", "boot": ""}}'
    assert connection._read_identity(said.encode()) is None


@pytest.mark.parametrize("value", NONSENSE)
def test_records_with_numbers_that_are_none(value: str) -> None:
    """They are refused in words, whichever field it is."""
    for name in NodeStatus.__struct_fields__:
        raw = f'{{"elaunch":2,"kind":"agent","host":"h","{name}":{value}}}'.encode()
        with pytest.raises(RecordError, match="the record of a1 is refused"):
            decode_agent(raw, None, "a1")
    failure = f'{{"rank": 1, "exitcode": 1, "age": {value}}}'
    raw = f'{{"elaunch":2,"kind":"agent","failure":{failure}}}'.encode()
    with pytest.raises(RecordError, match="the record of a1 is refused"):
        decode_agent(raw, None, "a1")


def test_a_key_in_the_place_of_the_inbox(hosted: tuple[Store, Stranger]) -> None:
    """The host is woken by it, removes it, and goes on; it does not spin."""
    store, other = hosted
    other.put("in", b"x")
    wait_until(lambda: other.get("in") == b"", 20.0, "it is removed")
    store.enrol("aa", b"a record", 60.0)
    wait_until(lambda: set(store.members()) == {"aa"}, 20.0, "notices are read")


@pytest.mark.slow
def test_it_costs_little_to_be_disturbed_like_that(hosted: tuple[Store, Stranger]) -> None:
    """One key after the other: a pause between each two looks."""
    _, other = hosted
    began, until = time.process_time(), time.monotonic() + 1.5
    rounds = 0
    while time.monotonic() < until:
        other.put("in", b"x")
        rounds += other.get("in") == b""
        time.sleep(0.02)
    assert time.process_time() - began < 1.0 and rounds < 60


@pytest.mark.slow
def test_a_follower_that_is_woken_for_nothing(hosted: tuple[Store, Stranger], port: int) -> None:
    """A version that is there and not the newest wakes an agent five times a second at most."""
    _, other = hosted
    other.put("b/1", b"x")
    with closing(client.connect("127.0.0.1", port, "job", deadline=20.0)) as store:
        began = time.process_time()
        assert store.follow(0, 1.5) is None
        assert time.process_time() - began < 0.75


def test_thousands_of_refused_records_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The first ones by name, then one line for each ten times as many."""
    state = CoordinatorState("me", Rules(1, 2), None, None, lambda: ("job", 1.0))
    changes = [Change(f"n{number:05}", b"nonsense", "put") for number in range(2000)]
    with caplog.at_level(logging.WARNING):
        state.on_changes(changes, 0.0)
        state.on_changes(changes, 1.0)
    assert len(caplog.messages) == 8
    assert caplog.messages[-1].startswith(
        "the records of 1000 agents were refused so far; the last: "
    )


@pytest.mark.slow
def test_silent_connections_are_ended(hosted: tuple[Store, Stranger], port: int) -> None:
    """Those that never said anything, and those that said something once; not those that talk."""
    store, other = hosted
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)
        ]
        silent[0].sendall(b"\x00")
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            assert other.get("nothing") == b""
        assert hang_up_on_silent(port, silent=1.0) >= 40
        for sock in silent:
            sock.settimeout(20.0)
            assert sock.recv(1) == b""
        assert other.get("nothing") == b""
    store.enrol("aa", b"a record", 60.0)
    wait_until(lambda: set(store.members()) == {"aa"}, 20.0, "the host goes on")


@pytest.mark.slow
def test_a_host_without_a_descriptor_goes_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot look for silent connections then; members come and go all the same."""
    tried = threading.Event()

    def look(port: int) -> int:
        tried.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(host, "hang_up_on_silent", look)
    monkeypatch.setattr(host, "IDLE_EVERY", 0.3)
    listening = socket.create_server(("127.0.0.1", port))
    with closing(client.host(listening, "job", timeout=20.0)) as store:
        store.enrol("aa", b"a record", 0.5)
        assert tried.wait(20.0)
        wait_until(lambda: not store.members(), 20.0, "it is missed")
        store.enrol("bb", b"a record", 60.0)
        wait_until(lambda: set(store.members()) == {"bb"}, 20.0, "the host goes on")


def test_no_more_connections_than_there_is_room_for(
    hosted: tuple[Store, Stranger], port: int
) -> None:
    """The most silent ones go."""
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_until(lambda: len(os.listdir("/proc/self/fd")) > 60, 20.0, "they are accepted")
        time.sleep(0.1)
        assert hang_up_on_silent(port, silent=600.0, most=10) >= 20


@pytest.mark.slow
def test_status_of_a_store_with_nonsense(elaunch: Launcher, port: int, tmp_path: object) -> None:
    """It says what it can, or one line; the job goes on. torchrun: it has no status."""
    script = elaunch.directory / "waits.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(120)\n")
    running = elaunch.start(job(port, str(script)))
    running.wait_for_line("up", 60.0)
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    with stranger(port, "job") as other, stranger(port, "") as whole:
        for ages in (*NONSENSE, *(f'{{"aaaaaa": {age}}}' for age in NONSENSE)):
            other.put("ages", ages.encode())
        # Until the host writes the ages again, nobody knows that the agent is there.
        shown = elaunch.run(["status", *place])
        assert "Traceback" not in shown.stderr and shown.returncode == 0
        running_again = lambda: "RUNNING" in elaunch.run(["status", *place]).stdout  # noqa: E731
        wait_until(running_again, 60.0, "the ages are those of the host again")
        whole._prefix = ""
        said = {"elaunch": 1, "run_id": "job", "boot": "x", "store": 5}
        whole.put("elaunch", json.dumps(said).encode())
        done = elaunch.run(["status", *place])
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert "is no store of elaunch" in done.stderr
    assert running.process.poll() is None


def test_nobody_answers_is_an_error(port: int) -> None:
    """As before any nonsense."""
    with pytest.raises(StoreUnreachable):
        client.identify("127.0.0.1", port, 0.5)
