"""Nonsense in the store of a job's agents, and at its port.

torchrun's agents unpickle what stands in their store, so a stranger there needs no nonsense; what
it writes otherwise ends them in a traceback.
"""

from __future__ import annotations

import json
import logging
import random
import socket
from collections.abc import Iterator
from contextlib import closing, nullcontext

import pytest

from elaunch.errors import LeaseLost, StoreUnreachable
from elaunch.rendezvous.coordinatorstate import CoordinatorState
from elaunch.rendezvous.decide.view import Rules
from elaunch.rendezvous.plan import NodeStatus
from elaunch.rendezvous.records import RecordError, decode_agent
from elaunch.store.protocol import Change, Post, Store
from elaunch.store.tcp import client, connection, host, messages, wire
from elaunch.store.tcp.messages import ReadMembers, ReadPlan, ReadShared, RenewEntry
from elaunch.text import duration
from tests.attacks.stranger import stranger
from tests.attacks.test_plans import job
from tests.launching import Launcher

NONSENSE = [
    "NaN", "Infinity", "-Infinity", "-1", "1e999", "1" + 400 * "0", "true", '"5"', "null", "[]",
    "{}", '"\\ud800"',
]  # fmt: skip


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_length_of_time_that_is_none(seconds: float) -> None:
    """It is printed as not known."""
    assert duration(seconds) == "?"


@pytest.mark.parametrize("store", [0, "1", "h:1", ["h", 1], True, 1.5, 10**400])
def test_a_store_that_says_nonsense_of_itself(store: object) -> None:
    """It counts as no store of elaunch, for agents of the static backend and for status."""
    said = {"elaunch": 1, "run_id": "job", "boot": "", "store": store}
    assert connection._read_identity(json.dumps(said).encode()) is None
    assert connection._read_identity(json.dumps(said | {"store": 1}).encode()) is not None


@pytest.mark.parametrize("run_id", ["\\ud800", "a\\nb", "\\u001b[2J", "x" * 2000])
def test_a_run_id_that_is_none(run_id: str) -> None:
    """It is not printed, nor compared."""
    said = f'{{"elaunch": 1, "run_id": "{run_id}", "boot": ""}}'
    assert connection._read_identity(said.encode()) is None


@pytest.mark.parametrize("value", NONSENSE)
def test_records_with_numbers_that_are_none(value: str) -> None:
    """They are refused in words, whichever field it is."""
    for name in NodeStatus.__struct_fields__:
        raw = f'{{"elaunch":3,"kind":"agent","host":"h","{name}":{value}}}'.encode()
        with pytest.raises(RecordError, match="the record of a1 is refused"):
            decode_agent(raw, None, "a1")
    failure = f'{{"rank": 1, "exitcode": 1, "age": {value}}}'
    raw = f'{{"elaunch":3,"kind":"agent","failure":{failure}}}'.encode()
    with pytest.raises(RecordError, match="the record of a1 is refused"):
        decode_agent(raw, None, "a1")


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


@pytest.fixture
def hosted(port: int) -> Iterator[Store]:
    """Return a store that is hosted here, of whose job the agent "host" leads."""
    listening = socket.create_server(("127.0.0.1", port))
    with closing(client.host(listening, "job", shared=b"a key")) as store:
        store.enrol("host", b"", 60.0)
        assert store.await_leadership("host", 20.0)
        assert store.publish(1, b"a plan")
        yield store


def test_a_stranger_writes_no_plan(hosted: Store, port: int) -> None:
    """Nor removes it, nor what all share."""
    with stranger(port, "job") as other:
        other.store.enrol("aa", b"", 60.0)
        assert not other.store.await_leadership("aa", 0.0)
        assert not other.store.publish(2, b"another")
        assert other.store.shared(b"another key") == hosted.shared() == b"a key"
        assert other.plan() == (1, b"a plan")
    assert hosted.latest() == Post(1, b"a plan")


def test_a_stranger_can_have_no_more_members_than_there_may_be(
    hosted: Store, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are there stay."""
    monkeypatch.setattr(host, "MOST_ENTRIES", 3)
    with stranger(port, "job") as other:
        for number in range(5):
            name = f"a{number}"
            refused = pytest.raises(LeaseLost) if number > 1 else nullcontext()
            with refused, closing(client.connect("127.0.0.1", port, "job", deadline=20.0)) as one:
                one.enrol(name, b"", 60.0)
        assert sorted(other.store.members()) == ["a0", "a1", "host"]


def test_bytes_of_a_stranger_do_not_stop_the_host(hosted: Store, port: int) -> None:
    """Before, behind and instead of what opens a connection; thousands of times."""
    rng = random.Random(7)
    opening = wire.VALIDATE + wire.PING + b"1234" + wire.get(connection.IDENTITY)
    asked = [
        messages.frame(one)
        for one in (ReadMembers(), ReadPlan(0, 0), RenewEntry("host"), ReadShared(b""))
    ]
    with stranger(port, "job") as other:
        for number in range(400):
            sent = bytearray(opening + b"".join(rng.choices(asked, k=6)))
            for _ in range(number % 4):
                sent[rng.randrange(len(sent))] = rng.randrange(256)
            del sent[rng.randrange(1, len(sent) + 1) :]
            with socket.create_connection(("127.0.0.1", port), 20.0) as sock:
                sock.sendall(sent)
            if number % 20 == 0:
                assert other.plan() == (1, b"a plan")
        assert sorted(other.store.members()) == ["host"]
    assert hosted.publish(2, b"another plan")


@pytest.mark.slow
def test_status_of_a_job_with_records_of_a_stranger(elaunch: Launcher, port: int) -> None:
    """It says what it can, or one line; the job goes on. torchrun: it has no status."""
    script = elaunch.directory / "waits.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(120)\n")
    running = elaunch.start(job(port, str(script)))
    running.wait_for_line("up", 60.0)
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    for number, record in enumerate(NONSENSE):
        with closing(client.connect("127.0.0.1", port, "job", deadline=20.0)) as other:
            other.enrol(f"bb{number}", record.encode(), 60.0)
    shown = elaunch.run(["status", *place])
    assert "Traceback" not in shown.stderr and shown.returncode == 0
    assert "RUNNING" in shown.stdout
    assert running.process.poll() is None


def test_nobody_answers_is_an_error(port: int) -> None:
    """As before any nonsense."""
    with pytest.raises(StoreUnreachable):
        client.identify("127.0.0.1", port, 0.5)


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_store_of_a_stranger_sends_status_nowhere(elaunch: Launcher, backend: str) -> None:
    """Whatever it says of itself: status talks to the machine that the command line names."""
    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        said = {"elaunch": 1, "run_id": "job", "boot": "", "store": elsewhere.getsockname()[:2]}
        store.set(connection.IDENTITY, json.dumps(said))
        place = [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{store.port}"]
        shown = elaunch.run(["status", *place, "--rdzv-id=job"])
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    assert shown.returncode == 69
    assert f"127.0.0.1:{store.port} is no store of elaunch" in shown.stderr
